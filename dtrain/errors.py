"""Every error that dtrain itself raises, as a tree; a class fixes the exit code.

DtrainError                70  a fault of dtrain's own unless a subclass says otherwise
├── SpecError              65  the job or cluster file is wrong
├── NoSuchJob              66  no job of that id or name
├── NodeUnreachable        69  a node cannot be reached, or was lost
├── NoSpace                73  no room for the store or a node's folder
├── NodesBusy              75  the GPUs asked for are not free
├── AccessDenied           77  authentication failed or a host key was refused
├── PreflightFailed        78  a node is not fit to run the job, or setting it up failed
└── StoppedElsewhere      143  `dtrain stop` came while the job was being started
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CTRL_C = 130  # exit code of a job ended by Ctrl-C
STOPPED = 143  # exit code of a job ended by `dtrain stop` or by a TERM to its launcher


class DtrainError(Exception):
    """A message for the person at the terminal: the thing, the cause, and a hint at the next step."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a file or an option."""

    where: str  # "job.yaml:7:7", or the option that holds it: "--set trainer.epochs"
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        line = f"{self.where}: {self.message}"
        return line if self.hint is None else f"{line}\nhint: {self.hint}"


class SpecError(DtrainError):
    """All mistakes of a job or cluster file at once, in the order of the file."""

    exit_code = 65

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class NoSuchJob(DtrainError):
    exit_code = 66


class NodeUnreachable(DtrainError):
    exit_code = 69


class NoSpace(DtrainError):
    exit_code = 73


class NodesBusy(DtrainError):
    exit_code = 75


class AccessDenied(DtrainError):
    exit_code = 77


class PreflightFailed(DtrainError):
    exit_code = 78


class StoppedElsewhere(DtrainError):
    exit_code = STOPPED
