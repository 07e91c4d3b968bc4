"""The pipeline trainer on real workers: torchrun, gloo, several processes. What it trains must be what one process trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.nn.functional import cross_entropy

from dtrain.trainers.batch import indices, plan_batches
from dtrain.trainers.config import BatchConfig, PipelineConfig, TrainerConfig
from dtrain.trainers.digits import digits, digits_cnn
from dtrain.trainers.gpt import gpt
from tests.pipeline_worker import CASES, SEED, sequences
from tests.workers import ROOT, torchrun

WORKER = ROOT / "tests/pipeline_worker.py"


Found: TypeAlias = Callable[[int], list[dict[Any, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What so many workers found, by rank: all cases in one start of them, which takes the most time."""

    @functools.cache
    def run(world_size: int) -> list[dict[Any, Any]]:
        folder = tmp_path_factory.mktemp("pipeline")
        result = torchrun(folder, world_size, WORKER, "result")
        assert result.returncode == 0, result.stderr
        return [torch.load(folder / f"result.{rank}") for rank in range(world_size)]

    return run


@pytest.mark.parametrize(("world_size", "case"), [(world_size, case) for world_size, cases in CASES.items() for case in cases])
def test_gradients_are_those_of_one_process(found: Found, world_size: int, case: tuple[int, str, int]) -> None:
    """In float64, with a global batch that divides and with one that does not, whose padding must weigh nothing."""
    stages, _, global_batch_size = case
    torch.manual_seed(SEED)
    model = gpt().double()
    inputs, labels = sequences().tensors
    plan = plan_batches(BatchConfig(global_=global_batch_size), replicas=1, num_examples=len(inputs))
    index = indices(plan, seed=SEED, epoch=0, iteration=0, replica=0)
    loss = cross_entropy(model(inputs[index]), labels[index])
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        output = model(inputs)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    ranks = [rank[case] for rank in found(world_size)]
    names = [tuple(rank["gradients"]) for rank in ranks]
    assert len(set(names)) == stages  # every rank of a stage has that stage, and together they have the model
    assert sorted(name for stage in set(names) for name in stage) == sorted(expected)
    largest = max((gradient - expected[name]).abs().max().item() for rank in ranks for name, gradient in rank["gradients"].items())
    print(f"largest difference of a gradient: {largest:.1e}")
    assert largest < 1e-12
    for rank in ranks:
        assert rank["loss"] == pytest.approx(loss.item(), rel=1e-12)  # on every rank, though it arises on the last stage
        assert rank["evaluation"]["loss"] == pytest.approx(cross_entropy(output, labels).item(), rel=1e-12)
        assert rank["evaluation"]["accuracy"] == (output.argmax(1) == labels).double().mean().item()
        assert rank["kept"]  # an evaluation touches no gradient


def test_five_steps_of_a_hybrid_are_those_of_one_process(found: Found) -> None:
    """2 stages x 2 replicas, float32, SGD with momentum."""
    torch.manual_seed(SEED)
    model = digits_cnn()
    train, test = digits()
    inputs, labels = train.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = plan_batches(BatchConfig(global_=64), replicas=1, num_examples=len(inputs))
    for iteration in range(5):
        index = indices(plan, seed=SEED, epoch=0, iteration=iteration, replica=0)
        optimizer.zero_grad()
        cross_entropy(model(inputs[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        output = model(test.tensors[0])
    expected = model.state_dict()
    ranks = [rank["five steps"] for rank in found(4)]
    largest = max((value - expected[name]).abs().max().item() for rank in ranks for name, value in rank["state"].items())
    print(f"largest difference of a parameter: {largest:.1e}")
    assert largest < 1e-5
    assert {name for rank in ranks for name in rank["state"]} == set(expected)
    for rank, twin in ((0, 1), (2, 3)):  # the replicas of a stage, next to each other
        assert all(torch.equal(value, ranks[twin]["state"][name]) for name, value in ranks[rank]["state"].items())
    for rank in ranks:
        assert rank["evaluation"]["loss"] == pytest.approx(cross_entropy(output, test.tensors[1]).item(), abs=1e-5)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_measured_bubble_is_near_the_predicted_one(found: Found, schedule: str) -> None:
    """4 equal stages and 4 micro-batches: 3/7 of the time. What it costs to send and to start comes on top."""
    bubbles = {rank["bubble"][schedule] for rank in found(4)}
    print(f"bubble {bubbles}, predicted {3 / 7:.3f}")
    assert all(3 / 7 - 0.02 < bubble < 3 / 7 + 0.12 for bubble in bubbles)


def test_a_loss_that_is_not_finite_stops_every_stage_before_it_learns_from_it(found: Found) -> None:
    for rank in found(2):
        assert rank["diverged"]["said"].startswith("the loss is nan in iteration 1\nhint: lower the learning rate")
        assert rank["diverged"]["unchanged"]


def test_nodes_with_different_texts_are_refused(found: Found) -> None:
    for rank in found(2):
        assert rank["different texts"].startswith("data: 'text' differs between nodes: rank 0 reads it from Python 3.")
        assert "rank 1 from Python 3." in rank["different texts"]


# A user's own model: its first stage has no parameters, its second running statistics.
TASK = """
import torch
from torch.utils.data import TensorDataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = torch.nn.Flatten()
        self.body = torch.nn.ModuleDict({"in": torch.nn.Linear(6, 8), "norm": torch.nn.BatchNorm1d(8)})
        self.head = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, inputs):
        return self.head(self.body["norm"](self.body["in"](self.flatten(inputs))))

def model():
    return Net().double()

def pipeline_layers(model):
    return [model.flatten, model.body["in"], model.body["norm"], model.head]

def tensors():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(98, 2, 3, dtype=torch.float64, generator=generator)
    return inputs, (inputs[:, 0, 0] > 0).long() + (inputs[:, 1, 1] > 1).long()

def data():
    inputs, labels = tensors()
    return TensorDataset(inputs[:61], labels[:61]), TensorDataset(inputs[61:], labels[61:])
"""

SCRIPT = """
import os, pathlib, sys
import torch
from dtrain.trainers.config import TrainerConfig
from dtrain.trainers.main import train

trained = train(TrainerConfig.from_json(sys.argv[1]))
threads = {path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")}
torch.save((trained.state, vars(trained.evaluation), threads), f"result.{os.environ['RANK']}")
"""


def test_a_users_layers_train_as_the_model_does(tmp_path: Path) -> None:
    (tmp_path / "task_of_pipeline_test.py").write_text(TASK)
    (tmp_path / "worker.py").write_text(SCRIPT)
    config = TrainerConfig(
        model="task_of_pipeline_test:model",
        data="task_of_pipeline_test:data",
        batch=BatchConfig(global_=24, micro_batches=3),
        iterations=5,
        pipeline=PipelineConfig(stages=3, schedule="interleaved", partition="uniform"),
    )
    result = torchrun(tmp_path, 3, "worker.py", config.to_json())
    assert result.returncode == 0, result.stderr
    assert "bubble" in result.stdout and "predicted 40.0%" in result.stdout

    task: dict[str, Any] = {"__name__": "task_of_pipeline_test"}
    exec(TASK, task)
    torch.manual_seed(config.seed)
    model = task["model"]()
    inputs, labels = task["tensors"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)
    plan = plan_batches(BatchConfig(global_=24), replicas=1, num_examples=61)
    for number in range(5):
        epoch, iteration = divmod(number, 2)
        index = torch.tensor(indices(plan, seed=config.seed, epoch=epoch, iteration=iteration, replica=0))
        optimizer.zero_grad()
        for part in torch.split(index, 8):  # running statistics are of micro-batches
            (cross_entropy(model(inputs[part]), labels[part], reduction="sum") / 24).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output = model(inputs[61:])

    parts = [torch.load(tmp_path / f"result.{rank}") for rank in range(3)]
    state = {name: value for part, _, _ in parts for name, value in part.items()}
    assert not parts[0][0] and state.keys() == model.state_dict().keys()
    for name, expected in model.state_dict().items():
        assert (state[name] - expected).abs().max() < 1e-12, name
    for _, evaluation, threads in parts:
        assert evaluation["loss"] == pytest.approx(cross_entropy(output, labels[61:]).item(), rel=1e-12)
        assert not [name for name in threads if "gloo" in name]  # else the exit of the worker may abort it
