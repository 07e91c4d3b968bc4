"""Test data for an allreduce SUM whose result is exact in any order of summation, and the check of that result.

Of every element two ranks own a part, a whole number in 1..62, and the others give 0. So a rank that is missing, counted
twice or swapped, a shifted buffer and another operation than SUM all show.
"""

from __future__ import annotations

import torch

_CHUNK = 1 << 20  # elements built at once: the int64 numbers in between take 8 bytes each


def contribution(num_elements: int, *, rank: int, world_size: int) -> torch.Tensor:
    """What a rank gives: float32 of shape (num_elements,)."""
    buffer = torch.empty(num_elements)
    for index in torch.split(torch.arange(num_elements), _CHUNK):
        first, second = _owners(index, world_size)
        part = _first_part(index) * (first == rank) + _second_part(index) * (second == rank)
        buffer[index[0] : index[-1] + 1] = part.to(torch.float32)
    return buffer


def expected_sum(num_elements: int) -> torch.Tensor:
    """What every rank must get, at any world size."""
    buffer = torch.empty(num_elements)
    for index in torch.split(torch.arange(num_elements), _CHUNK):
        buffer[index[0] : index[-1] + 1] = (_first_part(index) + _second_part(index)).to(torch.float32)
    return buffer


def scale(iteration: int) -> int:
    """A factor for contributions and sum alike that differs from the iteration's before, so that an old result shows."""
    return 1 + iteration % 7  # sums stay below 2**24, up to where float32 holds every whole number


def num_wrong(got: torch.Tensor, want: torch.Tensor) -> int:
    """Elements that are not exactly as wanted; one that is not a number is wrong."""
    return int(torch.count_nonzero(got != want).item())


def _owners(index: torch.Tensor, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = index % world_size
    if world_size == 1:
        return first, first
    distance = 1 + index.div(world_size, rounding_mode="floor") % (world_size - 1)
    return first, (first + distance) % world_size


def _first_part(index: torch.Tensor) -> torch.Tensor:
    return 1 + (index * 2654435761 >> 12) % 62  # multiplicative hashing: neighbours differ


def _second_part(index: torch.Tensor) -> torch.Tensor:
    return 1 + (index * 2246822519 >> 15) % 62
