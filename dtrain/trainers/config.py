"""The keys under `trainer:` in a job file: their one definition.

The launching side validates a job file against these classes; a worker gets the same object back with `from_json`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

# A key that is a Python keyword carries a trailing underscore here and none in the file.
_FILE_KEYS: dict[str, Any] = {"extra": "forbid", "alias_generator": lambda name: name.rstrip("_")}


def _says(description: str, **bounds: int) -> dict[str, Any]:
    """What a key means, for pydantic's JSON Schema, which reads a field's metadata: this file cannot import pydantic."""
    return {"description": description, **({"json_schema_extra": bounds} if bounds else {})}


@dataclass(frozen=True)
class BatchConfig:
    """global = replicas x per_replica, always: one of them is enough, and who gives both is told where they contradict."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _FILE_KEYS

    global_: int | None = field(default=None, metadata=_says("Examples an iteration over all replicas.", minimum=1))
    per_replica: int | None = field(default=None, metadata=_says("Examples an iteration on one replica.", minimum=1))
    micro_batches: int = field(default=1, metadata=_says("Parts that a replica's batch is cut into.", minimum=1))


@dataclass(frozen=True)
class PipelineConfig:
    """The model is cut into stages, one a worker; replicas = cluster size / stages."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _FILE_KEYS

    stages: int = field(metadata=_says("Parts that the model is cut into, one a worker. replicas = cluster size / stages.", minimum=1))
    schedule: Literal["1F1B", "GPipe", "interleaved", "simple"] = field(
        default="1F1B",
        metadata=_says(
            "1F1B alternates forward and backward, GPipe runs all forward first. interleaved and simple are SageMaker's words for the two."
        ),
    )
    partition: Literal["parameters", "uniform"] = field(
        default="parameters", metadata=_says("What the stages get alike of: parameters, or layers (uniform).")
    )


@dataclass(frozen=True)
class TrainerConfig:
    """What to train, on what, and for how long. Exactly one of epochs and iterations is given."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _FILE_KEYS

    model: str = field(metadata=_says("A built-in name (digits_cnn, gpt), or package.module:function that returns a torch.nn.Module."))
    data: str = field(metadata=_says("A built-in name (digits, text), or package.module:function that returns (train, test) datasets."))
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(per_replica=64),
        metadata=_says("global = replicas x per_replica, always: one of them is enough. Default: {per_replica: 64}."),
    )
    epochs: int | None = field(
        default=None,
        metadata=_says("How often to go through the training examples. Exactly one of epochs and iterations is given.", minimum=1),
    )
    iterations: int | None = field(default=None, metadata=_says("How many global batches to train on.", minimum=1))
    learning_rate: float = field(default=0.1, metadata=_says("The optimizer's step size.", exclusiveMinimum=0))
    optimizer: Literal["sgd", "adamw"] = field(default="sgd", metadata=_says("sgd has momentum 0.9."))
    seed: int = field(default=0, metadata=_says("Of the model's first parameters and the order of the examples.", minimum=0))
    data_parallel: Literal["ddp"] = field(
        default="ddp", metadata=_says("How replicas share their gradients. Not with a pipeline, which does that by itself.")
    )
    pipeline: PipelineConfig | None = field(
        default=None, metadata=_says("Cut the model into stages. Without it every worker is a replica of the whole model.")
    )

    def to_json(self) -> str:
        """With the keys that a job file has; a plan shows it."""
        return json.dumps(_as_in_a_file(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, text: str) -> TrainerConfig:
        values = json.loads(text)
        batch = {"global_" if name == "global" else name: value for name, value in values["batch"].items()}
        pipeline = PipelineConfig(**values["pipeline"]) if "pipeline" in values else None
        return cls(**{**values, "batch": BatchConfig(**batch), "pipeline": pipeline})


def _as_in_a_file(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name.rstrip("_"): _as_in_a_file(value) if isinstance(value, dict) else value for name, value in values.items() if value is not None
    }
