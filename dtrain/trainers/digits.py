"""The built-in example: scikit-learn's 1797 handwritten digits, real images of 8x8 pixels, and a small network for them."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dtrain.trainers.errors import TargetError


def digits_cnn() -> nn.Module:
    """Two convolutions and two linear layers, 38,282 parameters; images of shape (N, 1, 8, 8) to 10 logits."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, 16, kernel_size=3, padding=1),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(16, 32, kernel_size=3, padding=1),
        "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "linear1": nn.Linear(32 * 4 * 4, 64),
        "relu3": nn.ReLU(),
        "linear2": nn.Linear(64, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 to test with, values in 0..1; always the same split, every digit alike in both."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise TargetError(
            f"data: 'digits' comes with scikit-learn, which cannot be imported here: {error}", hint="pip install 'dtrain[examples]'"
        ) from None
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    by_label = labels.argsort(stable=True)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[by_label[::5]] = True  # every fifth of each digit
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])
