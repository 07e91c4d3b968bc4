"""What the built-in trainer costs: its own loop against a plain hand-written DDP loop of the same model and data.

Both run in the same 2 workers and take turns in blocks of 50 iterations, so that a busy machine slows both alike. Prints the ratio of
their speeds, as the median over pairs of blocks with its 95 % interval; exit code 1 below 0.95.

    python benchmarks/trainer_overhead.py [BLOCKS]
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dtrain.trainers.batch import BatchPlan, permutation, plan_batches
from dtrain.trainers.config import BatchConfig, TrainerConfig
from dtrain.trainers.data_parallel import DataParallelTrainer
from dtrain.trainers.digits import digits, digits_cnn
from dtrain.trainers.examples import examples_of
from dtrain.trainers.optimizer import MOMENTUM, build_optimizer
from dtrain.trainers.report import Report
from dtrain.trainers.world import World, join, leave, world_from_environment

ITERATIONS_PER_BLOCK = 50
NUM_BLOCKS = 100  # of each loop
SLOWEST_ALLOWED = 0.95


def main(argv: list[str]) -> int:
    if "RANK" in os.environ:
        return worker(int(argv[0]))
    num_blocks = argv[0] if argv else str(NUM_BLOCKS)
    with tempfile.TemporaryDirectory() as job_folder:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        environ = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "DTRAIN_JOB_FOLDER": job_folder,  # so that the trainer reports as it does in a job
        }
        return subprocess.run((*torchrun, __file__, num_blocks), env=environ, timeout=600, check=False).returncode


def worker(num_blocks: int) -> int:
    world = world_from_environment()
    ratios = measure(num_blocks, world)
    leave()
    median = statistics.median(ratios)
    if world.rank == 0:
        low, high = interval_of_median(ratios)
        interval = f"{median:.2f} [{low:.2f}, {high:.2f}]"
        print(f"trainer / hand-written loop: {interval} (median and 95 % interval over {len(ratios)} blocks)", flush=True)
    return int(median < SLOWEST_ALLOWED)


def measure(num_blocks: int, world: World) -> list[float]:
    """The trainer's speed over the hand-written loop's, for each pair of blocks; the same on every rank."""
    config = TrainerConfig(model="digits_cnn", data="digits", batch=BatchConfig(global_=128), epochs=1, learning_rate=0.01)
    train, _ = digits()
    plan = plan_batches(config.batch, replicas=world.world_size, num_examples=len(train))
    model = digits_cnn().to(world.device)
    optimizer = build_optimizer(config, model)
    join(world)
    assert plan.iterations_per_epoch is not None
    report = Report(
        is_rank_0=world.rank == 0,
        num_iterations=1_000_000,
        iterations_per_epoch=plan.iterations_per_epoch,
        global_batch_size=plan.global_batch_size,
    )
    trainer = DataParallelTrainer(
        model, optimizer, examples_of(train, name="digits"), plan=plan, seed=0, world=world, on_iteration=report.after_iteration
    )
    by_hand = HandWrittenLoop(train, plan, world, config.learning_rate)
    seconds_of(trainer.run_iterations, world)  # warm-up
    seconds_of(by_hand.run_iterations, world)
    ratios = []
    for pair in range(num_blocks):
        if pair % 2:  # each goes first as often as the other
            trainer_s = seconds_of(trainer.run_iterations, world)
            by_hand_s = seconds_of(by_hand.run_iterations, world)
        else:
            by_hand_s = seconds_of(by_hand.run_iterations, world)
            trainer_s = seconds_of(trainer.run_iterations, world)
        ratios.append(by_hand_s / trainer_s)
    return ratios


class HandWrittenLoop:
    """What one writes who knows DDP and wants nothing but speed: no loss is read, nothing is reported or checked."""

    def __init__(self, train: TensorDataset, plan: BatchPlan, world: World, learning_rate: float) -> None:
        self.images, self.labels = (tensor.to(world.device) for tensor in train.tensors)
        self.ddp = DistributedDataParallel(digits_cnn().to(world.device), gradient_as_bucket_view=True)
        self.sgd = torch.optim.SGD(self.ddp.parameters(), lr=learning_rate, momentum=MOMENTUM)
        self.plan = plan
        self.rank = world.rank
        self.epoch = -1
        self.starts: list[int] = []  # of the batches still to come in this epoch

    def run_iterations(self, num_iterations: int) -> None:
        size = self.plan.per_replica_batch_size
        for _ in range(num_iterations):
            if not self.starts:
                self.epoch += 1
                self.order = permutation(len(self.images), seed=0, epoch=self.epoch)
                num_batches = len(self.images) // self.plan.global_batch_size
                self.starts = [batch * self.plan.global_batch_size + self.rank * size for batch in reversed(range(num_batches))]
            start = self.starts.pop()
            index = self.order[start : start + size]
            self.sgd.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.ddp(self.images[index]), self.labels[index])
            loss.backward()  # type: ignore[no-untyped-call]
            self.sgd.step()


def seconds_of(block: Callable[[int], object], world: World) -> float:
    """Of one block, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    block(ITERATIONS_PER_BLOCK)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    elapsed_s = torch.tensor([time.perf_counter() - start], device=world.device)
    dist.all_reduce(elapsed_s, dist.ReduceOp.MAX)
    return elapsed_s.item()


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """At least 95 % confidence, whatever the distribution: the order statistics that a fair coin falls between (sign test)."""
    ascending = sorted(values)
    count = len(ascending)
    outside, rank = 0.0, 0
    while rank < count // 2 and outside + math.comb(count, rank) / 2**count <= 0.025:
        outside += math.comb(count, rank) / 2**count
        rank += 1
    rank = max(rank - 1, 0)
    return ascending[rank], ascending[count - 1 - rank]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
