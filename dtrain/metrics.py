"""What a worker reported, made harmless: its file is the worker's own, and anything may stand in it."""

from __future__ import annotations

import json
from typing import Any

_MOST = 1 << 63  # an integer beyond that counts nothing, and may be too large for a float


def read_metric(line: str | bytes) -> dict[str, Any]:
    """The numbers of a line by name, and under `evaluation` a mapping of printable names to numbers. All else is left out.

    NaN and infinity are numbers: a loss that has become one is shown.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    metric: dict[str, Any] = {name: value for name, value in found.items() if name != "evaluation" and _is_number(value)}
    evaluation = found.get("evaluation")
    if isinstance(evaluation, dict):
        metric["evaluation"] = {name: value for name, value in evaluation.items() if name.isprintable() and _is_number(value)}
    return metric


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST)
