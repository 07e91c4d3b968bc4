"""Every error that dtrain itself raises, as a tree; a class fixes the exit code.

DtrainError                70  a fault of dtrain's own unless a subclass says otherwise
├── SpecError              65  the job or cluster file is wrong
├── NoSuchJob              66  no job of that id or name
├── NodeUnreachable        69  a node cannot be reached, or was lost
│   └── LogGap             69  it sent bytes of a log that follow on none that were taken
├── NoSpace                73  no room for the store, a node's folder or what is printed
├── NodesBusy              75  the GPUs asked for are not free
│   └── GpusMissing        75  a node does not have them at all: waiting does not help
├── AccessDenied           77  authentication failed or a host key was refused
├── PreflightFailed        78  a node is not fit to run the job
│   └── SetupFailed        78  the job's setup failed on it
└── StoppedElsewhere      143  `dtrain stop` came while the job was being started
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CTRL_C = 130  # exit code of a job ended by Ctrl-C
MOST_MISTAKES = 20  # that are told at once: who has more of them mends these first
STOPPED = 143  # exit code of a job ended by `dtrain stop` or by a TERM to its launcher


class DtrainError(Exception):
    """A message for the person at the terminal: the thing, the cause, and a hint at the next step."""

    exit_code = 70
    finding = "unfit"  # what `check` calls it (findings.py)

    def __init__(self, message: str, *, hint: str | None = None, finding: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.finding = finding or self.finding
        self.by_node: Mapping[str, DtrainError] = {}  # where it tells of several

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


@dataclass(frozen=True, slots=True)
class InFile:
    """A place in a file, which a person finds as `job.yaml:7:7`."""

    file: str  # as the user named it
    line: int | None = None  # from 1, as the column is; None: the file as a whole
    column: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class InOption:
    """An option of the command line: `--set trainer.epochs`."""

    option: str

    def __str__(self) -> str:
        return self.option


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a file or an option."""

    place: InFile | InOption
    message: str
    hint: str | None = None

    @property
    def where(self) -> str:
        return str(self.place)

    def __str__(self) -> str:
        line = f"{self.where}: {self.message}"
        return line if self.hint is None else f"{line}\nhint: {self.hint}"


class SpecError(DtrainError):
    """All mistakes of a job or cluster file at once, in the order of the file; the text tells the first of them and how many more."""

    exit_code = 65

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        told = [str(problem) for problem in self.problems[:MOST_MISTAKES]]
        if more := len(self.problems) - len(told):
            told.append(f"and {more} more {'mistake' if more == 1 else 'mistakes'}")
        super().__init__("\n".join(told))


class NoSuchJob(DtrainError):
    exit_code = 66


class NodeUnreachable(DtrainError):
    exit_code = 69
    finding = "unreachable"


class LogGap(NodeUnreachable):
    """Nothing of these bytes was taken: a copy of a log has no gaps."""

    def __init__(self, node: str, stream: str, offset: int, end: int) -> None:
        super().__init__(f"{node}: {stream} came from byte {offset} on, and what is here of it ends at byte {end}")
        self.stream = stream
        self.end = end  # from where it has to come again


class NoSpace(DtrainError):
    exit_code = 73
    finding = "no-space"


class NodesBusy(DtrainError):
    exit_code = 75
    finding = "gpu-busy"


class GpusMissing(NodesBusy):
    finding = "gpu-missing"


class AccessDenied(DtrainError):
    exit_code = 77
    finding = "access-refused"


class PreflightFailed(DtrainError):
    exit_code = 78


class SetupFailed(PreflightFailed):
    """The first one; the others were stopped for it."""

    def __init__(self, message: str, *, hint: str | None = None, node: str = "") -> None:
        super().__init__(message, hint=hint)
        self.node = node


class StoppedElsewhere(DtrainError):
    exit_code = STOPPED
