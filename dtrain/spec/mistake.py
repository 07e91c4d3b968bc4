"""One mistake in a document, placed by its path, and the search for the word that was meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

Place: TypeAlias = tuple[str | int, ...]  # ("trainer", "batch", "global"), ("args", 2)

MOST_PATH_BYTES = 4095  # that Linux takes as a path

_MAX_FILES = 1000  # of a folder, looked at for a name like the missing one
_MAX_TYPED = 60  # characters of the user's text that a message repeats


@dataclass(frozen=True, slots=True)
class Mistake:
    at: Place
    message: str
    hint: str | None = None
    of_key: bool = False  # it is the key that is wrong, or that holds too little, and not what is typed behind it


def outside(mistakes: Iterable[Mistake], wrong: Collection[Place]) -> list[Mistake]:
    """Those that stand in no item of a list that is known to be wrong, nor are of an item as a whole in which something is: what
    stands in its place there (shape.py) is not the user's.
    """
    items = {at for at in wrong if at and isinstance(at[-1], int)}
    around = {at[:length] for at in wrong for length in range(1, len(at)) if isinstance(at[length - 1], int)}
    return [
        each for each in mistakes if each.at not in around and not any(each.at[:length] in items for length in range(1, len(each.at) + 1))
    ]


def named(at: Place) -> str:
    """A place as a person writes it: `trainer.batch.global`, `args[2]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part if part.isprintable() else typed(part)}" for part in at)
    return text.removeprefix(".")


def typed(text: str) -> str:
    """The user's text for a message: quoted, on one line, shortened."""
    return repr(text if len(text) <= _MAX_TYPED else text[:_MAX_TYPED] + "...")


def path_mistakes(text: str, at: Place) -> list[Mistake]:
    """Of what can be no path anywhere: to look for its millions of folders would take for ever."""
    size = len(text.encode(errors="surrogateescape"))
    if size <= MOST_PATH_BYTES:
        return []
    problem = f"{named(at)} {typed(text)} has {size:,} bytes, too long for a path"
    return [Mistake(at, problem, f"Linux takes {MOST_PATH_BYTES:,} at most")]


def is_text(text: str) -> bool:
    """Whether an argument or variable can carry it: not with a NUL, nor with bytes that the terminal gave but UTF-8 has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def nearest(word: str, words: Iterable[str]) -> str | None:
    """`did you mean 'address'?`, or None where no word is near."""
    found = nearest_word(word, words)
    return None if found is None else f"did you mean '{found}'?"


def nearest_word(word: str, words: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """`at_least` is difflib's ratio, from 0 for nothing in common to 1 for the same letters."""
    by_lower_case = {known.lower(): known for known in words}
    found = difflib.get_close_matches(word.lower()[:100], by_lower_case, n=1, cutoff=at_least)
    return by_lower_case[found[0]] if found else None


def misspelt(keys: Collection[str], at: Place, wrong: Collection[Place]) -> bool:
    """Whether one of the keys that are wrong in the mapping `at` was meant as one of `keys`, which is then not missing."""
    return any(len(place) > len(at) and place[:-1] == at and nearest(str(place[-1]), keys) for place in wrong)


def nearest_file(path: str, written: str = "", *, other_than: str = "") -> str | None:
    """`did you mean 'train.py'?`, from the folder that path names.

    Args:
        written: how the path was, so that the answer can be written in its place.
        other_than: a file that cannot be meant.
    """
    folder, name = os.path.split(path)
    stem, ending = os.path.splitext(name)
    files = [file for file in _files_in(folder or ".") if file != name and os.path.join(folder, file) != other_than]
    alike = [file.removesuffix(ending) for file in files if file.endswith(ending)]  # what all of these share makes none nearer
    found = nearest_word(stem, alike)
    if found is None:
        found, ending = nearest_word(name, [file for file in files if not (ending and file.endswith(ending))]), ""
    return None if found is None else f"did you mean '{os.path.join(os.path.dirname(written.rstrip('/')), found + ending)}'?"


def not_there(path: str | os.PathLike[str]) -> str:
    """How a path is absent: `is not there`, or a link is there and what it points to is not."""
    try:
        return f"is a link to {typed(os.readlink(path))}, which is not there"
    except (OSError, ValueError):
        return "is not there"


def _files_in(folder: str) -> Sequence[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _MAX_FILES)]
    except (OSError, ValueError):
        return []
