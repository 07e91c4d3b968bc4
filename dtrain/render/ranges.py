"""Many numbers or names in a few characters, in the notation of a cluster file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_DIGITS = re.compile(r"([0-9]+)")


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0-3,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def collapsed(texts: Sequence[str], *, at_least: int = 2, at_most: int | None = None) -> str:
    """Texts that count upwards as one: trn[01-16].lab, box.

    Args:
        at_least: how many must count upwards to be written as one.
        at_most: how many are written; what is left out is counted.
    """
    written: list[str] = []
    num_written = 0
    while num_written < len(texts):
        if at_most is not None and len(written) == at_most:
            written.append(f"and {len(texts) - num_written} more")
            break
        run = _run(texts, num_written)
        if run < at_least:
            written.append(texts[num_written])
            num_written += 1
            continue
        first, last = (_DIGITS.split(texts[index]) for index in (num_written, num_written + run - 1))
        written.append("".join(old if old == new else f"[{old}-{new}]" for old, new in zip(first, last, strict=True)))
        num_written += run
    return ", ".join(written)


def _run(texts: Sequence[str], begin: int) -> int:
    """How many texts from there on count upwards at one place."""
    end, place = begin + 1, None
    while end < len(texts):
        found = _step(_DIGITS.split(texts[end - 1]), _DIGITS.split(texts[end]))
        if found is None or place not in (None, found):
            break
        end, place = end + 1, found
    return end - begin


def _step(one: Sequence[str], next_one: Sequence[str]) -> int | None:
    """The place at which the second counts one further than the first, all else being alike."""
    if len(one) != len(next_one):
        return None
    differing = [place for place, (old, new) in enumerate(zip(one, next_one, strict=True)) if old != new]
    if len(differing) != 1 or differing[0] % 2 == 0:  # even places are what stands between the numbers
        return None
    old, new = one[differing[0]], next_one[differing[0]]
    is_padded = old.startswith("0") and len(old) > 1
    return differing[0] if int(new) == int(old) + 1 and (len(old) == len(new) or not is_padded) else None
