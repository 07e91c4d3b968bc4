"""Which job file `dtrain launch` was meant to run, and the next step where it is none."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from dtrain.cli.selection import COMMAS
from dtrain.errors import InFile, Problem, SpecError
from dtrain.shell_words import shell_word
from dtrain.spec.document import absolute, read_document
from dtrain.spec.job import RUN_KEYS

DEFAULT = Path("job.yaml")
_MOST_FILES = 100  # of the folder, looked into
_MOST_NAMED = 3


def check_job_file(path: Path, *, may_be_node: bool = False) -> None:
    """Raises SpecError where it is a script, the default where there is none, or perhaps the name of a node; all else is told by
    whoever reads it.
    """
    if path.suffix == ".py" and os.path.isfile(path):
        hint = f"write `script: {path}` into a file {DEFAULT}, or let `dtrain init` write one beside it"
        raise SpecError([Problem(InFile(str(path)), "this is a Python script; a job file is wanted", hint)])
    if may_be_node and path.suffix not in (".yaml", ".yml") and not os.path.exists(path):
        raise SpecError([Problem(InFile(str(path)), "there is no such file", COMMAS)])
    if path == DEFAULT and not path.exists():
        raise SpecError([Problem(InFile(str(path)), "there is no such file", _instead(absolute(path).parent))])


def _instead(folder: Path) -> str:
    jobs, clusters = [], []
    for path in islice(sorted((*folder.glob("*.yaml"), *folder.glob("*.yml"))), _MOST_FILES):
        try:
            keys = read_document(path, example="").values
        except SpecError:  # neither
            continue
        if any(key in keys for key in RUN_KEYS):
            jobs.append(path.name)
        elif "instances" in keys:
            clusters.append(path.name)
    if jobs:
        return "did you mean " + " or ".join(f"`dtrain launch {shell_word(name)}`" for name in jobs[:_MOST_NAMED]) + "?"
    written = f"`dtrain init` writes one{' that runs train.py' if (folder / 'train.py').is_file() else ''}"
    if not clusters:
        return written
    return f"{written}; to run it on the machines of {clusters[0]}: `dtrain launch --cluster {shell_word(clusters[0])}`"
