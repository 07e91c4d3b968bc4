"""What the keys under `trainer` must mean together. Whether the batch fits the cluster's size is for the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from dtrain.spec.cluster import ClusterSpec
from dtrain.spec.document import Document
from dtrain.spec.mistake import Mistake, Place, misspelt, named, nearest
from dtrain.spec.modules import missing_module
from dtrain.trainers.config import PipelineConfig, TrainerConfig
from dtrain.trainers.errors import TargetError
from dtrain.trainers.layout import few_micro_batches, fitting_batch, fitting_stages
from dtrain.trainers.schedule import fewest_micro_batches, predicted_bubble
from dtrain.trainers.zoo import DATASETS, MODELS, Kind, target_of


def trainer_mistakes(
    trainer: TrainerConfig | None, document: Document, wrong: Collection[Place], cluster: ClusterSpec, workdir: Path | None
) -> list[Mistake]:
    """What is wrong under `trainer`.

    Args:
        trainer: None where too little remains without what is wrong.
        wrong: the places that are known to be.
        cluster: this machine where nothing better is known.
        workdir: None where it cannot be looked into.
    """
    mistakes: list[Mistake] = []
    if isinstance(document.values["trainer"], dict):
        mistakes += _one_of(("trainer",), ("epochs", "iterations"), "it says how long to train", document, wrong)
        if isinstance(document.values["trainer"].get("batch"), dict):
            mistakes += _lacking(("trainer", "batch"), ("global", "per_replica"), "the other follows from it", document, wrong)
    if trainer is None:
        return mistakes
    batch = trainer.batch
    mistakes += [
        *_target_mistakes("model", trainer.model, workdir),
        *_target_mistakes("data", trainer.data, workdir),
        *_pair_mistakes(trainer, document),
        *_at_least_1(("trainer", "epochs"), trainer.epochs),
        *_at_least_1(("trainer", "iterations"), trainer.iterations),
        *_at_least_1(("trainer", "batch", "global"), batch.global_),
        *_at_least_1(("trainer", "batch", "per_replica"), batch.per_replica),
        *_at_least_1(("trainer", "batch", "micro_batches"), batch.micro_batches),
    ]
    if trainer.pipeline is not None:
        mistakes += _pipeline_mistakes(trainer, trainer.pipeline, document, wrong, cluster)
    if trainer.learning_rate <= 0:
        mistakes.append(
            Mistake(("trainer", "learning_rate"), f"trainer.learning_rate must be above 0, not {trainer.learning_rate:g}", "such as 0.1")
        )
    if trainer.seed < 0:
        mistakes.append(Mistake(("trainer", "seed"), f"trainer.seed must be at least 0, not {trainer.seed}", "such as 0"))
    return mistakes


def _pipeline_mistakes(
    trainer: TrainerConfig, pipeline: PipelineConfig, document: Document, wrong: Collection[Place], cluster: ClusterSpec
) -> list[Mistake]:
    at = ("trainer", "pipeline", "stages")
    if pipeline.stages < 1:
        return _at_least_1(at, pipeline.stages)
    mistakes: list[Mistake] = []
    if trainer.model in MODELS and pipeline.stages > (most := len(MODELS[trainer.model].layers)):
        message = f"{named(at)} is {pipeline.stages}, and {trainer.model} has {most} layers to make stages of"
        return [Mistake(at, message, _stages_that_fit(trainer, cluster) or f"at most {most}")]
    micro_batches, least = trainer.batch.micro_batches, fewest_micro_batches(pipeline.schedule, pipeline.stages)
    if 1 <= micro_batches < least and not any(_says_micro_batches(at) for at in wrong):
        problem = few_micro_batches(pipeline.schedule, pipeline.stages, micro_batches)
        mistakes.append(Mistake(("trainer", "batch", "micro_batches"), problem, _batch_that_fits(trainer, pipeline, least, cluster)))
    if document.given("trainer", "data_parallel") and ("trainer", "data_parallel") not in wrong:
        hint = "leave data_parallel out: the replicas of a stage add up their gradients after the last micro-batch"
        mistakes.append(
            Mistake(("trainer", "data_parallel"), "DDP cannot hold the stages of a pipeline, whose backward passes it would miss", hint)
        )
    return mistakes


def _says_micro_batches(at: Place) -> bool:
    """Whether how many there are, or are wanted, stands at a place that is wrong."""
    is_near = at[:2] == ("trainer", "batch") or at == ("trainer", "pipeline", "schedule")
    return is_near or (len(at) > 0 and nearest(str(at[-1]), ["micro_batches"]) is not None)


def _batch_that_fits(trainer: TrainerConfig, pipeline: PipelineConfig, least: int, cluster: ClusterSpec) -> str:
    dataset, known = DATASETS.get(trainer.data), cluster.size
    cluster_size = pipeline.stages if known is None or known % pipeline.stages else known
    batch = fitting_batch(trainer, cluster_size=cluster_size, num_examples=dataset.num_train if dataset else None)
    if batch is None:
        return f"at least {least}"
    sizes = {"global": batch.global_, "per_replica": batch.per_replica, "micro_batches": batch.micro_batches}
    written = ", ".join(f"{key}: {size}" for key, size in sizes.items() if size is not None)
    bubble = predicted_bubble(pipeline.stages, batch.micro_batches)
    return f"write `batch: {{{written}}}`: then a worker waits {bubble:.0%} of its time; at least {least}"


def _stages_that_fit(trainer: TrainerConfig, cluster: ClusterSpec) -> str | None:
    """None where that depends on how many GPUs the nodes have."""
    cluster_size = cluster.size
    if cluster_size is None:
        return None
    layers, dataset = MODELS[trainer.model].layers, DATASETS.get(trainer.data)
    return fitting_stages(trainer, cluster_size=cluster_size, layers=layers, num_examples=dataset.num_train if dataset else None)


def _target_mistakes(key: Kind, name: str, workdir: Path | None) -> list[Mistake]:
    try:
        target = target_of(key, name)
    except TargetError as error:
        return [Mistake(("trainer", key), f"trainer.{error.message}", error.hint)]
    missing = None if workdir is None or target != name else missing_module(name.partition(":")[0], workdir)
    return [] if missing is None else [Mistake(("trainer", key), f"trainer.{key}: {missing[0]}", missing[1])]


def _pair_mistakes(trainer: TrainerConfig, document: Document) -> list[Mistake]:
    """Of a user's own model or data nobody knows before it runs."""
    if trainer.model not in MODELS or trainer.data not in DATASETS or trainer.data == (fits := MODELS[trainer.model].data):
        return []
    at = document.last([("trainer", "model"), ("trainer", "data")])
    models = " or ".join(name for name, builtin in MODELS.items() if builtin.data == trainer.data)
    hint = f"write `data: {fits}`, or `model: {models}`"
    return [Mistake(at, f"the model {trainer.model} reads {fits}, and cannot train on {trainer.data}", hint)]


def _one_of(at: Place, keys: Sequence[str], why: str, document: Document, wrong: Collection[Place]) -> list[Mistake]:
    given = [key for key in keys if document.given(*at, key)]
    if len(given) > 1:
        return [Mistake(document.last([(*at, key) for key in given]), f"{named(at)} has both {' and '.join(given)}", "keep one of them")]
    return _lacking(at, keys, why, document, wrong)


def _lacking(at: Place, keys: Sequence[str], why: str, document: Document, wrong: Collection[Place]) -> list[Mistake]:
    if any(document.given(*at, key) for key in keys) or misspelt(keys, at, wrong):
        return []
    return [Mistake(at, f"{named(at)} lacks one of {' and '.join(keys)}", f"add one of them: {why}")]


def _at_least_1(at: Place, number: int | None) -> list[Mistake]:
    return [Mistake(at, f"{named(at)} must be at least 1, not {number}", "such as 1")] if number is not None and number < 1 else []
