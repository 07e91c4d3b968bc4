"""How a job ended, and why."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dtrain.jobstate import Failure, JobState, State
from dtrain.render.console import duration, harmless

_TAIL_LINES, _TAIL_BYTES = 10, 8192
_REASONS = {
    "launcher-failed": "torchrun or mpirun on it ended before the workers did",
    "start-timeout": "its workers did not start in time",
    "agent-killed": "dtrain's agent on it was killed",
    "guard-killed": "dtrain's guard on it was killed",
    "node-lost": "dtrain's agent and guard on it are gone",
    "folder-gone": "its job folder was deleted, or cannot be written",
    "never-committed": "it was prepared and never told to start",
    "lease-over": "its launcher was silent for longer than the lease",
}


def print_end(console: Console, name: str, job: str, state: JobState, evaluation: Mapping[str, float], log_folder: Path) -> None:
    """The result, or the one root cause with its traceback and where to read on."""
    for key, value in evaluation.items() if state.state is State.SUCCEEDED else ():
        console.print(Text(f"{key} {value:.1%}" if "accuracy" in key else f"{key} {value:.4g}", "bold"))
    failure = state.first_failure
    if state.state in (State.FAILED, State.LOST) and failure is not None and state.start_failed is None:
        _print_failure(console, failure, log_folder)
    took = ""
    if state.started_at is not None and state.ended_at is not None:
        took = f" after {duration(max(0.0, state.ended_at - state.started_at))}"
    style = "bold green" if state.state is State.SUCCEEDED else "bold red"
    console.print(Text.assemble(f"job {name} {job} ", (state.state.value, style), took), soft_wrap=True)
    print_survivors(console, state)


def print_detached(console: Console, name: str, job: str) -> None:
    """All workers run, and nobody follows them."""
    console.print(Text.assemble(f"job {name} {job} ", ("RUNNING", "bold cyan"), ", detached"), soft_wrap=True)
    for command in (f"status {job}", f"logs {job} --follow", f"stop {job}"):
        console.print(f"  dtrain {command}", soft_wrap=True)


def print_survivors(console: Console, state: JobState) -> bool:
    """Name each process that KILL did not end. Whether there is one."""
    found = [(node.name, survivor) for node in state.nodes for survivor in node.survivors]
    for node, survivor in found:
        text = f"{node}: process {survivor.pid} ({survivor.state}) is still there: {harmless(survivor.command)}"
        console.print(Text(text, "red"), soft_wrap=True)
    return bool(found)


def _print_failure(console: Console, failure: Failure, log_folder: Path) -> None:
    console.print(Text(describe(failure), "bold red"), soft_wrap=True)
    log = log_folder / failure.node / failure.log
    told = failure.traceback or failure.detail or _last_lines(log)
    if told:
        console.print(Text("\n".join("  " + line for line in told.rstrip().splitlines())), soft_wrap=True)
    if log.is_file():  # a launcher that was killed has written nothing
        console.print(Text(f"log: {log}", "dim"), soft_wrap=True)


def describe(failure: Failure) -> str:
    """One sentence: who ended, how, and why."""
    if failure.rank is None:
        return f"{failure.node} failed: {_REASONS.get(failure.reason, failure.reason)}"
    ended = (
        f"exit code {failure.exit_code}"
        if failure.signal is None
        else f"{signal.Signals(failure.signal).name} (exit code {failure.exit_code})"
    )
    reason = "" if failure.reason == "exit-code" else f": {failure.reason}"
    return f"rank {failure.rank} on {failure.node} failed with {ended}{reason}"


def _last_lines(log: Path) -> str:
    """The end of a worker's output, where it left no traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(harmless(line) for line in text.splitlines()[-_TAIL_LINES:])
