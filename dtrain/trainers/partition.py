"""Which layers of a model make a stage. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    name: str
    num_parameters: int


def partition(layers: Sequence[Layer], stages: int, method: str) -> tuple[tuple[Layer, ...], ...]:
    """The layers of each stage: consecutive, at least one each.

    Args:
        method: `uniform` gives every stage as many layers (they differ by one at most); `parameters` makes the stage with
            the most parameters, which all others wait for, as small as it can be, and the others alike.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if not 1 <= stages <= len(layers):
        raise ValueError(f"{stages} stages of a model with {len(layers)} layers; a stage has at least one layer: at most {len(layers)}")
    if method == "uniform":
        ends = [len(layers) * (stage + 1) // stages for stage in range(stages)]
    else:
        ends = _balanced([layer.num_parameters for layer in layers], stages)
    return tuple(tuple(layers[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))


def _balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Where each stage ends, for the least maximum, and among those for the least sum of squares."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    maximum = _ends(sums, stages, most=math.inf, join=max)[0]
    return _ends(sums, stages, most=maximum, join=lambda so_far, cost: so_far + cost * cost)[1]


def _ends(sums: Sequence[int], stages: int, *, most: float, join: Callable[[float, int], float]) -> tuple[float, list[int]]:
    """The least total cost and its ends; `join` adds a stage's cost to that of the stages before, none costs above `most`."""
    best: list[tuple[float, list[int]]] = [(math.inf if layers else 0.0, []) for layers in range(len(sums))]
    for _ in range(stages):
        longer: list[tuple[float, list[int]]] = [(math.inf, []) for _ in sums]
        for end in range(1, len(sums)):
            for begin in range(end):
                cost = sums[end] - sums[begin]
                total = join(best[begin][0], cost)
                if cost <= most and total < longer[end][0]:
                    longer[end] = total, [*best[begin][1], end]
        best = longer
    return best[-1]
