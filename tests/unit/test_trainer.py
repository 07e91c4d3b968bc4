"""The data parallel trainer on real workers: torchrun, gloo, several processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dtrain.trainers.batch import indices, plan_batches
from dtrain.trainers.config import BatchConfig, TrainerConfig
from dtrain.trainers.loss import LossSum, loss_sum
from dtrain.trainers.main import main
from dtrain.trainers.report import Report
from tests.workers import torchrun

ROOT = Path(__file__).parents[2]

# A user's own task in float64, where a different order of summation shows only beyond the 12th digit. Its size is no
# multiple of anything: 61 examples to train on, 37 to test with.
TASK = """
import torch
from torch.utils.data import TensorDataset

def model():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()

def tensors():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(98, 5, dtype=torch.float64, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()

def data():
    inputs, labels = tensors()
    return TensorDataset(inputs[:61], labels[:61]), TensorDataset(inputs[61:], labels[61:])

def data_with_a_hole():
    train, test = data()
    train.tensors[0][40] = float("nan")
    return train, test

class OneByOne:
    def __init__(self, dataset):
        self.dataset = dataset
    def __len__(self):
        return len(self.dataset)
    def __getitem__(self, index):
        value, label = self.dataset[index]
        return value, int(label)

def data_one_by_one():
    train, test = data()
    return OneByOne(train), OneByOne(test)
"""

WORKER = """
import os, pathlib, sys
import torch
from dtrain.trainers.config import TrainerConfig
from dtrain.trainers.main import main, train

if len(sys.argv) == 2:
    sys.exit(main(sys.argv[1:]))
trained = train(TrainerConfig.from_json(sys.argv[1]))
threads = {path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")}
torch.save((trained.state, vars(trained.evaluation), threads), f"{sys.argv[2]}.{os.environ['RANK']}")
"""

CONFIG = TrainerConfig(model="task_of_test:model", data="task_of_test:data", batch=BatchConfig(global_=24), iterations=5, seed=11)


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "task_of_test.py").write_text(TASK)
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


def train_on_workers(workdir: Path, world_size: int, config: TrainerConfig) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    result = torchrun(workdir, world_size, "worker.py", config.to_json(), "result")
    assert result.returncode == 0, result.stderr
    results: list[Any] = [torch.load(workdir / f"result.{rank}") for rank in range(world_size)]
    state, evaluation, _ = results[0]
    for other_state, other_evaluation, threads in results:
        assert all(torch.equal(state[name], other_state[name]) for name in state)
        assert other_evaluation == evaluation
        assert not [name for name in threads if "gloo" in name]  # else the exit of the worker may abort it
    return state, evaluation


def train_in_one_process(workdir: Path, config: TrainerConfig) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Written by hand: whole global batches, no DDP, mean losses."""
    task: dict[str, Any] = {"__name__": "task_of_test"}
    exec((workdir / "task_of_test.py").read_text(), task)
    torch.manual_seed(config.seed)
    model = task["model"]()
    inputs, labels = task["tensors"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)
    plan = plan_batches(BatchConfig(global_=config.batch.global_), replicas=1, num_examples=61)
    assert plan.iterations_per_epoch == 2 and config.iterations == 5
    for number in range(config.iterations):
        epoch, iteration = divmod(number, plan.iterations_per_epoch)
        index = indices(plan, seed=config.seed, epoch=epoch, iteration=iteration, replica=0)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        output = model(inputs[61:])
    loss = torch.nn.functional.cross_entropy(output, labels[61:]).item()
    return model.state_dict(), {"accuracy": (output.argmax(1) == labels[61:]).double().mean().item(), "loss": loss}


@pytest.mark.parametrize(
    ("world_size", "micro_batches", "data"),
    [(1, 3, "data"), (2, 1, "data_one_by_one"), (2, 4, "data"), (4, 2, "data")],
)
def test_data_parallel_equals_the_single_process(workdir: Path, world_size: int, micro_batches: int, data: str) -> None:
    config = replace(CONFIG, data=f"task_of_test:{data}", batch=BatchConfig(global_=24, micro_batches=micro_batches))
    expected_state, expected_evaluation = train_in_one_process(workdir, config)
    state, evaluation = train_on_workers(workdir, world_size, config)
    for name, expected in expected_state.items():
        assert (state[name] - expected).abs().max() < 1e-12, name
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-12)  # 37 examples on 4 ranks: all of them, none twice


def test_the_digits_example_learns_and_reports(workdir: Path) -> None:
    trainer = yaml.safe_load((ROOT / "cluster-examples/digits.yaml").read_text())["trainer"]
    config = TrainerConfig(**{**trainer, "batch": BatchConfig(global_=trainer["batch"]["global"])})
    result = torchrun(workdir, 4, "worker.py", config.to_json())
    assert result.returncode == 0, result.stderr
    epochs = result.stdout.splitlines()
    assert len(epochs) == config.epochs and epochs[-1].startswith(f"epoch {config.epochs}/{config.epochs}  loss ")

    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert {record["rank"] for record in records} == {0}
    assert [record["iteration"] for record in records] == sorted({record["iteration"] for record in records})
    ends = [record for record in records if "evaluation" in record]
    assert [record["epoch"] for record in ends] == list(range(1, len(epochs) + 1))
    final = ends[-1]
    assert final["iteration"] == final["iterations"] == 29 * len(epochs) and final["epochs"] == len(epochs)
    assert final["samples_per_s"] > 0 and final["loss"] < ends[0]["loss"]
    assert final["evaluation"]["test accuracy"] >= 0.95
    assert epochs[-1].endswith(f"  test accuracy {final['evaluation']['test accuracy']:.1%}")
    assert set(final["evaluation"]) == {"test accuracy", "test loss"}


def test_a_loss_that_is_not_finite_stops_the_training(workdir: Path) -> None:
    result = torchrun(workdir, 2, "worker.py", replace(CONFIG, data="task_of_test:data_with_a_hole").to_json())
    assert result.returncode == 1
    assert "error: the loss is nan in iteration " in result.stderr
    assert "hint: lower the learning rate" in result.stderr
    assert "epoch 3/3" not in result.stdout  # it never came to its end


def test_a_label_that_torch_would_ignore_is_an_error() -> None:
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        loss_sum(torch.zeros(2, 3), torch.tensor([1, -100]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, model="digit_cnn"), "error: model: there is no built-in 'digit_cnn'\nhint: did you mean 'digits_cnn'?\n"),
        (
            replace(CONFIG, model="digits_cnn", data="digits", batch=BatchConfig(global_=33)),
            "error: batch: no whole number: global batch 33 = replicas 2 x per-replica 16.5; nearest: 32, 34\n",
        ),
        (replace(CONFIG, model="time:time", data="digits"), "error: model: time:time returned a float\nhint: return a torch.nn.Module\n"),
        (replace(CONFIG, data="time:time"), "error: model: 'task_of_test:model' names a module that does not exist: task_of_test\n"),
        (replace(CONFIG, model="digits_cnn", data="time:time"), "error: data: time:time returned a float\nhint: return two data sets"),
        (replace(CONFIG, model="digits_cnn", data="digits", epochs=1), "error: exactly one of epochs and iterations says how long"),
    ],
)
def test_a_mistake_is_said_before_any_worker_waits_for_another(
    config: TrainerConfig, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The other worker of these two does not exist: joining it would never end.
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DTRAIN_DEVICE", "cpu")
    assert main([config.to_json()]) == 1
    assert capsys.readouterr().err.startswith(message)


def test_outside_a_job_the_trainer_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main([CONFIG.to_json()]) == 1
    assert "RANK" in capsys.readouterr().err


def test_reports_come_at_a_bounded_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_JOB_FOLDER", str(tmp_path))
    now = 0.0
    report = Report(is_rank_0=True, num_iterations=1000, iterations_per_epoch=1000, global_batch_size=32, clock=lambda: now)
    for iteration in range(999):
        now += 0.01
        report.after_iteration(LossSum(total=float(iteration), count=1))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 36 <= len(records) <= 40  # 10 s, at most 4 a second
    assert all(record["samples_per_s"] == pytest.approx(3200) for record in records)
    assert records[1]["loss"] == pytest.approx((records[0]["iteration"] + records[1]["iteration"] - 1) / 2)  # the mean since the one before
