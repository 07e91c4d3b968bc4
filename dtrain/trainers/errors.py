"""What a built-in trainer says when it cannot go on, as a tree. `main` turns each into exit code 1 and one message.

    TrainerError
    ├── TargetError      the model or the data set that the job file names
    ├── DeviceError      the device that this worker was given
    └── NonFiniteLoss    training diverged

(The launching side has a tree of its own, dtrain/errors.py: nothing of it is on a node.)
"""

from __future__ import annotations


class TrainerError(Exception):
    """A message for the person who reads the worker's log: the thing, the cause, and a hint at the next step."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class TargetError(TrainerError):
    pass


class DeviceError(TrainerError):
    pass


class NonFiniteLoss(TrainerError):
    pass
