"""The allreduce benchmark: its figures, its check, and real runs on gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.bench import pattern
from dtrain.bench.bandwidth import Times, algorithm_bandwidth, bus_bandwidth, percentile, summarize
from dtrain.bench.config import AllreduceConfig

ROOT = Path(__file__).parents[2]

WORKER = """
import sys
from dtrain.bench.allreduce import main
sys.exit(main(sys.argv[1:]))
"""

# The same worker, but rank 1 has a network that changes one number on its way.
WORKER_WITH_A_FAULT = """
import os, sys
import torch.distributed as dist
from dtrain.bench.allreduce import main
right = dist.all_reduce
def wrong(tensor, *args):
    right(tensor, *args)
    if os.environ["RANK"] == "1" and tensor.numel() == 1024:
        tensor[700] += 1
dist.all_reduce = wrong
sys.exit(main(sys.argv[1:]))
"""

QUICK = AllreduceConfig(sizes_bytes=(4, 12, 4096, 1 << 20), warmup_s=0.02, time_per_size_s=0.1)


@pytest.mark.parametrize(
    ("size_bytes", "elapsed_s", "world_size", "algorithm", "bus"),
    [
        (1_000_000_000, 1.0, 2, 1e9, 1e9),
        (1_000_000_000, 0.5, 4, 2e9, 3e9),
        (4096, 1e-6, 8, 4.096e9, 7.168e9),
        (1_000_000_000, 1.0, 1000, 1e9, 1.998e9),
    ],
)
def test_bandwidths_as_nccl_tests_means_them(size_bytes: int, elapsed_s: float, world_size: int, algorithm: float, bus: float) -> None:
    assert algorithm_bandwidth(size_bytes, elapsed_s) == pytest.approx(algorithm)
    assert bus_bandwidth(size_bytes, elapsed_s, world_size) == pytest.approx(bus)


def test_one_worker_has_no_bus_bandwidth() -> None:
    with pytest.raises(ValueError, match="nothing crosses a link"):
        bus_bandwidth(1024, 1.0, 1)


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    assert summarize([[1.0, 5.0, 2.0], [4.0, 1.0, 3.0]]) == Times(median_s=4.0, min_s=3.0, p95_s=5.0)


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (5, 1), (50, 10), (95, 19), (96, 20), (100, 20)])
def test_percentiles_by_nearest_rank(percent: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 21)], percent) == value


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_the_sum_is_exact_in_any_order(world_size: int) -> None:
    given = [pattern.contribution(1000, rank=rank, world_size=world_size) for rank in range(world_size)]
    want = pattern.expected_sum(1000)
    for order in (given, given[::-1]):
        got = torch.zeros(1000)
        for part in order:
            got += part
        assert pattern.num_wrong(got, want) == 0


def test_a_buffer_built_in_chunks_is_the_same_throughout() -> None:
    num_elements = (1 << 20) + 3
    index = torch.tensor([num_elements - 1])
    whole = pattern.expected_sum(num_elements)
    assert len(whole) == num_elements and torch.equal(whole[:1000], pattern.expected_sum(1000))
    parts = [pattern.contribution(num_elements, rank=rank, world_size=2)[index] for rank in range(2)]
    assert torch.equal(parts[0] + parts[1], whole[index])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_fault_of_a_sum_is_seen(world_size: int) -> None:
    given = torch.stack([pattern.contribution(4096, rank=rank, world_size=world_size) for rank in range(world_size)])
    want = pattern.expected_sum(4096)
    right = given.sum(0)
    one_off = right.clone()
    one_off[17] += 1
    not_a_number = right.clone()
    not_a_number[0] = float("nan")
    assert pattern.num_wrong(right, want) == 0
    assert pattern.num_wrong(one_off, want) == 1
    assert pattern.num_wrong(not_a_number, want) == 1
    faults = {
        "a rank is missing": given[1:].sum(0),
        "a rank counts twice": right + given[0],
        "the maximum instead of the sum": given.amax(0),
        "a shifted buffer": right.roll(1),
        "nothing was reduced": given[0],
        "the result of the iteration before": right * pattern.scale(1) / pattern.scale(2),
    }
    assert {name: pattern.num_wrong(fault, want) for name, fault in faults.items() if pattern.num_wrong(fault, want) < 100} == {}


def run_benchmark(folder: Path, world_size: int, worker: str, config: AllreduceConfig) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, what was reported, stderr."""
    (folder / "worker.py").write_text(worker)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DTRAIN_JOB_FOLDER": str(folder), "DTRAIN_DEVICE": "cpu"}
    argv = (*torchrun, "worker.py", config.to_json())
    with subprocess.Popen(argv, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, stderr = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            raise
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return process.returncode, [json.loads(line) for line in lines], stderr


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_size_is_reported_with_its_figures(tmp_path: Path, world_size: int) -> None:
    exit_code, records, stderr = run_benchmark(tmp_path, world_size, WORKER, QUICK)
    assert exit_code == 0, stderr
    assert [record["size_bytes"] for record in records] == list(QUICK.sizes_bytes)
    for record in records:
        assert (record["world_size"], record["num_wrong"]) == (world_size, 0)
        assert record["num_iterations"] >= QUICK.min_iterations
        assert 0 < record["min_us"] <= record["time_us"] <= record["p95_us"]
        assert record["algorithm_gb_per_s"] == pytest.approx(record["size_bytes"] / record["time_us"] / 1000)
        factor = 2 * (world_size - 1) / world_size
        assert record["bus_gb_per_s"] == (pytest.approx(factor * record["algorithm_gb_per_s"]) if world_size > 1 else None)


def test_a_wrong_sum_on_one_rank_is_counted_located_and_fails(tmp_path: Path) -> None:
    exit_code, records, stderr = run_benchmark(tmp_path, 2, WORKER_WITH_A_FAULT, QUICK)
    assert exit_code == 1
    wrong = {record["size_bytes"]: record["num_wrong"] for record in records}
    assert wrong.pop(4096) >= QUICK.min_iterations
    assert set(wrong.values()) == {0}
    assert "wrong sum on rank 1: element 700 of 1024 is " in stderr


def test_sizes_that_hold_no_whole_number_are_refused() -> None:
    with pytest.raises(ValueError, match="size of 1023 bytes"):
        AllreduceConfig(sizes_bytes=(1024, 1023))
    assert AllreduceConfig.from_json('{"sizes_bytes": [4, 8]}') == AllreduceConfig(sizes_bytes=(4, 8))
    assert AllreduceConfig.from_json(AllreduceConfig().to_json()) == AllreduceConfig()
