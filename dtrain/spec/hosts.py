"""`trn[01-16].lab` as the hosts that it stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_HOSTS = 4096
_MAX_NAME = 100  # characters

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)
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


def folded(hosts: Sequence[str]) -> str:
    """What `expand` makes these hosts of, which differ in their last number alone."""
    split = [_around_number(host) for host in hosts]
    head, _, tail = split[0]
    return f"{head}[{','.join(_ranges([number for _, number, _ in split]))}]{tail}" if len(hosts) > 1 else hosts[0]


def alike(host: str) -> tuple[str, str] | None:
    """What two hosts have in common that `folded` takes together; None where a host has no number."""
    head, number, tail = _around_number(host)
    return (head, tail) if number else None


def _around_number(host: str) -> tuple[str, str, str]:
    found = _LAST_NUMBER.fullmatch(host)
    return (found[1], found[2], found[3]) if found else (host, "", "")


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
