"""A data set as the trainers read it: many examples at once, by index."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.data import TensorDataset, default_collate

from dtrain.trainers.errors import TargetError


class Examples(Protocol):
    """Inputs and labels by index."""

    def __len__(self) -> int: ...

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) of these examples, int64 indices of shape (N,), in this order."""
        ...


def examples_of(dataset: Any, *, name: str) -> Examples:
    """Read a torch data set of (input, label): a TensorDataset in whole batches, any other with len() and [] one by one.

    Raises:
        TargetError: it is empty or of another shape; `name` says which one it is.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TargetError(
            f"{name}: a {type(dataset).__name__} has no len() and []",
            hint="return a torch.utils.data.Dataset with __len__ and __getitem__; streams are not supported",
        )
    if len(dataset) == 0:
        raise TargetError(f"{name}: no examples in it", hint="return at least one example for training and one for testing")
    if not isinstance(dataset, TensorDataset):
        return _IndexedExamples(dataset, name)
    if len(dataset.tensors) != 2:
        raise TargetError(f"{name}: {len(dataset.tensors)} tensors", hint="return TensorDataset(inputs, labels)")
    return _TensorExamples(dataset)


class _TensorExamples:
    """All examples lie in memory: a batch is one index_select per tensor."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._inputs, self._labels = dataset.tensors

    def __len__(self) -> int:
        return len(self._labels)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs.index_select(0, index), self._labels.index_select(0, index)


class _IndexedExamples:
    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = default_collate([self._dataset[position] for position in index.tolist()])
        if not (isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(part, torch.Tensor) for part in batch)):
            raise TargetError(f"{self._name}: an example is not (input, label)", hint="return a tensor and a class number from __getitem__")
        inputs, labels = batch
        return inputs, labels
