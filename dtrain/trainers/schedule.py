"""Pipeline execution schedules: their names, what they need, and what they leave idle. Pure."""

from __future__ import annotations

# SageMaker's `interleaved` is what the field calls 1F1B, not Megatron's schedule of several stages a worker.
SCHEDULES = {"1F1B": "1F1B", "GPipe": "GPipe", "interleaved": "1F1B", "simple": "GPipe"}


def predicted_bubble(stages: int, micro_batches: int) -> float:
    """The part of a worker's time, 0..1, in which it waits for the other stages: (p-1)/(m+p-1).

    For GPipe and 1F1B alike, with stages that take equally long; they differ in how many micro-batches' activations a
    stage holds: all of them, or at most as many as there are stages.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def fewest_micro_batches(schedule: str, stages: int) -> int:
    """With fewer, 1F1B has nothing to alternate (torch refuses it), and GPipe runs one stage after the other."""
    if stages == 1:
        return 1
    return stages if SCHEDULES[schedule] == "1F1B" else 2
