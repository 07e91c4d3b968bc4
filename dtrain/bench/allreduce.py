"""The allreduce benchmark as one worker runs it: float32 SUM of growing messages, each result checked."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

from dtrain.bench import pattern
from dtrain.bench.bandwidth import algorithm_bandwidth, bus_bandwidth, summarize
from dtrain.bench.config import AllreduceConfig
from dtrain.node.metrics import log_metrics
from dtrain.trainers.errors import TrainerError
from dtrain.trainers.world import World, join, leave, world_from_environment

_MIN_WARMUP = 3  # iterations


def main(argv: list[str]) -> int:
    """argv[0] is an AllreduceConfig as JSON; 1 when a sum was wrong or the worker could not start, else 0."""
    config = AllreduceConfig.from_json(argv[0])
    try:
        world = world_from_environment()
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    join(world)
    total_wrong = sum(_measure_size(size_bytes, config, world) for size_bytes in config.sizes_bytes)
    leave()
    return 1 if total_wrong else 0


def _measure_size(size_bytes: int, config: AllreduceConfig, world: World) -> int:
    """Measure and report one size; the wrong elements on all ranks."""
    message = _Message(size_bytes, world)
    for _ in range(_MIN_WARMUP):
        message.iterate()
    # Counts are decided on rank 0 for all: ranks that count by their own clocks run apart and hang.
    for _ in range(_from_rank_0(config.warmup_s / message.mean_cycle_s(), world) - _MIN_WARMUP):
        message.iterate()
    fitting = _from_rank_0(config.time_per_size_s / message.mean_cycle_s(), world)
    num_iterations = min(max(fitting, config.min_iterations), config.max_iterations)
    times_s = [message.iterate() for _ in range(num_iterations)]

    times = summarize(_of_all_ranks(times_s, world))
    num_wrong = round(world.sum_over_ranks([message.num_wrong])[0])
    if world.rank == 0:
        bus = bus_bandwidth(size_bytes, times.median_s, world.world_size) / 1e9 if world.world_size > 1 else None
        log_metrics(
            size_bytes=size_bytes,
            num_iterations=num_iterations,
            time_us=times.median_s * 1e6,
            min_us=times.min_s * 1e6,
            p95_us=times.p95_s * 1e6,
            algorithm_gb_per_s=algorithm_bandwidth(size_bytes, times.median_s) / 1e9,
            bus_gb_per_s=bus,
            num_wrong=num_wrong,
            world_size=world.world_size,
        )
    return num_wrong


class _Message:
    """The buffers of one size on this rank, and what came of them."""

    def __init__(self, size_bytes: int, world: World) -> None:
        num_elements = size_bytes // 4
        self._world = world
        self._given = pattern.contribution(num_elements, rank=world.rank, world_size=world.world_size).to(world.device)
        self._sum = pattern.expected_sum(num_elements).to(world.device)
        self._buffer = torch.empty_like(self._given)
        self._wanted = torch.empty_like(self._sum)
        self._iteration = 0
        self._cycles_s: list[float] = []
        self.num_wrong = 0  # elements on this rank, warm-up included

    def iterate(self) -> float:
        """Refill, reduce, check; the seconds of the reduction alone, on this rank."""
        cycle_start = time.perf_counter()
        factor = pattern.scale(self._iteration)
        torch.mul(self._given, factor, out=self._buffer)
        self._synchronize()
        dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        dist.all_reduce(self._buffer)
        self._synchronize()
        elapsed_s = time.perf_counter() - start
        torch.mul(self._sum, factor, out=self._wanted)
        wrong = pattern.num_wrong(self._buffer, self._wanted)
        if wrong and not self.num_wrong:
            self._print_first_wrong()
        self.num_wrong += wrong
        self._iteration += 1
        self._cycles_s.append(time.perf_counter() - cycle_start)
        return elapsed_s

    def mean_cycle_s(self) -> float:
        """Of an iteration with all that is around it; the first one, which also sets things up, is left out."""
        return statistics.fmean(self._cycles_s[1:])

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _print_first_wrong(self) -> None:
        index = int(torch.nonzero(self._buffer != self._wanted)[0].item())
        got, want = self._buffer[index].item(), self._wanted[index].item()
        print(
            f"wrong sum on rank {self._world.rank}: element {index} of {len(self._buffer)} is {got:g}, not {want:g}",
            file=sys.stderr,
            flush=True,
        )


def _from_rank_0(count: float, world: World) -> int:
    shared = torch.tensor([int(count)], device=world.device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def _of_all_ranks(times_s: list[float], world: World) -> list[list[float]]:
    mine = torch.tensor(times_s, dtype=torch.float64, device=world.device)
    of_ranks = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(of_ranks, mine)
    return [times.tolist() for times in of_ranks]
