"""The loss of a training: a sum and a count, so that the parts of a batch add up however it was cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

# The label of a row that only fills up a batch: its loss and its gradient are exactly 0. By default torch leaves out labels
# of -100, and the count would be wrong; so that is an error, like any other bad label.
NO_LABEL = -(1 << 40)


@dataclass(frozen=True)
class LossSum:
    """A loss as its sum and the number of labels in it; a mean of means would weigh examples unequally."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class Evaluation:
    """Over all of the test set."""

    accuracy: float  # 0..1
    loss: float


def loss_sum(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits (N, classes, ...) against class numbers (N, ...), summed over all labels but NO_LABEL."""
    return nn.functional.cross_entropy(output, labels, reduction="sum", ignore_index=NO_LABEL)
