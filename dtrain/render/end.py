"""How a job ended, and why."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dtrain.errors import NoSpace
from dtrain.jobstate import Failure, JobState, State
from dtrain.node.lastwords import without_rank_prefix
from dtrain.plan import LaunchPlan, counted
from dtrain.reasons import REASONS
from dtrain.render.console import duration, harmless

_PRINTED = ("launcher-failed", "start-timeout", "setup-failed")  # reasons whose detail is what launcher or setup printed last
_TAIL_LINES, _TAIL_BYTES, _LINE_LENGTH = 30, 64 * 1024, 2000


def print_end(console: Console, job: str, plan: LaunchPlan, state: JobState, evaluation: Mapping[str, float], log_folder: Path) -> None:
    """The result, or the one root cause with what it printed and where to read on."""
    for key, value in evaluation.items() if state.state is State.SUCCEEDED else ():
        console.print(Text(f"{key} {value:.1%}" if "accuracy" in key else f"{key} {value:.4g}", "bold"))
    failure = state.first_failure
    if state.state in (State.FAILED, State.LOST) and failure is not None and state.start_failed is None:
        folder = next(node.job_folder for node in plan.nodes if node.name == failure.node)
        print_failure(console, failure, log_folder, folder)
    if state.state is State.FAILED and state.start_failed is not None:
        console.print(Text(f"it was not started: {state.start_failed.text}", "bold red"), soft_wrap=True)
    took = ""
    if state.started_at is not None and state.ended_at is not None:
        took = f" after {duration(max(0.0, state.ended_at - state.started_at))}"
    style = "bold green" if state.state is State.SUCCEEDED else "bold red"
    console.print(Text.assemble(f"job {plan.name} {job} ", (state.state.value, style), took), soft_wrap=True)
    print_stopped_by(console, state)
    print_survivors(console, state)


def print_stopped_by(console: Console, state: JobState) -> None:
    """Why a job has stopped that nobody stopped."""
    if state.state is State.STOPPED and state.stopped_by == "lease-over":
        reason = REASONS["lease-over"]
        console.print(Text(f"it stopped because {reason.of_node}; {reason.hint}"), soft_wrap=True)


def print_outcome(console: Console, name: str, job: str, state: JobState) -> None:
    """How a job ended, in a line or two."""
    if state.state in (State.FAILED, State.LOST) and state.first_failure is not None and state.start_failed is None:
        console.print(Text(describe(state.first_failure), "bold red"), soft_wrap=True)
    style = "bold green" if state.state is State.SUCCEEDED else "bold red"
    console.print(Text.assemble(f"job {name} {job} ", (state.state.value, style)), soft_wrap=True)


def print_unkept(console: Console, job: str, error: NoSpace | None) -> None:
    """State and logs here lack what the nodes said since the store could not be used; None: no more, for it could at the end."""
    if error is None:
        console.print("the job store can be used again, and what was missing here has come", soft_wrap=True)
        return
    console.print(Text(error.message, "red"), soft_wrap=True)
    console.print(f"what is missing here is on the nodes: once the store can be used again, dtrain logs {job} brings it", soft_wrap=True)


def print_detached(console: Console, name: str, job: str, state: JobState) -> None:
    """The job goes on, and nobody follows it."""
    console.print(Text.assemble(f"job {name} {job} ", (state.state.value, "bold cyan"), ", detached"), soft_wrap=True)
    _print_commands(console, job)


def print_left(console: Console, name: str, job: str, lease_s: float) -> None:
    """No node has said that it heard that the job is to go on without its launcher."""
    text = f"not detached: no node has answered. job {name} {job} goes on there until its lease of {lease_s:g} s is over"
    console.print(Text(text, "red"), soft_wrap=True)
    _print_commands(console, job)


def print_unfollowed(console: Console, name: str, job: str, lease_s: float | None) -> None:
    """An error has ended its following, and no job."""
    until = "" if lease_s is None else f" until its lease of {lease_s:g} s is over"
    console.print(Text(f"job {name} {job} is followed no more, and goes on on its nodes{until}", "red"), soft_wrap=True)
    _print_commands(console, job)


def _print_commands(console: Console, job: str) -> None:
    for command in ("attach", "logs", "stop"):
        console.print(f"  dtrain {command} {job}", soft_wrap=True)


def print_survivors(console: Console, state: JobState) -> bool:
    """Name each process that KILL did not end. Whether there is one."""
    found = [(node.name, survivor) for node in state.nodes for survivor in node.survivors]
    for node, survivor in found:
        text = f"{node}: process {survivor.pid} ({survivor.state}) is still there: {harmless(survivor.command)}"
        console.print(Text(text, "red"), soft_wrap=True)
    return bool(found)


def print_failure(console: Console, failure: Failure, log_folder: Path, job_folder: str) -> None:
    """Who failed and why, what it printed last, and where that lies: here, and on its node in `job_folder`."""
    console.print(Text(describe(failure), "bold red"), soft_wrap=True)
    console.print(Text(f"hint: {hint(failure)}"), soft_wrap=True)
    log = log_folder / failure.node / failure.log
    tail = _last_lines(log)
    if failure.reason in _PRINTED:
        tail = failure.detail.splitlines()[-_TAIL_LINES:]
    shown = [Text.from_ansi(line) for line in tail]  # as styles, which rich leaves out where nobody wants colours
    traceback = failure.traceback.splitlines()
    if traceback and not _holds([line.plain for line in shown], traceback):
        _print_indented(console, [Text(harmless(line)) for line in traceback])
    if shown:
        console.print(Text(f"last {counted(len(shown), 'line')} of its log:", "dim"))
        _print_indented(console, shown)
    if log.is_file():  # a launcher that was killed has written nothing
        console.print(Text(f"log: {log}", "dim"), soft_wrap=True)
        console.print(Text(f"     {failure.node}:{job_folder}/{failure.log}", "dim"), soft_wrap=True)


def describe(failure: Failure) -> str:
    """One sentence: who ended, how, and why."""
    if failure.rank is None:
        reason = REASONS.get(failure.reason)
        why = reason.of_node if reason else failure.reason
        detail = f"; {failure.detail}" if failure.detail and failure.reason not in _PRINTED else ""
        return f"{failure.node} failed: {why}{detail}"
    ended = f"exit code {failure.exit_code}" if failure.signal is None else f"{_name(failure.signal)} (exit code {failure.exit_code})"
    reason_word = "" if failure.reason == "exit-code" else f": {failure.reason}"
    return f"rank {failure.rank} on {failure.node} failed with {ended}{reason_word}"


def hint(failure: Failure) -> str:
    """The next step, and for what may have lacked memory the kernel's word."""
    reason = REASONS.get(failure.reason)
    step = reason.hint if reason else "see its log"
    return f"{step}; {failure.detail}" if failure.rank is not None and failure.detail else step


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _holds(lines: list[str], part: list[str]) -> bool:
    return any(lines[start : start + len(part)] == part for start in range(len(lines) - len(part) + 1))


def _print_indented(console: Console, lines: list[Text]) -> None:
    for line in lines:
        console.print(Text("  ").append_text(line), soft_wrap=True)


def _last_lines(log: Path) -> list[str]:
    """The end of a worker's output, as it would stand on a screen."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = without_rank_prefix(text).rstrip("\n").split("\n") if text else []
    # A progress bar redraws its line after a carriage return: the last state of it is the line.
    return [harmless(line.rstrip("\r").rpartition("\r")[2])[:_LINE_LENGTH] for line in lines[-_TAIL_LINES:]]
