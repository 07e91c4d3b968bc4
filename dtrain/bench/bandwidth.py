"""From times to the figures that people compare: percentiles and bandwidths, as nccl-tests means them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """One message size over all of its iterations; an iteration takes as long as its slowest rank."""

    median_s: float
    min_s: float
    p95_s: float


def summarize(times_s: Sequence[Sequence[float]]) -> Times:
    """From each rank's times, all of the same iterations in the same order.

    The headline is the median: on small messages the mean is 2-5 times that, from the scheduler's ticks.
    """
    assert times_s and times_s[0] and len({len(of_rank) for of_rank in times_s}) == 1
    slowest = sorted(max(of_rank[iteration] for of_rank in times_s) for iteration in range(len(times_s[0])))
    return Times(median_s=percentile(slowest, 50), min_s=slowest[0], p95_s=percentile(slowest, 95))


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed (nearest rank)."""
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def algorithm_bandwidth(size_bytes: int, elapsed_s: float) -> float:
    """Bytes of one rank's buffer per second."""
    return size_bytes / elapsed_s


def bus_bandwidth(size_bytes: int, elapsed_s: float, world_size: int) -> float:
    """Allreduce bus bandwidth in bytes/s: the load on one link in one direction, comparable across world sizes.

    A ring sends 2(n-1)/n of the message over every link (nccl-tests, doc/PERFORMANCE.md).

    Raises:
        ValueError: world_size is below 2, where nothing crosses a link.
    """
    if world_size < 2:
        raise ValueError(f"world size {world_size}: nothing crosses a link, so there is no bus bandwidth")
    return 2 * (world_size - 1) / world_size * algorithm_bandwidth(size_bytes, elapsed_s)
