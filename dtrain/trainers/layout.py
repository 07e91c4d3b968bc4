"""Which worker runs which stage of which replica: the one place that says so. Pure.

rank = stage x replicas + replica. So the workers that hold the same stage stand next to each other, within a node as far as
they fit, and what they send each other in every iteration, their stage's gradients, stays there; between stages go only
activations, from node to node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain.trainers.batch import plan_batches
from dtrain.trainers.config import BatchConfig, TrainerConfig
from dtrain.trainers.partition import Layer, partition
from dtrain.trainers.schedule import SCHEDULES, fewest_micro_batches, predicted_bubble


@dataclass(frozen=True)
class PipelinePlan:
    stages: int
    replicas: int
    schedule: str  # 1F1B | GPipe
    micro_batches: int
    layers: tuple[tuple[Layer, ...], ...] | None  # of each stage; None: only the workers know the model

    @property
    def bubble(self) -> float:
        """Predicted, 0..1."""
        return predicted_bubble(self.stages, self.micro_batches)

    def stage_of(self, rank: int) -> int:
        return rank // self.replicas

    def replica_of(self, rank: int) -> int:
        return rank % self.replicas

    def ranks_of(self, stage: int) -> range:
        """The workers that hold a stage, by replica."""
        return range(stage * self.replicas, (stage + 1) * self.replicas)


def plan_pipeline(
    config: TrainerConfig, *, cluster_size: int, layers: Sequence[Layer] | None, num_examples: int | None = None
) -> PipelinePlan:
    """The pipelines of a job.

    Args:
        layers: of the model, in order; None where they are not known.
        num_examples: of the training set, for what is said of other numbers of stages; None where it is not known.

    Raises:
        ValueError: the stages do not fit the cluster, the model or the micro-batches.
    """
    pipeline = config.pipeline
    assert pipeline is not None
    stages, micro_batches = pipeline.stages, config.batch.micro_batches
    if stages < 1 or cluster_size % stages:
        fitting = fitting_stages(config, cluster_size=cluster_size, layers=layers, num_examples=num_examples)
        raise ValueError(f"replicas = cluster size {cluster_size} / stages {stages} is no whole number; {fitting}")
    if layers is not None and stages > len(layers):
        fitting = fitting_stages(config, cluster_size=cluster_size, layers=layers, num_examples=num_examples)
        raise ValueError(f"{stages} stages of a model with {len(layers)} layers, and a stage has at least one; {fitting}")
    least = fewest_micro_batches(pipeline.schedule, stages)
    if micro_batches < least:
        raise ValueError(f"{few_micro_batches(pipeline.schedule, stages, micro_batches)}; at least {least}")
    return PipelinePlan(
        stages=stages,
        replicas=cluster_size // stages,
        schedule=SCHEDULES[pipeline.schedule],
        micro_batches=micro_batches,
        layers=None if layers is None else partition(layers, stages, pipeline.partition),
    )


def fitting_stages(config: TrainerConfig, *, cluster_size: int, layers: Sequence[Layer] | None, num_examples: int | None) -> str:
    """The numbers of stages with which all of a job's arithmetic comes out, in words."""
    assert config.pipeline is not None
    most = cluster_size if layers is None else min(cluster_size, len(layers))
    possible = [replace(config.pipeline, stages=stages) for stages in range(1, most + 1) if cluster_size % stages == 0]
    fitting = [pipeline.stages for pipeline in possible if _fits(replace(config, pipeline=pipeline), cluster_size, layers, num_examples)]
    if not fitting:
        return f"no number of stages fits a cluster of {cluster_size} with this batch: change both"
    few = [str(p.stages) for p in possible if config.batch.micro_batches < fewest_micro_batches(p.schedule, p.stages)]
    return f"stages that fit: {', '.join(map(str, fitting))}" + (f"; with more micro_batches {', '.join(few)}" if few else "")


def fitting_batch(config: TrainerConfig, *, cluster_size: int, num_examples: int | None) -> BatchConfig | None:
    """The batch with enough micro-batches: of the size that it has if all arithmetic comes out then, else of one example each."""
    assert config.pipeline is not None
    stages = config.pipeline.stages
    numbers = (4 * stages, fewest_micro_batches(config.pipeline.schedule, stages))
    batches = [
        *(replace(config.batch, micro_batches=number) for number in numbers),
        *(BatchConfig(per_replica=number, micro_batches=number) for number in numbers),
    ]
    return next((batch for batch in batches if _fits(replace(config, batch=batch), cluster_size, None, num_examples)), None)


def _fits(config: TrainerConfig, cluster_size: int, layers: Sequence[Layer] | None, num_examples: int | None) -> bool:
    try:
        plan = plan_pipeline(config, cluster_size=cluster_size, layers=layers)
        plan_batches(config.batch, replicas=plan.replicas, num_examples=num_examples, pad=True)
    except ValueError:
        return False
    return True


def few_micro_batches(schedule: str, stages: int, micro_batches: int) -> str:
    """Why so few are refused."""
    if SCHEDULES[schedule] == "1F1B":
        return f"{schedule} with {stages} stages wants as many micro-batches or more, not {micro_batches}: else stages never all work"
    return f"with {micro_batches} micro-batch {stages} stages work one after the other, never at once"
