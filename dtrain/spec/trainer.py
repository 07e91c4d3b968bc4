"""What the keys under `trainer` must mean together. Whether the batch fits the cluster's size is for the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from dtrain.spec.document import Document
from dtrain.spec.mistake import Mistake, Place, misspelt, named, nearest
from dtrain.spec.modules import missing_module
from dtrain.trainers.batch import BatchPlan, plan_batches
from dtrain.trainers.config import PipelineConfig, TrainerConfig
from dtrain.trainers.errors import TargetError
from dtrain.trainers.layout import PipelinePlan, few_micro_batches, fitting_batch, fitting_stages, plan_pipeline
from dtrain.trainers.schedule import fewest_micro_batches, predicted_bubble
from dtrain.trainers.zoo import DATASETS, MODELS, Kind, target_of

_PIPELINE = ("trainer", "pipeline", "stages")


def trainer_mistakes(
    trainer: TrainerConfig | None, document: Document, wrong: Collection[Place], cluster_size: int | None, workdir: Path | None
) -> list[Mistake]:
    """What is wrong under `trainer`.

    Args:
        trainer: None where too little remains without what is wrong.
        wrong: the places that are known to be.
        cluster_size: None where it is not known.
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
        mistakes += _pipeline_mistakes(trainer, trainer.pipeline, document, wrong, cluster_size)
    if trainer.learning_rate <= 0:
        mistakes.append(
            Mistake(("trainer", "learning_rate"), f"trainer.learning_rate must be above 0, not {trainer.learning_rate:g}", "such as 0.1")
        )
    if trainer.seed < 0:
        mistakes.append(Mistake(("trainer", "seed"), f"trainer.seed must be at least 0, not {trainer.seed}", "such as 0"))
    return mistakes + _misfits(trainer, {*wrong, *(each.at for each in mistakes)}, cluster_size)


def plan_training(trainer: TrainerConfig, cluster_size: int) -> tuple[PipelinePlan | None, BatchPlan]:
    """How the trainer's work is shared out over so many workers.

    Raises:
        Misfit: it cannot be.
    """
    known, dataset = MODELS.get(trainer.model), DATASETS.get(trainer.data)
    num_examples = dataset.num_train if dataset else None
    pipeline = None
    try:
        if trainer.pipeline is not None:
            layers = known.layers if known else None
            pipeline = plan_pipeline(trainer, cluster_size=cluster_size, layers=layers, num_examples=num_examples)
    except ValueError as error:
        raise Misfit(_PIPELINE, error) from error
    replicas = cluster_size if pipeline is None else pipeline.replicas
    try:
        return pipeline, plan_batches(trainer.batch, replicas=replicas, num_examples=num_examples, pad=pipeline is not None)
    except ValueError as error:
        raise Misfit(("trainer", "batch", "per_replica" if trainer.batch.global_ is None else "global"), error) from error


class Misfit(Exception):
    """What does not fit the cluster's size; what works stands behind the semicolon."""

    def __init__(self, at: Place, error: ValueError) -> None:
        super().__init__(str(error))
        problem, _, hint = str(error).partition("; ")
        self.mistake = Mistake(at, problem, hint or None)


def _misfits(trainer: TrainerConfig, known: Collection[Place], cluster_size: int | None) -> list[Mistake]:
    """None where something else is wrong that it would follow from."""
    parts = [("trainer", key) for key in ("model", "data", "batch", "pipeline")]
    if cluster_size is None or any(at[:2] in parts for at in known):
        return []
    try:
        plan_training(trainer, cluster_size)
    except Misfit as misfit:
        return [misfit.mistake]
    return []


def _pipeline_mistakes(
    trainer: TrainerConfig, pipeline: PipelineConfig, document: Document, wrong: Collection[Place], cluster_size: int | None
) -> list[Mistake]:
    at = _PIPELINE
    if pipeline.stages < 1:
        return _at_least_1(at, pipeline.stages)
    if cluster_size is not None and cluster_size % pipeline.stages:
        return []  # a misfit
    mistakes: list[Mistake] = []
    if trainer.model in MODELS and pipeline.stages > (most := len(MODELS[trainer.model].layers)):
        message = f"{named(at)} is {pipeline.stages}, and {trainer.model} has {most} layers to make stages of"
        return [Mistake(at, message, _stages_that_fit(trainer, cluster_size) or f"at most {most}")]
    micro_batches, least = trainer.batch.micro_batches, fewest_micro_batches(pipeline.schedule, pipeline.stages)
    if 1 <= micro_batches < least and not any(_says_micro_batches(at) for at in wrong):
        problem = few_micro_batches(pipeline.schedule, pipeline.stages, micro_batches)
        mistakes.append(Mistake(("trainer", "batch", "micro_batches"), problem, _batch_that_fits(trainer, pipeline, least, cluster_size)))
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


def _batch_that_fits(trainer: TrainerConfig, pipeline: PipelineConfig, least: int, cluster_size: int | None) -> str:
    dataset = DATASETS.get(trainer.data)
    batch = fitting_batch(trainer, cluster_size=cluster_size or pipeline.stages, num_examples=dataset.num_train if dataset else None)
    if batch is None:
        return f"at least {least}"
    sizes = {"global": batch.global_, "per_replica": batch.per_replica, "micro_batches": batch.micro_batches}
    written = ", ".join(f"{key}: {size}" for key, size in sizes.items() if size is not None)
    bubble = predicted_bubble(pipeline.stages, batch.micro_batches)
    return f"write `batch: {{{written}}}`: then a worker waits {bubble:.0%} of its time; at least {least}"


def _stages_that_fit(trainer: TrainerConfig, cluster_size: int | None) -> str | None:
    """None where that depends on how many GPUs the nodes have."""
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
        last = document.last([(*at, key) for key in given])
        return [Mistake(last, f"{named(at)} has both {' and '.join(given)}", "keep one of them", of_key=True)]
    return _lacking(at, keys, why, document, wrong)


def _lacking(at: Place, keys: Sequence[str], why: str, document: Document, wrong: Collection[Place]) -> list[Mistake]:
    if any(document.given(*at, key) for key in keys) or misspelt(keys, at, wrong):
        return []
    lacks = f"{named(at)} lacks one of {' and '.join(keys)}"
    return [Mistake(document.lacking(at, keys), lacks, f"add one of them: {why}", of_key=True)]


def _at_least_1(at: Place, number: int | None) -> list[Mistake]:
    return [Mistake(at, f"{named(at)} must be at least 1, not {number}", "such as 1")] if number is not None and number < 1 else []
