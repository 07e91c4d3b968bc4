"""The built-in language model: a very small GPT over bytes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

NUM_BYTES = 256  # the vocabulary
CONTEXT = 64  # bytes that the model sees, at most
NUM_BLOCKS = 4
WIDTH = 64
NUM_HEADS = 4


def gpt() -> nn.Module:
    """237,184 parameters; bytes of shape (N, T), T at most CONTEXT, to logits of the next byte, (N, NUM_BYTES, T)."""
    blocks = [(f"block{number}", Block()) for number in range(NUM_BLOCKS)]
    model = nn.Sequential(OrderedDict([("embed", Embed()), *blocks, ("head", Head())]))
    model.apply(_init)
    return model


class Embed(nn.Module):
    """Bytes (N, T) to vectors (N, T, WIDTH): what the byte is plus where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.byte(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        return embedded


class Block(nn.Module):
    """Attention to the bytes before and a perceptron, each added to what came in; (N, T, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(inputs)).unflatten(2, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)  # (3, N, heads, T, width)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        attended = inputs + self.project(mixed.transpose(1, 2).flatten(2))
        output: torch.Tensor = attended + self.mlp(self.norm2(attended))
        return output


class Head(nn.Module):
    """Vectors (N, T, WIDTH) to logits (N, NUM_BYTES, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, NUM_BYTES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits(self.norm(inputs)).transpose(1, 2)
        return logits


def _init(module: nn.Module) -> None:
    """As GPT-2: small, so that the first loss is that of guessing."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
