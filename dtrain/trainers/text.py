"""The built-in text: the source files of Python's own standard library, as bytes.

It needs no download, and it is the same on every node that has the same release of Python. Two releases differ, so the
workers compare what they read before they train (`refuse_different_texts`), and a job on unequal nodes ends at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from dtrain.trainers.errors import TargetError
from dtrain.trainers.examples import Examples
from dtrain.trainers.gpt import CONTEXT
from dtrain.trainers.world import World

NUM_TRAIN = 16384  # sequences of CONTEXT bytes: 1 MiB
NUM_TEST = 512
_TEST_EVERY = 10  # so that the test set is of files that training never sees


def text() -> tuple[TensorDataset, TensorDataset]:
    """16,384 sequences to train on and 512 to test with, of other files; input and label are int64 of shape (64,).

    The label at each place is the next byte. The files are those at the top of the standard library, in the order of their
    names, without those whose names begin with "_" (some are made for one platform) and those of the site.
    """
    folder = Path(os.__file__).parent
    names = sorted(path.name for path in folder.glob("*.py") if not path.name.startswith(("_", "sitecustomize", "usercustomize")))
    files = [(folder / name).read_bytes() for name in names]
    test = b"".join(files[::_TEST_EVERY])
    train = b"".join(file for index, file in enumerate(files) if index % _TEST_EVERY)
    return _sequences(train, NUM_TRAIN, folder), _sequences(test, NUM_TEST, folder)


def _sequences(data: bytes, number: int, folder: Path) -> TensorDataset:
    needed = number * CONTEXT + 1
    if len(data) < needed:
        raise TargetError(
            f"data: 'text' is made of the source files in {folder}, and {len(data)} bytes of them are fewer than {needed}",
            hint="use a Python that has its whole standard library as files",
        )
    values = torch.frombuffer(bytearray(data[:needed]), dtype=torch.uint8).to(torch.int64)
    return TensorDataset(values[:-1].view(number, CONTEXT), values[1:].view(number, CONTEXT))


def refuse_different_texts(train: Examples, world: World) -> None:
    """Every rank calls it, after `join`.

    Raises:
        TargetError: on every rank, where two ranks have read different texts.
    """
    inputs, _ = train.take(torch.arange(len(train)))
    digest = hashlib.sha256(inputs.numpy().tobytes()).hexdigest()
    told = [answer.split() for answer in world.all_gather(f"{digest} {platform.python_version()}")]
    for rank, (other_digest, version) in enumerate(told):
        if other_digest != told[0][0]:
            raise TargetError(
                f"data: 'text' differs between nodes: rank 0 reads it from Python {told[0][1]}, rank {rank} from Python {version}",
                hint="give all nodes the same release of Python with `python:` in the cluster file",
            )
