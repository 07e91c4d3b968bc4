"""The optimizer that a configuration names."""

from __future__ import annotations

import torch
from torch import nn

from dtrain.trainers.config import TrainerConfig

MOMENTUM = 0.9


def build_optimizer(config: TrainerConfig, model: nn.Module) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    return torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=MOMENTUM)
