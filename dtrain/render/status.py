"""A job with its nodes and ranks, and as the JSON that scripts read."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.jobstate import Failure, JobState, NodeState
from dtrain.plan import LaunchPlan
from dtrain.render.console import duration
from dtrain.render.end import describe, hint, print_stopped_by
from dtrain.render.jobs import STYLES, print_jobs
from dtrain.render.live import progress_line
from dtrain.render.ranges import ranges
from dtrain.shell_words import shell_words
from dtrain.store import JobRecord, JobSummary, Store

_METRICS = ("iteration", "iterations", "epoch", "loss", "samples_per_s", "evaluation")


@dataclass(frozen=True, slots=True)
class JobView:
    """A job with all that is known of it."""

    record: JobRecord
    plan: LaunchPlan
    state: JobState
    metrics: Mapping[str, Any]  # the newest value of each
    last_seen: Mapping[str, float]  # when this machine last heard from each node, by its own clock
    job_file: Path | None  # launches it again, wherever its own file is by now; None for a benchmark
    has_lost_launcher: bool = False  # and will end with its lease

    @classmethod
    def of(cls, store: Store, record: JobRecord) -> JobView:
        newest: dict[str, Any] = {}
        for metric in store.metrics(record.job):
            newest.update(metric)
        state, seen = store.state(record), store.last_seen(record.job)
        return cls(record, record.plan, state, newest, seen, store.job_file(record.job), has_lost_launcher(store, record, state))


def has_lost_launcher(store: Store, record: JobRecord, state: JobState) -> bool:
    """Whether a job runs on only until its lease is over."""
    is_open = not state.state.is_final and record.plan.lease_s is not None and not state.is_lease_lifted
    return is_open and store.is_launcher_gone(record.job)


def lost_launcher(plan: LaunchPlan, job: str) -> str:
    """What to say of such a job."""
    cure = f"Ctrl-\\ in dtrain attach {job} lets it go on"
    return f"its launcher is gone, so it stops when its lease of {plan.lease_s:g} s is over; {cure}"


def print_job(console: Console, view: JobView, problems: Mapping[str, str]) -> None:
    """One job: its nodes, its ranks, its numbers."""
    print_jobs(console, [JobSummary.of(view.record, view.state)])
    for line in _how_launched(view):
        console.print(Text(line, "dim"), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("node", "state", "ranks", "ended ranks"):
        table.add_column(name, overflow="fold")
    for node in view.state.nodes:
        ended = "  ".join(f"{rank.rank}: {rank.exit_code}" for rank in node.ranks if rank.exit_code is not None)
        table.add_row(node.name, Text(node.state.value, STYLES.get(node.state.value, "")), ranges(rank.rank for rank in node.ranks), ended)
    console.print(table)
    if view.state.stop_cause is not None and not view.state.state.is_final:
        console.print(Text("it was told to stop, and is stopping", "yellow"))
    if view.has_lost_launcher:
        console.print(Text(lost_launcher(view.plan, view.record.job), "yellow"), soft_wrap=True)
    print_stopped_by(console, view.state)
    failure = view.state.first_failure
    if view.state.start_failed is not None:
        console.print(Text(f"it was not started: {view.state.start_failed.text}", "red"), soft_wrap=True)
    elif failure is not None:
        console.print(Text(describe(failure), "red"), soft_wrap=True)
        console.print(Text(f"hint: {hint(failure)}"), soft_wrap=True)
        rank = "" if failure.rank is None else f" --ranks {failure.rank}"
        console.print(Text(f"dtrain logs {view.record.job}{rank} shows what it printed", "dim"), soft_wrap=True)
    line = progress_line(view.metrics)
    if line:
        console.print(Text(line), soft_wrap=True)
    for node_name, problem in problems.items():
        seen_at = view.last_seen.get(node_name)
        seen = "not seen from here yet" if seen_at is None else f"last seen {duration(max(0.0, time.time() - seen_at))} ago"
        told = problem.removeprefix(f"{node_name}: ")
        console.print(Text(f"{node_name} was not asked: {told}; {seen}", "yellow"), soft_wrap=True)


def _how_launched(view: JobView) -> Iterator[str]:
    """What was launched, by whom, from which files, and how it is launched again."""
    record = view.record
    run, more, _ = view.plan.run.partition("\n")
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at))
    yield f"{run}{' ...' if more else ''}, launched by {record.launched_by} at {at}"
    changed = {True: ", with changes", False: "", None: ", perhaps with changes: git did not say in time"}[record.git_changed]
    yield f"workdir {record.workdir}" + (f" at commit {record.git_commit}{changed}" if record.git_commit else "")
    if record.overrides:
        yield f"overrides: {' '.join(record.overrides)}"
    if view.job_file is not None:
        yield f"again: {shell_words(('dtrain', 'launch', str(view.job_file)))}"


def as_json(view: JobView) -> dict[str, Any]:
    """One entry of `jobs` in `status --json`."""
    state = view.state
    return {
        "job": view.record.job,
        "name": view.record.name,
        "state": state.state.value,
        "cluster_size": view.plan.cluster_size,
        "launcher": view.plan.launcher,
        "launched_by": view.record.launched_by,
        "started_at": state.started_at,
        "ended_at": state.ended_at,
        "exit_code": state.exit_code,
        "exit_source": state.exit_source,
        "stopped_by": state.stopped_by,
        "git_commit": view.record.git_commit,
        "git_changed": view.record.git_changed,
        "workdir_hash": view.record.workdir_hash,
        "overrides": list(view.record.overrides),
        "nodes": [_node(node, view.last_seen.get(node.name)) for node in state.nodes],
        "metrics": {name: _finite(view.metrics.get(name)) for name in _METRICS},
        "first_failure": _failure(state.first_failure),
    }


def _node(node: NodeState, last_seen_at: float | None) -> dict[str, Any]:
    ranks = [{**asdict(rank), "state": rank.state.value} for rank in node.ranks]
    return {"node": node.name, "state": node.state.value, "last_seen_at": last_seen_at, "ranks": ranks}


def _failure(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    told = ("at", "node", "rank", "exit_code", "signal", "reason", "traceback", "log")
    return {name: getattr(failure, name) for name in told}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
