"""One worker of a built-in trainer, from its configuration to its exit code."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtrain.trainers.batch import BatchPlan, plan_batches
from dtrain.trainers.config import TrainerConfig
from dtrain.trainers.data_parallel import DataParallelTrainer
from dtrain.trainers.errors import TargetError, TrainerError
from dtrain.trainers.examples import Examples, examples_of
from dtrain.trainers.layout import PipelinePlan, plan_pipeline
from dtrain.trainers.loss import Evaluation, LossSum
from dtrain.trainers.optimizer import build_optimizer
from dtrain.trainers.pipeline import PipelineTrainer
from dtrain.trainers.report import Report
from dtrain.trainers.stage import LayeredModel, cut_stage, layered
from dtrain.trainers.text import refuse_different_texts
from dtrain.trainers.world import World, join, leave, world_from_environment
from dtrain.trainers.zoo import resolve


@dataclass(frozen=True)
class Trained:
    """What a training ends with."""

    state: dict[str, torch.Tensor]  # a copy of the model's state_dict(); in a pipeline of this rank's stage
    evaluation: Evaluation  # the same on every rank


def main(argv: list[str]) -> int:
    """argv[0] is a TrainerConfig as JSON; the rest comes from the environment, as torchrun sets it."""
    try:
        train(TrainerConfig.from_json(argv[0]))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def train(config: TrainerConfig) -> Trained:
    """Train as one worker of the job that the environment describes.

    Raises:
        TrainerError: the configuration does not fit the data or the workers, or training diverged.
    """
    world = world_from_environment()
    trained = _train(config, world)
    leave()  # here, where the trainer and its model are gone
    return trained


def load(config: TrainerConfig) -> tuple[nn.Module, Examples, Examples]:
    """(model, training set, test set), the same on every rank: each is built under the configuration's seed."""
    build_model, load_data = resolve("model", config.model), resolve("data", config.data)
    torch.manual_seed(config.seed)
    data: Any = load_data()
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TargetError(f"data: {config.data} returned a {type(data).__name__}", hint="return two data sets: (train, test)")
    torch.manual_seed(config.seed)  # again, so that the model does not depend on how the data was loaded
    model: Any = build_model()
    if not isinstance(model, nn.Module):
        raise TargetError(f"model: {config.model} returned a {type(model).__name__}", hint="return a torch.nn.Module")
    return model, examples_of(data[0], name=f"data: {config.data}, train"), examples_of(data[1], name=f"data: {config.data}, test")


def total_iterations(config: TrainerConfig, iterations_per_epoch: int) -> int:
    """Of the whole training, from its epochs or its iterations."""
    if (config.epochs is None) == (config.iterations is None):
        raise TrainerError("exactly one of epochs and iterations says how long to train", hint="for example epochs: 3")
    if config.iterations is not None:
        total = config.iterations
    else:
        assert config.epochs is not None
        total = config.epochs * iterations_per_epoch
    if total < 1:
        raise TrainerError(f"{total} iterations are nothing to train", hint="give at least one epoch or iteration")
    return total


def _train(config: TrainerConfig, world: World) -> Trained:
    model, train_set, test_set = load(config)  # before the group is joined: a mistake shows at once, and waits for nobody
    layers, pipeline = (None, None) if config.pipeline is None else _plan_pipeline(config, world, model, train_set)
    try:
        replicas = world.world_size if pipeline is None else pipeline.replicas
        plan = plan_batches(config.batch, replicas=replicas, num_examples=len(train_set), pad=pipeline is not None)
    except ValueError as error:
        raise TrainerError(f"batch: {error}") from None
    assert plan.iterations_per_epoch is not None
    num_iterations = total_iterations(config, plan.iterations_per_epoch)
    report = Report(
        is_rank_0=world.rank == 0,
        num_iterations=num_iterations,
        iterations_per_epoch=plan.iterations_per_epoch,
        global_batch_size=plan.global_batch_size,
        predicted_bubble=None if pipeline is None else pipeline.bubble,
    )
    trainer: DataParallelTrainer | PipelineTrainer
    if pipeline is None:
        trainer = _data_parallel(config, world, model, train_set, plan, report)
    else:
        assert layers is not None
        trainer = _pipeline(config, world, layers, train_set, pipeline, plan, report)
        del layers, model  # of which this worker keeps its stage
    if config.data == "text":
        refuse_different_texts(train_set, world)
    while True:
        loss = trainer.run_iterations(min(plan.iterations_per_epoch, num_iterations - trainer.iteration))
        evaluation = report.after_epoch(_over_ranks(loss, world), lambda: trainer.evaluate(test_set))
        if trainer.iteration == num_iterations:
            return Trained(trainer.state(), evaluation)


def _data_parallel(
    config: TrainerConfig, world: World, model: nn.Module, train_set: Examples, plan: BatchPlan, report: Report
) -> DataParallelTrainer:
    model.to(world.device)
    optimizer = build_optimizer(config, model)
    torch.manual_seed(_seed_of_rank(config.seed, world.rank))  # from here on, so that dropout differs between replicas
    join(world)
    return DataParallelTrainer(model, optimizer, train_set, plan=plan, seed=config.seed, world=world, on_iteration=report.after_iteration)


def _plan_pipeline(config: TrainerConfig, world: World, model: nn.Module, train_set: Examples) -> tuple[LayeredModel, PipelinePlan]:
    inputs, _ = train_set.take(torch.arange(1))
    layers = layered(model, config.model, inputs)
    try:
        return layers, plan_pipeline(config, cluster_size=world.world_size, layers=layers.layers)
    except ValueError as error:
        raise TrainerError(f"pipeline: {error}") from None


def _pipeline(
    config: TrainerConfig,
    world: World,
    layers: LayeredModel,
    train_set: Examples,
    pipeline: PipelinePlan,
    plan: BatchPlan,
    report: Report,
) -> PipelineTrainer:
    inputs, _ = train_set.take(torch.zeros(plan.micro_batch_size, dtype=torch.int64))
    stage = cut_stage(layers, pipeline, pipeline.stage_of(world.rank), inputs)
    stage.module.to(world.device)
    optimizer = build_optimizer(config, stage.module) if [*stage.module.parameters()] else None
    torch.manual_seed(_seed_of_rank(config.seed, world.rank))
    join(world)
    return PipelineTrainer(
        stage,
        optimizer,
        train_set,
        pipeline=pipeline,
        plan=plan,
        seed=config.seed,
        world=world,
        on_iteration=report.after_iteration,
    )


def _over_ranks(loss: LossSum, world: World) -> LossSum:
    total, count = world.sum_over_ranks([loss.total, loss.count])
    return LossSum(total, round(count))


def _seed_of_rank(seed: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:rank {rank}".encode()).digest()[:8], "big") >> 1
