"""What the allreduce benchmark measures; a worker gets it back with `from_json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

DEFAULT_SIZES_BYTES = tuple(1024 * 4**power for power in range(9))  # 1 KiB .. 64 MiB


@dataclass(frozen=True)
class AllreduceConfig:
    """Message sizes, and for how long to measure each of them. Repeats are counted so that a size takes about time_per_size_s."""

    sizes_bytes: tuple[int, ...] = DEFAULT_SIZES_BYTES  # of the float32 buffer on one rank, so a multiple of 4
    warmup_s: float = 0.2  # and at least 3 iterations: drains what the network allows in a burst
    time_per_size_s: float = 1.0
    min_iterations: int = 5
    max_iterations: int = 2000

    def __post_init__(self) -> None:
        wrong = [size for size in self.sizes_bytes if size < 4 or size % 4]
        if wrong:
            raise ValueError(f"size of {wrong[0]} bytes: a message is of whole float32 numbers, so 4, 8, 12, ... bytes")
        if not self.sizes_bytes:
            raise ValueError("no sizes to measure")
        if not 1 <= self.min_iterations <= self.max_iterations:
            raise ValueError(f"min_iterations {self.min_iterations} is not in 1..max_iterations ({self.max_iterations})")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AllreduceConfig:
        values = json.loads(text)
        if "sizes_bytes" in values:
            values["sizes_bytes"] = tuple(values["sizes_bytes"])
        return cls(**values)
