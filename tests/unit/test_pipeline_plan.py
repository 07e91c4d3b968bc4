"""Stages, ranks and bubbles, worked out before anything runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.trainers.batch import plan_batches
from dtrain.trainers.config import BatchConfig, PipelineConfig, TrainerConfig
from dtrain.trainers.errors import TargetError
from dtrain.trainers.layout import plan_pipeline
from dtrain.trainers.partition import Layer, partition
from dtrain.trainers.schedule import SCHEDULES, predicted_bubble
from dtrain.trainers.stage import cut_stage, layered
from dtrain.trainers.zoo import MODELS, resolve


def sizes(stages: tuple[tuple[Layer, ...], ...]) -> list[int]:
    return [sum(layer.num_parameters for layer in stage) for stage in stages]


def config(stages: int = 2, micro_batches: int = 4, **pipeline: Any) -> TrainerConfig:
    batch = BatchConfig(per_replica=8, micro_batches=micro_batches)
    return TrainerConfig(model="gpt", data="text", batch=batch, iterations=1, pipeline=PipelineConfig(stages=stages, **pipeline))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_by_parameters_the_largest_stage_is_as_small_as_it_can_be(stages: int) -> None:
    generator = torch.Generator().manual_seed(stages)
    for _ in range(20):
        costs = torch.randint(0, 50, (8,), generator=generator).tolist()
        layers = [Layer(str(index), cost) for index, cost in enumerate(costs)]
        found = partition(layers, stages, "parameters")
        assert [layer for stage in found for layer in stage] == layers and all(found)
        every_cut = [(0, *cut, 8) for cut in combinations(range(1, 8), stages - 1)]
        assert max(sizes(found)) == min(max(sum(costs[begin:end]) for begin, end in pairwise(cut)) for cut in every_cut)


def test_stages_that_wait_anyway_are_alike() -> None:
    layers = [Layer(str(index), cost) for index, cost in enumerate([90, 10, 10, 10, 10])]
    assert sizes(partition(layers, 3, "parameters")) == [90, 20, 20]
    assert sizes(partition(layers, 3, "uniform")) == [90, 20, 20]
    assert [len(stage) for stage in partition(layers, 2, "uniform")] == [2, 3]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 stages of a model with 3 layers.* at most 3"):
        partition([Layer("a", 1)] * 3, 4, "uniform")


def test_the_layers_that_a_plan_shows_are_those_of_the_model() -> None:
    for name, builtin in MODELS.items():
        model = resolve("model", name)()
        inputs = torch.zeros(1, 64, dtype=torch.int64) if name == "gpt" else torch.zeros(1, 1, 8, 8)
        assert layered(model, name, inputs).layers == builtin.layers


def test_the_bubble_and_the_words_for_a_schedule() -> None:
    assert predicted_bubble(1, 1) == 0
    assert predicted_bubble(4, 8) == pytest.approx(3 / 11)
    plans = {word: plan_pipeline(config(schedule=word), cluster_size=4, layers=None) for word in SCHEDULES}
    assert plans["simple"] == plans["GPipe"] and plans["interleaved"] == plans["1F1B"]
    assert plans["simple"].bubble == pytest.approx(1 / 5)


def test_the_replicas_of_a_stage_are_neighbours() -> None:
    plan = plan_pipeline(config(stages=2), cluster_size=6, layers=None)
    assert plan.replicas == 3
    assert [[*plan.ranks_of(stage)] for stage in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [(plan.stage_of(rank), plan.replica_of(rank)) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config(stages=3), "replicas = cluster size 4 / stages 3 is no whole number; stages that fit: 1, 2, 4"),
        (config(stages=3, micro_batches=2), "is no whole number; stages that fit: 1, 2; with more micro_batches 4"),
        (config(stages=4, micro_batches=3), "1F1B with 4 stages wants as many micro-batches or more, not 3.*; at least 4"),
        (config(stages=4, micro_batches=1, schedule="simple"), "with 1 micro-batch 4 stages work one after the other.*; at least 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(config: TrainerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_pipeline(config, cluster_size=4, layers=MODELS["gpt"].layers)


@pytest.mark.parametrize(
    ("cluster_size", "batch", "fitting"),
    [
        (7, BatchConfig(global_=64, micro_batches=8), "stages that fit: 1"),  # gpt has 6 layers, and 7 is no multiple of 2 to 6
        (12, BatchConfig(global_=64, micro_batches=8), "stages that fit: 2, 3, 4, 6"),  # 12 replicas have too few examples each
        (12, BatchConfig(global_=64, per_replica=32, micro_batches=8), "stages that fit: 6"),
        (12, BatchConfig(per_replica=4000, micro_batches=8), "stages that fit: 3, 4, 6"),  # of 16384 examples
        (7, BatchConfig(global_=4, micro_batches=8), "no number of stages fits a cluster of 7 with this batch"),
    ],
)
def test_only_stages_with_which_all_of_the_arithmetic_comes_out_are_offered(cluster_size: int, batch: BatchConfig, fitting: str) -> None:
    layers = MODELS["gpt"].layers
    with pytest.raises(ValueError, match=f"no whole number; {fitting}($|: change both)"):
        plan_pipeline(replace(config(stages=5), batch=batch), cluster_size=cluster_size, layers=layers, num_examples=16384)
    with pytest.raises(ValueError, match=r"8 stages of a model with 6 layers, .*; stages that fit: 1, 2, 4$"):
        plan_pipeline(config(stages=8, micro_batches=8), cluster_size=8, layers=layers)


def test_a_remainder_is_padded_where_asked_for() -> None:
    plan = plan_batches(BatchConfig(global_=13, micro_batches=3), replicas=2, num_examples=100, pad=True)
    assert plan.equation == "global batch 13 + 5 of weight 0 = replicas 2 x per-replica 9 (micro-batches 3 x 3)"
    assert (plan.padding, plan.iterations_per_epoch) == (5, 7)
    assert [plan.replica_slice(1, replica) for replica in range(2)] == [slice(13, 19), slice(19, 26)]
    exact = BatchConfig(per_replica=12, micro_batches=3)
    assert plan_batches(exact, replicas=2, num_examples=100, pad=True) == plan_batches(exact, replicas=2, num_examples=100)
    with pytest.raises(ValueError, match=r"global batch 5 is less than one example for each .*; nearest: 6"):
        plan_batches(BatchConfig(global_=5, micro_batches=3), replicas=2, num_examples=100, pad=True)
    with pytest.raises(ValueError, match="more than the 10 training examples; nearest: 6"):
        plan_batches(BatchConfig(global_=13, micro_batches=3), replicas=2, num_examples=10, pad=True)


# ---- models of the user's own ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(inputs).tanh())
        return output


class Pair(nn.Module):
    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, inputs


LAYERS: dict[str, Any] = {
    "right": lambda model: [model.first, nn.Tanh(), model.second],
    "forgotten": lambda model: [model.first, model.second],
    "incomplete": lambda model: [model.first, nn.Tanh()],
    "no_list": lambda model: model.first,
    "no_modules": lambda model: [model.first, torch.tanh, model.second],
}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user's module without pipeline_layers, which a test may add, in the folder that workers run in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task_of_stage_test.py").write_text("def model():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "task_of_stage_test", raising=False)
    importlib.invalidate_caches()
    yield importlib.import_module("task_of_stage_test")
    del sys.modules["task_of_stage_test"]


EXAMPLE = torch.ones(1, 4)


def test_layers_keep_the_models_names(task: Any) -> None:
    task.pipeline_layers = LAYERS["right"]
    found = layered(Net(), "task_of_stage_test:model", EXAMPLE)
    assert found.layers == (Layer("first", 20), Layer("Tanh", 0), Layer("second", 20))
    plan = plan_pipeline(config(partition="uniform"), cluster_size=2, layers=found.layers)
    stage = cut_stage(found, plan, 1, torch.ones(2, 4))
    assert [*stage.state()] == [*stage.named_parameters()] == ["second.weight", "second.bias"]
    assert (stage.input_meta.shape, stage.output_meta.shape) == ((2, 4), (2, 4))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            None,
            "returned a Net, and nothing says what its layers are\n"
            "hint: return a torch.nn.Sequential, or define pipeline_layers(model) in task_of_stage_test.py:",
        ),
        ("forgotten", "one after the other, do not give what the model gives"),
        ("incomplete", "no layer of task_of_stage_test:pipeline_layers has the parameter second.weight"),
        ("no_list", "returned no list of layers"),
        ("no_modules", "returned no list of layers"),
    ],
)
def test_layers_that_are_not_the_model_are_refused(task: Any, layers: str | None, message: str) -> None:
    if layers is not None:
        task.pipeline_layers = LAYERS[layers]
    with pytest.raises(TargetError) as error:
        layered(Net(), "task_of_stage_test:model", EXAMPLE)
    assert message in str(error.value)


def test_a_sequential_needs_no_word_and_may_repeat_a_layer(task: Any) -> None:
    tanh = nn.Tanh()
    found = layered(nn.Sequential(nn.Linear(4, 4), tanh, nn.Linear(4, 4), tanh), "task_of_stage_test:model", EXAMPLE)
    assert found.names == ("0", "1", "2", "3")
    plan = plan_pipeline(config(partition="uniform"), cluster_size=2, layers=found.layers)
    assert [len(cut_stage(found, plan, index, EXAMPLE).module) for index in range(2)] == [2, 2]


def test_stages_that_share_a_parameter_are_refused(task: Any) -> None:
    linear = nn.Linear(4, 4)
    found = layered(nn.Sequential(linear, nn.Tanh(), linear), "task_of_stage_test:model", EXAMPLE)
    plan = plan_pipeline(config(partition="uniform"), cluster_size=2, layers=found.layers)
    with pytest.raises(TargetError, match=r"stages 0 and 1 share the parameter 0\.(weight|bias)"):
        cut_stage(found, plan, 0, EXAMPLE)


def test_a_layer_of_two_tensors_is_refused(task: Any) -> None:
    found = layered(nn.Sequential(nn.Linear(4, 4), Pair(), nn.Linear(4, 4)), "task_of_stage_test:model", EXAMPLE)
    plan = plan_pipeline(config(), cluster_size=2, layers=found.layers)
    with pytest.raises(TargetError, match="layer 1 gives something else than one tensor"):
        cut_stage(found, plan, 0, EXAMPLE)
