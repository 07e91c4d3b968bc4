"""The job files in cluster-examples, run as they stand on instances of this machine; and what a broken stage does to a job."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Result, Workspace

pytestmark = pytest.mark.net

ROOT = Path(__file__).resolve().parents[2]


def copy_examples(workspace: Workspace) -> None:
    shutil.copytree(ROOT / "cluster-examples", workspace.workdir / "cluster-examples")
    local = workspace.workdir / "cluster-examples/local.yaml"
    local.write_text(local.read_text() + f"dir: {workspace.nodes}\n")  # else it would use the node folder of whoever runs this


def run_example(workspace: Workspace, name: str) -> tuple[Result, list[dict[str, Any]]]:
    """What a job file of cluster-examples says, and the metrics that it reported."""
    copy_examples(workspace)
    result = workspace.dtrain("launch", f"cluster-examples/{name}.yaml")
    assert result.code == 0, result.err
    metrics = [path.read_text() for path in workspace.nodes.rglob("metrics.jsonl")]
    return result, [json.loads(line) for text in metrics for line in text.splitlines()]


def test_a_language_model_learns_in_four_stages(workspace: Workspace) -> None:
    result, metrics = run_example(workspace, "pipeline")
    assert "1 replica = cluster size 4 / 4 stages   schedule 1F1B" in result.err
    assert re.search(r"stage 3 +ranks 3 +block3, head +66,752 parameters", result.err)
    assert "predicted bubble 27.3% = (4 - 1) / (8 + 4 - 1)" in result.err
    assert {metric["rank"] for metric in metrics} == {0}  # though the loss arises on rank 3
    first, last = metrics[0], metrics[-1]
    print(f"loss {first['loss']:.2f} -> {last['loss']:.2f}, bubble {last['bubble']:.3f} (predicted {last['predicted_bubble']:.3f})")
    assert first["loss"] > 5 > 4 > last["evaluation"]["test loss"]
    assert 0 < last["bubble"] < 1 and last["predicted_bubble"] == pytest.approx(3 / 11)
    assert re.search(r"iteration 60/60 .* loss .* samples/s  bubble [0-9.]+% \(predicted 27.3%\)", result.err)
    assert re.search(r"^test loss [0-9.]+$", result.err, re.M)


def test_the_digits_are_learned_by_replicas_of_a_pipeline(workspace: Workspace) -> None:
    result, metrics = run_example(workspace, "hybrid")
    assert "2 replicas = cluster size 4 / 2 stages   schedule GPipe" in result.err
    assert "global batch 64 = 2 replicas x per-replica batch 32" in result.err
    assert "micro-batch 8 = per-replica batch 32 / micro-batches 4" in result.err
    assert metrics[-1]["evaluation"]["test accuracy"] > 0.9


def test_a_script_of_ones_own_fits_one_line_on_all_workers(workspace: Workspace) -> None:
    copy_examples(workspace)
    command = ("launch", "cluster-examples/script.yaml", "--cluster", "cluster-examples/local.yaml", "--", "--learning-rate", "0.3")
    result = workspace.dtrain(*command)
    assert result.code == 0, result.err
    for rank in range(4):
        assert f"[{rank}] rank {rank} of 4: y = 3.00 x + 2.00" in result.err


BROKEN = """
import time
import torch

class Broken(torch.nn.Linear):
    calls = 0
    def forward(self, inputs):
        if type(inputs) is torch.Tensor:  # not while the shapes are worked out
            self.calls += 1
        if self.calls > 20:
            print("broke at", time.time(), flush=True)
            raise ValueError("this stage broke")
        return super().forward(inputs)

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), Broken(4, 4), torch.nn.Linear(4, 2))

def data():
    examples = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))
    return examples, examples
"""


def test_a_stage_that_raises_ends_the_whole_job_within_seconds(workspace: Workspace) -> None:
    """The other stages wait for it in gloo, which by itself would give up after half an hour."""
    workspace.write("broken.py", BROKEN)
    trainer = "{model: 'broken:model', data: 'broken:data', batch: {global: 16, micro_batches: 4}, epochs: 99, pipeline: {stages: 4}}"
    result = workspace.dtrain("launch", workspace.job(f"trainer: {trainer}\n", gpus=2))
    assert result.code == 1, result.err
    status = workspace.status()
    failure = status["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node1", 2)
    assert "ValueError: this stage broke" in failure["traceback"]
    broke = re.search(r"broke at ([0-9.]+)", result.err)
    assert broke is not None
    print(f"ended after {status['ended_at'] - float(broke[1]):.1f} s")
    assert status["ended_at"] - float(broke[1]) < 10
