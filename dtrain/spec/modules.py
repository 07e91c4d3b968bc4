"""Whether a module that a job file names is in its workdir, found out without importing anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from dtrain.spec.mistake import nearest_word

_MAX_FILES = 1000  # of a folder, looked at for a name like the missing one


def missing_module(name: str, workdir: Path) -> tuple[str, str] | None:
    """What is missing of a module whose first part stands in workdir: (cause, hint).

    None where it is there, and where only the nodes can tell: what is not in workdir may be installed on them.
    """
    parts = name.split(".")
    if not (_is_package(workdir / parts[0]) or _is_file(workdir / parts[0])):
        return None
    folder = workdir
    for depth, part in enumerate(parts):
        if depth and _is_file(folder) and not _is_package(folder):
            return f"{'.'.join(parts[:depth])} is a file, not a package, and has no {part} in it", f"name what {folder.name}.py has in it"
        folder /= part
        if not os.path.isdir(folder) and not any(folder.parent.glob(f"{part}.*")):
            file = f"{folder.relative_to(workdir)}.py"
            return f"there is no {'.'.join(parts[: depth + 1])} in workdir", _nearest(
                parts[:depth], part, folder.parent
            ) or f"it is looked for as {file}"
    return None


def _nearest(package: Sequence[str], name: str, folder: Path) -> str | None:
    modules = [path.stem for path in islice(folder.iterdir(), _MAX_FILES) if path.suffix == ".py" or _is_package(path)]
    found = nearest_word(name, [module for module in modules if module.isidentifier() and module != "__init__"])
    return None if found is None else f"did you mean '{'.'.join((*package, found))}'?"


def missing_main(name: str, workdir: Path) -> tuple[str, str] | None:
    """The same for what `python -m` is to run, which wants more of a package."""
    folder = workdir.joinpath(*name.split("."))
    if _is_package(folder) and not any(folder.glob("__main__.*")):
        return f"{name} is a package without a __main__.py", "name one of the modules in it, or write that file"
    return missing_module(name, workdir)


def _is_package(path: Path) -> bool:
    return os.path.isfile(path / "__init__.py")


def _is_file(path: Path) -> bool:
    return os.path.isfile(f"{path}.py")
