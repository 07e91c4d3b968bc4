"""What test_trainer_pipeline.py runs in workers: `torchrun pipeline_worker.py RESULT`; rank r saves its findings as RESULT.r."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dtrain.trainers.batch import plan_batches
from dtrain.trainers.config import BatchConfig, PipelineConfig, TrainerConfig
from dtrain.trainers.digits import digits, digits_cnn
from dtrain.trainers.errors import NonFiniteLoss, TargetError
from dtrain.trainers.examples import examples_of
from dtrain.trainers.gpt import gpt
from dtrain.trainers.layout import plan_pipeline
from dtrain.trainers.loss import LossSum
from dtrain.trainers.occupancy import Occupancy
from dtrain.trainers.optimizer import build_optimizer
from dtrain.trainers.pipeline import PipelineTrainer
from dtrain.trainers.stage import cut_stage, layered
from dtrain.trainers.text import refuse_different_texts
from dtrain.trainers.world import World, join, leave, world_from_environment

SEED = 5
NUM_SEQUENCES, SEQUENCE = 61, 12
NAP_S = 0.03
# (stages, schedule, global batch), each in 4 micro-batches a replica; 13 and 7 leave remainders, between replicas and within one.
CASES = {
    2: [(2, "GPipe", 8), (2, "1F1B", 7)],
    4: [(4, "GPipe", 7), (4, "1F1B", 8), (2, "GPipe", 16), (2, "1F1B", 13)],
}


def sequences() -> TensorDataset:
    values = torch.randint(256, (NUM_SEQUENCES, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
    return TensorDataset(values[:, :-1], values[:, 1:])


def config(stages: int, schedule: Any, global_: int, *, model: str = "gpt", partition: Any = "parameters") -> TrainerConfig:
    pipeline = PipelineConfig(stages=stages, schedule=schedule, partition=partition)
    batch = BatchConfig(global_=global_, micro_batches=4)
    return TrainerConfig(model=model, data="", batch=batch, iterations=5, learning_rate=0.05, pipeline=pipeline)


def trainer_of(
    model: nn.Module, train: TensorDataset, config: TrainerConfig, world: World, heard: Callable[[LossSum, Occupancy], None] | None = None
) -> PipelineTrainer:
    examples = examples_of(train, name="train")
    layers = layered(model, config.model, examples.take(torch.arange(1))[0])
    pipeline = plan_pipeline(config, cluster_size=world.world_size, layers=layers.layers)
    plan = plan_batches(config.batch, replicas=pipeline.replicas, num_examples=len(examples), pad=True)
    stage = cut_stage(layers, pipeline, pipeline.stage_of(world.rank), examples.take(torch.arange(plan.micro_batch_size))[0])
    optimizer = build_optimizer(config, stage.module) if [*stage.module.parameters()] else None
    if not torch.distributed.is_initialized():
        join(world)
    hear = heard or (lambda loss, occupancy: None)
    return PipelineTrainer(stage, optimizer, examples, pipeline=pipeline, plan=plan, seed=SEED, world=world, on_iteration=hear)


def gradients(case: tuple[int, str, int], world: World) -> dict[str, Any]:
    """Of the first iteration of a gpt in float64, with the loss that rank hears; and what an evaluation leaves of them."""
    torch.manual_seed(SEED)
    heard: list[float] = []
    trainer = trainer_of(gpt().double(), sequences(), config(*case), world, lambda loss, _: heard.append(loss.mean))
    evaluation = trainer.evaluate(examples_of(sequences(), name="test"))
    trainer.run_iterations(1)
    found = {name: parameter.grad for name, parameter in trainer.stage.named_parameters().items()}
    before = {name: value.clone() for name, value in found.items() if value is not None}
    trainer.evaluate(examples_of(sequences(), name="test"))
    kept = all(torch.equal(before[name], value) for name, value in found.items() if value is not None)
    return {"gradients": before, "loss": heard[0], "evaluation": vars(evaluation), "kept": kept}


def five_steps(world: World) -> dict[str, Any]:
    """A hybrid in float32, SGD with momentum: 2 stages x 2 replicas of the digits network."""
    torch.manual_seed(SEED)
    train, test = digits()
    trainer = trainer_of(digits_cnn(), train, config(2, "1F1B", 64, model="digits_cnn"), world)
    trainer.run_iterations(5)
    return {"state": trainer.state(), "evaluation": vars(trainer.evaluate(examples_of(test, name="test")))}


class Nap(torch.autograd.Function):
    """Work of a known length, in both directions; sleeping workers do not slow each other down."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(NAP_S)
        return gradients[0]


class NapLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Nap.apply(inputs * self.scale)  # type: ignore[no-untyped-call]
        return output


def bubble(schedule: str, world: World) -> float:
    """Measured on 4 stages that take equally long, without the first iteration."""
    heard: list[Occupancy] = []
    model = nn.Sequential(*(NapLayer() for _ in range(4)))
    train = TensorDataset(torch.randn(64, 3), torch.zeros(64, dtype=torch.int64))
    trainer = trainer_of(model, train, config(4, schedule, 4), world, lambda _, occupancy: heard.append(occupancy))
    trainer.run_iterations(4)
    return sum(heard[1:], Occupancy()).bubble


def diverged(world: World) -> dict[str, Any]:
    """A loss that is no number, which only the last stage can see."""
    torch.manual_seed(SEED)
    inputs, labels = torch.full((8, 1, 8, 8), torch.nan), torch.zeros(8, dtype=torch.int64)
    trainer = trainer_of(digits_cnn(), TensorDataset(inputs, labels), config(2, "1F1B", 8, model="digits_cnn"), world)
    before = trainer.state()
    said = ""
    try:
        trainer.run_iterations(1)
    except NonFiniteLoss as error:
        said = str(error)
    return {"said": said, "unchanged": all(torch.equal(before[name], value) for name, value in trainer.state().items())}


def different_texts(world: World) -> str:
    texts = TensorDataset(torch.full((2, 4), world.rank), torch.zeros(2, 4, dtype=torch.int64))
    try:
        refuse_different_texts(examples_of(texts, name="text"), world)
    except TargetError as error:
        return str(error)
    return ""


def main(result: str) -> None:
    world = world_from_environment()
    found: dict[Any, Any] = {case: gradients(case, world) for case in CASES[world.world_size]}
    if world.world_size == 4:
        found["five steps"] = five_steps(world)
        found["bubble"] = {schedule: bubble(schedule, world) for schedule in ("GPipe", "1F1B")}
    else:
        found["diverged"] = diverged(world)
        found["different texts"] = different_texts(world)
    torch.save(found, f"{result}.{os.environ['RANK']}")
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
