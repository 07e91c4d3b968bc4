"""--cluster FILE: the jobs that a cluster's nodes know, whichever machine launched them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dtrain.errors import DtrainError, NoSuchJob
from dtrain.render import console
from dtrain.store import JobRecord, Store, pick

if TYPE_CHECKING:  # `status` loads no more than it needs
    from dtrain.discovery import Discovered, LeftOut

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Meant:
    """Which job a person means."""

    job: str | None  # what was typed, or with --cluster the job's id
    silent: Mapping[str, DtrainError] = field(default_factory=dict)  # by node that has just not answered, why not; it was named


def cluster_option(command: _F) -> _F:
    return click.option(
        "--cluster", type=click.Path(path_type=Path), metavar="FILE",
        help="Of the jobs that the nodes of this cluster know, whichever machine launched them.",
    )(command)  # fmt: skip


def jobs_on(cluster: Path, job: str | None, *, lists: bool = False) -> Discovered:
    """What the nodes of a cluster know, with a word on those that do not answer, and on jobs left out that may be the one that is meant.

    Args:
        lists: all jobs are meant where none is named.

    Raises:
        SpecError: the file is no cluster file.
        DtrainError: no node could be asked.
    """
    from dtrain.discovery import discover
    from dtrain.spec import load_cluster

    spec = load_cluster(cluster)
    line = console.StepLine()
    with line:
        found = discover(spec, line.step)
    left_out = [each for each in found.left_out if ((lists or not found.jobs) if job is None else _may_mean(job, each, found))]
    for text in (*(error.message for error in found.silent.values()), *map(str, left_out)):
        console.person().print(console.harmless(text), style="yellow", soft_wrap=True)
    return found


def _may_mean(job: str, left_out: LeftOut, found: Discovered) -> bool:
    """By its id or the start of it, or as the newest of that name."""
    record, alike = left_out.record, [each.record.created_at for each in found.jobs if each.record.name == job]
    return left_out.job.startswith(job) or (record is not None and record.name == job and record.created_at > max(alike, default=0.0))


def find_on(cluster: Path, found: Discovered, job: str | None) -> JobRecord:
    """The job that is meant among those; None: the newest. Raises NoSuchJob."""
    records = [each.record for each in found.jobs]
    if not records:
        raise NoSuchJob(f"the nodes of {cluster} know no job", hint="each keeps the newest 20 that ran on it")
    return records[0] if job is None else pick(job, records, f"dtrain status --cluster {cluster}")


def taken_up(store: Store, cluster: Path | None, job: str | None) -> Meant:
    """The job that is meant, which the store has from now on as if it had been launched from here; what was typed where no cluster
    is named.

    Raises:
        NoSuchJob: the nodes know none such.
    """
    if cluster is None:
        return Meant(job)
    found = jobs_on(cluster, job)
    record = find_on(cluster, found, job)
    store.adopt(record)
    return Meant(record.job, found.silent)


def taken_up_running(store: Store, cluster: Path | None, job: str | None) -> Meant:
    """The same where a guess could end the wrong job.

    Raises:
        NoSuchJob: several run that could be meant, or none.
    """
    if cluster is None:
        return Meant(job)
    from dtrain import api

    found = jobs_on(cluster, job)
    running = [each.record for each in found.jobs if not each.state.state.is_final and job in (None, each.record.name)]
    record = api.the_one(running, f" --cluster {cluster}")
    if record is None and job is None and found.jobs:
        raise NoSuchJob(f"no job is running on the nodes of {cluster}", hint=f"dtrain status --cluster {cluster} lists those that ran")
    record = record or find_on(cluster, found, job)
    store.adopt(record)
    return Meant(record.job, found.silent)
