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


@dataclass(frozen=True)
class BatchConfig:
    """global = replicas x per_replica, always: one of them is enough, and who gives both is told where they contradict."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _FILE_KEYS

    global_: int | None = None  # examples an iteration over all replicas
    per_replica: int | None = None  # examples an iteration on one replica
    micro_batches: int = 1  # parts that a replica's batch is cut into


@dataclass(frozen=True)
class PipelineConfig:
    """The model is cut into stages, one a worker; replicas = cluster size / stages."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _FILE_KEYS

    stages: int
    schedule: Literal["1F1B", "GPipe", "interleaved", "simple"] = "1F1B"  # the last two are SageMaker's words for the first two
    partition: Literal["parameters", "uniform"] = "parameters"  # what the stages get alike of: parameters, or layers


@dataclass(frozen=True)
class TrainerConfig:
    """What to train, on what, and for how long. Exactly one of epochs and iterations is given."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _FILE_KEYS

    model: str  # a built-in name, or package.module:function that returns a torch.nn.Module
    data: str  # a built-in name, or package.module:function that returns (train, test) datasets
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(per_replica=64))
    epochs: int | None = None
    iterations: int | None = None
    learning_rate: float = 0.1
    optimizer: Literal["sgd", "adamw"] = "sgd"
    seed: int = 0
    data_parallel: Literal["ddp"] = "ddp"  # without a pipeline
    pipeline: PipelineConfig | None = None

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
