"""What the keys under `trainer` must mean together. Whether the batch fits the cluster's size is for the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dtrain.spec.document import Document
from dtrain.spec.mistake import Mistake, Place, misspelt, named
from dtrain.trainers.config import PipelineConfig, TrainerConfig
from dtrain.trainers.errors import TargetError
from dtrain.trainers.layout import few_micro_batches
from dtrain.trainers.schedule import fewest_micro_batches, predicted_bubble
from dtrain.trainers.zoo import MODELS, Kind, target_of


def trainer_mistakes(trainer: TrainerConfig | None, document: Document, wrong: Collection[Place]) -> list[Mistake]:
    """`wrong` are the places that are known to be; trainer is None where too little remains without them."""
    mistakes: list[Mistake] = []
    if isinstance(document.values["trainer"], dict):
        mistakes += _one_of(("trainer",), ("epochs", "iterations"), "it says how long to train", document, wrong)
        if isinstance(document.values["trainer"].get("batch"), dict):
            mistakes += _lacking(("trainer", "batch"), ("global", "per_replica"), "the other follows from it", document, wrong)
    if trainer is None:
        return mistakes
    batch = trainer.batch
    mistakes += [
        *_target_mistakes("model", trainer.model),
        *_target_mistakes("data", trainer.data),
        *_at_least_1(("trainer", "epochs"), trainer.epochs),
        *_at_least_1(("trainer", "iterations"), trainer.iterations),
        *_at_least_1(("trainer", "batch", "global"), batch.global_),
        *_at_least_1(("trainer", "batch", "per_replica"), batch.per_replica),
        *_at_least_1(("trainer", "batch", "micro_batches"), batch.micro_batches),
    ]
    if trainer.pipeline is not None:
        mistakes += _pipeline_mistakes(trainer, trainer.pipeline, document, wrong)
    if trainer.learning_rate <= 0:
        mistakes.append(
            Mistake(("trainer", "learning_rate"), f"trainer.learning_rate must be above 0, not {trainer.learning_rate:g}", "such as 0.1")
        )
    if trainer.seed < 0:
        mistakes.append(Mistake(("trainer", "seed"), f"trainer.seed must be at least 0, not {trainer.seed}", "such as 0"))
    return mistakes


def _pipeline_mistakes(trainer: TrainerConfig, pipeline: PipelineConfig, document: Document, wrong: Collection[Place]) -> list[Mistake]:
    at = ("trainer", "pipeline", "stages")
    if pipeline.stages < 1:
        return _at_least_1(at, pipeline.stages)
    mistakes: list[Mistake] = []
    if trainer.model in MODELS and pipeline.stages > (most := len(MODELS[trainer.model].layers)):
        message = f"{named(at)} is {pipeline.stages}, and {trainer.model} has {most} layers to make stages of"
        mistakes.append(Mistake(at, message, f"at most {most}"))
    micro_batches, least = trainer.batch.micro_batches, fewest_micro_batches(pipeline.schedule, pipeline.stages)
    if 1 <= micro_batches < least:
        good = 4 * pipeline.stages
        bubble = predicted_bubble(pipeline.stages, good)
        mistakes.append(
            Mistake(
                ("trainer", "batch", "micro_batches"),
                few_micro_batches(pipeline.schedule, pipeline.stages, micro_batches),
                f"write `batch: {{micro_batches: {good}, ...}}`: then a worker waits {bubble:.0%} of its time; at least {least}",
            )
        )
    if document.given("trainer", "data_parallel") and ("trainer", "data_parallel") not in wrong:
        hint = "leave data_parallel out: the replicas of a stage add up their gradients after the last micro-batch"
        mistakes.append(
            Mistake(("trainer", "data_parallel"), "DDP cannot hold the stages of a pipeline, whose backward passes it would miss", hint)
        )
    return mistakes


def _target_mistakes(key: Kind, name: str) -> list[Mistake]:
    try:
        target_of(key, name)
    except TargetError as error:
        return [Mistake(("trainer", key), f"trainer.{error.message}", error.hint)]
    return []


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
