"""The workers of a job as one of them sees them: its rank, its device, and sums over all ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtrain.trainers.errors import DeviceError, TrainerError


@dataclass(frozen=True)
class World:
    """Where this worker stands."""

    rank: int
    world_size: int
    device: torch.device

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Every rank gives as many values and gets their sums; in float64, so counts stay exact. After `join`."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        sums: list[float] = tensor.tolist()
        return sums

    def all_gather(self, text: str) -> list[str]:
        """Every rank gives a text and gets all of them, by rank. After `join`."""
        texts: list[str] = [""] * self.world_size
        dist.all_gather_object(texts, text)
        return texts


def world_from_environment(environ: Mapping[str, str] = os.environ) -> World:
    """The place that the launcher gave this worker, as torchrun writes it down; DTRAIN_DEVICE says cpu or cuda, absent: what there is.

    Raises:
        TrainerError: a variable is missing, or the device is.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise TrainerError(f"{', '.join(missing)} not set: this is no worker of a job", hint="start it with dtrain launch, or by torchrun")
    device = choose_device(
        environ.get("DTRAIN_DEVICE"),
        num_cuda_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        local_rank=int(environ["LOCAL_RANK"]),
    )
    return World(int(environ["RANK"]), int(environ["WORLD_SIZE"]), torch.device(device))


def choose_device(wanted: str | None, *, num_cuda_devices: int, local_rank: int) -> str:
    """The name of a worker's device: "cpu" or "cuda:N", N its local rank.

    Raises:
        DeviceError: a GPU is wanted and there is none for this local rank.
    """
    if wanted not in (None, "", "cpu", "cuda"):
        raise DeviceError(f"DTRAIN_DEVICE is '{wanted}'", hint="it is cpu or cuda; leave it out to take a GPU where there is one")
    if wanted == "cpu" or (not wanted and num_cuda_devices == 0):
        return "cpu"
    if local_rank >= num_cuda_devices:
        raise DeviceError(
            f"local rank {local_rank} has no GPU: torch sees {num_cuda_devices} on this node",
            hint="start fewer workers per node, set CUDA_VISIBLE_DEVICES, or use the device cpu",
        )
    return f"cuda:{local_rank}"


def join(world: World) -> None:
    """Make this worker a member of the process group: gloo on CPUs, nccl on GPUs.

    Import and build what needs no group before: torch._dynamo, which every optimizer imports, keeps a group that is
    there at its import for the rest of the process, and then `leave` cannot end it.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        dist.init_process_group("nccl", device_id=world.device)
    else:
        dist.init_process_group("gloo")


def leave() -> None:
    """End the group after a good end. Nothing that DDP wrapped may be referred to any more, its model included.

    Else the group lives on, threads and all, and a gloo thread that drops the tensor of the last collective while the
    interpreter ends aborts the worker ("terminate called without an active exception", seen in 4 of 10 jobs of 4 workers).

    After an error call nothing: the process ends anyway, and destroying could wait for ranks that still stand in a
    collective and so hold back the error.
    """
    gc.collect()  # a DDP is part of a reference cycle
    dist.destroy_process_group()
