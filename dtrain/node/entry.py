"""`__main__.py` of the bundle: `python BUNDLE ENTRY ARG...` runs one entry of dtrain on a node.

Python puts the bundle folder itself first on sys.path, so no dtrain/ folder of a user's can come before it.
"""

import importlib
import os
import sys

_ENTRIES = {
    "guard": "dtrain.node.guard",
    "worker": "dtrain.node.worker",
    "relay": "dtrain.node.mpi",
    "trainer": "dtrain.trainers.main",
    "allreduce": "dtrain.bench.allreduce",
}


def main() -> int:
    entry, argv = sys.argv[1], sys.argv[2:]
    if entry == "trainer":
        sys.path.insert(1, os.getcwd())  # the job's working directory: a model of the user's own is imported from there
    code = importlib.import_module(_ENTRIES[entry]).main(argv)
    assert isinstance(code, int)
    return code


if __name__ == "__main__":
    sys.exit(main())
