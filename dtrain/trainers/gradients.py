"""The gradients of a module as one piece of memory, which its replicas add up in one collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class FlatGradients:
    """Every parameter's .grad is a view into it, so nothing is copied. Do not set .grad to None: zero() takes that place."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._flat: list[torch.Tensor] = []
        for dtype, alike in by_dtype.items():
            flat = torch.zeros(sum(parameter.numel() for parameter in alike), dtype=dtype, device=alike[0].device)
            for parameter, part in zip(alike, torch.split(flat, [parameter.numel() for parameter in alike]), strict=True):
                parameter.grad = part.view_as(parameter)
            self._flat.append(flat)

    def zero(self) -> None:
        for flat in self._flat:
            flat.zero_()

    def add_up(self, group: dist.ProcessGroup) -> None:
        """To the sum over the group's members, who all call it."""
        for flat in self._flat:
            dist.all_reduce(flat, group=group)
