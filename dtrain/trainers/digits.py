"""The built-in example: scikit-learn's 1797 handwritten digits, real images of 8x8 pixels, and a small network for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dtrain.trainers.errors import TargetError


def digits_cnn() -> nn.Module:
    """Two convolutions and two linear layers, 38,282 parameters; images of shape (N, 1, 8, 8) to 10 logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


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
