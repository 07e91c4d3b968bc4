"""`trn[01-16].lab` as the hosts that it stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_HOSTS = 4096
_MAX_NAME = 100  # characters

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_NUMBER = re.compile(r"([0-9]{1,9})")
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand(text: str) -> tuple[str, ...]:
    """The hosts in the order of their numbers; zeros in front of a range's first number pad all of it.

    Raises:
        ValueError: (message, hint) where the range cannot be read or is too large.
    """
    pieces = _RANGE.split(text)  # text, range, text, range, ..., text
    if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
        raise ValueError("has a bracket without its partner", "a range is written like trn[01-16].lab")
    if len(pieces) > 1 and sum(map(len, pieces[::2])) + len(pieces) // 2 > _MAX_NAME:
        raise ValueError("is too long for a host's name", f"a host is at most {_MAX_NAME} letters, digits, '.', '_' and '-'")
    hosts = [pieces[0]]
    for numbers, tail in zip(pieces[1::2], pieces[2::2], strict=True):
        expanded = _numbers(numbers, at_most=MAX_HOSTS // len(hosts))
        hosts = [host + number + tail for host in hosts for number in expanded]
    return tuple(hosts)


def folded(hosts: Sequence[str]) -> list[str]:
    """What `expand` makes these hosts of, in few texts: those that follow each other and differ in one number are one."""
    runs: list[tuple[list[list[str]], int]] = []  # the hosts of each, and the place in which they differ
    for host in hosts:
        split = _NUMBER.split(host)  # text, number, text, number, ..., text
        place = _differing(runs[-1][0][-1], split) if runs else None
        if place is not None and (len(runs[-1][0]) == 1 or runs[-1][1] == place):
            runs[-1][0].append(split)
            runs[-1] = (runs[-1][0], place)
        else:
            runs.append(([split], 0))
    return [_one_text(run, place) for run, place in runs]


def _differing(one: Sequence[str], other: Sequence[str]) -> int | None:
    """The place of the number that alone is another."""
    if len(one) != len(other):
        return None
    places = [place for place, (old, new) in enumerate(zip(one, other, strict=True)) if old != new]
    return places[0] if len(places) == 1 and places[0] % 2 else None


def _one_text(run: Sequence[Sequence[str]], place: int) -> str:
    first = run[0]
    if len(run) == 1:
        return "".join(first)
    return f"{''.join(first[:place])}[{','.join(_ranges([split[place] for split in run]))}]{''.join(first[place + 1 :])}"


def _ranges(numbers: Sequence[str]) -> list[str]:
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number == _after(*runs[-1]):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [first if first == last else f"{first}-{last}" for first, last in runs]


def _after(first: str, last: str) -> str:
    return str(int(last) + 1).zfill(len(first) if first.startswith("0") else 0)


def _numbers(text: str, *, at_most: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"has the range [{text}], which cannot be read", "a range is written like [01-16] or [1,3-5]")
        first, last = found[1], found[2] or found[1]
        if int(first) > int(last):
            raise ValueError(f"has the range {first}-{last}, which counts down", f"write {last}-{first}")
        if last.startswith("0") and len(last) != len(first):
            raise ValueError(f"has the range {first}-{last}, padded to two widths", f"write {first.zfill(len(last))}-{last}")
        if len(numbers) + int(last) - int(first) + 1 > at_most:
            raise ValueError(f"stands for more than {MAX_HOSTS} hosts", "check the range")
        width = len(first) if first.startswith("0") else 0
        numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return numbers
