"""`__main__.py` of the bundle: `python BUNDLE ENTRY ARG...` runs one entry of dtrain on a node.

Python puts the bundle folder itself first on sys.path, so no dtrain/ folder of a user's can come before it.
"""

import sys


def main() -> int:
    entry, argv = sys.argv[1], sys.argv[2:]
    if entry == "guard":
        from dtrain.node.guard import main as run
    elif entry == "worker":
        from dtrain.node.worker import main as run
    elif entry == "trainer":
        sys.path.insert(1, "")  # the job's working directory: a model of the user's own is imported from there
        from dtrain.trainers.main import main as run
    elif entry == "allreduce":
        from dtrain.bench.allreduce import main as run
    else:
        raise SystemExit(f"dtrain: no entry {entry!r}")
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
