"""The jobs that the nodes of a cluster know, for a machine that did not launch them."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dtrain.errors import DtrainError, PreflightFailed
from dtrain.findings import listed
from dtrain.jobstate import LAUNCHING_SIDE, Event, JobState, NodeLost, State
from dtrain.link import Link, Target, make_ready_for
from dtrain.node import wire
from dtrain.nodes import connect, outcomes
from dtrain.spec import ClusterSpec
from dtrain.store import JobRecord, read_event

_MOST_SIGHTINGS = 20_000  # 20 jobs on each of 1000 nodes that one machine plays


@dataclass(frozen=True, slots=True)
class FoundJob:
    record: JobRecord  # with its nodes reached as the cluster's file says
    state: JobState  # as far as the nodes that answered know
    seen: frozenset[str]  # those nodes


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A job of which no more can be said."""

    job: str
    why: str
    record: JobRecord | None  # where that could be read

    def __str__(self) -> str:
        return f"job {self.job} is left out: {self.why}"


@dataclass(frozen=True, slots=True)
class Discovered:
    jobs: tuple[FoundJob, ...]  # newest first
    silent: dict[str, DtrainError]  # by node that could not be asked, why not
    asked_at: float
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class _Sighting:
    """A job as one of its nodes knows it."""

    asked: str  # node of the cluster that told of it; the job may know it by another name
    here: wire.JobHere
    events: bytes


def discover(cluster: ClusterSpec, step: Callable[[str], None]) -> Discovered:
    """Ask all nodes of a cluster which jobs they know.

    Args:
        step: is told what is waited for.

    Raises:
        DtrainError: no node could be asked.
    """
    targets = [Target(instance, cluster.dir, "", "") for instance in cluster.instances]
    make_ready_for(targets)
    reached = connect(targets, step)
    links = reached.results
    try:
        told = outcomes([(node, partial(_ask, node, link)) for node, link in links.items()])
        if not told.results:
            reached.all()
            told.all()
        silent = {**reached.errors, **told.errors}
        by_job: dict[str, list[_Sighting]] = {}
        for sighting in (each for sightings in told.results.values() for each in sightings):
            by_job.setdefault(sighting.here.job, []).append(sighting)
        jobs, left_out = [], []
        for job, sightings in by_job.items():
            record = None
            try:
                record = _record(sightings[0], links[sightings[0].asked])
                jobs.append(_found(record, cluster, sightings, silent))
            except DtrainError as error:
                left_out.append(LeftOut(job, error.message, record))
    finally:
        for link in links.values():
            link.close()
    return Discovered(tuple(sorted(jobs, key=lambda found: -found.record.created_at)), silent, time.time(), tuple(left_out))


def _ask(node: str, link: Link) -> list[_Sighting]:
    """Raises DtrainError: the node cannot say, or says more than can be."""
    link.tell(wire.ListJobs())
    found: list[_Sighting] = []
    message, events = link.answer()
    while isinstance(message, wire.JobHere):
        if len(found) == _MOST_SIGHTINGS:
            raise PreflightFailed(
                f"{node}: it tells of more than {_MOST_SIGHTINGS:,} jobs", hint="look at the jobs in dtrain's folder there"
            )
        found.append(_Sighting(node, message, events))
        message, events = link.answer()
    return found


def _record(sighting: _Sighting, link: Link) -> JobRecord:
    """Raises DtrainError: the node cannot say, or says it as another version of dtrain."""
    here = sighting.here
    link.tell(wire.GetRecord(here.job, here.node))
    try:
        record = JobRecord.imported(link.answer()[1])
    except ValueError as error:
        text = f"{sighting.asked}: its record there is damaged, or another version of dtrain launched it ({error})"
        raise PreflightFailed(text) from error
    if record.job != here.job:
        raise PreflightFailed(f"{sighting.asked}: its record there is that of job {record.job}")
    return record


def _found(record: JobRecord, cluster: ClusterSpec, sightings: Sequence[_Sighting], silent: Container[str]) -> FoundJob:
    """Raises PreflightFailed: the nodes that the cluster's file names are not all that there were, or do not all have it any more, or
    cannot read it."""
    plan = record.plan
    if faults := [f"{sighting.asked}: {sighting.here.fault}" for sighting in sightings if sighting.here.fault]:
        raise PreflightFailed("; ".join(faults))
    instances = {instance.name: instance for instance in cluster.instances}
    by_node = {sighting.here.node: sighting for sighting in sightings}
    for node, sighting in by_node.items():
        instances.setdefault(node, replace(instances[sighting.asked], name=node))
    if missing := [node.name for node in plan.nodes if node.name not in instances]:
        raise PreflightFailed(f"it has nodes that the cluster file does not name: {listed(missing)}")
    told = [each for planned in plan.nodes if planned.name in by_node for each in _events(by_node[planned.name])]
    state = JobState.of(plan, [(name, event) for _, name, event in sorted(told, key=lambda each: each[0])], State.UNKNOWN)
    for each in state.nodes:
        is_dead = each.name in by_node and not by_node[each.name].here.alive and each.state is not State.UNKNOWN
        how = "dtrain's agent and guard on it are gone" if is_dead else each.missed if each.name in silent else ""
        if how and not each.state.is_final:
            state = state.after(LAUNCHING_SIDE, NodeLost(time.time(), each.name, how))
    gone = [node.name for node in plan.nodes if node.name not in silent and node.name not in by_node]
    if gone and all(node.state.is_final for node in state.nodes if node.name in by_node):
        kept = "has removed what it kept" if len(gone) == 1 else "have removed what they kept"
        raise PreflightFailed(f"it is over, and {listed(gone)} {kept} of it")
    reached = record.reached_by(replace(cluster, instances=tuple(instances[node.name] for node in plan.nodes)))
    return FoundJob(replace(reached, state=state.state, exit_code=state.exit_code), state, frozenset(by_node))


def _events(sighting: _Sighting) -> Iterator[tuple[float, str, Event]]:
    """When, where and what: what nodes tell counts in the order in which it happened, and what one node tells in its own."""
    *whole, _ = sighting.events.split(b"\n")
    at = 0.0
    for line in whole:
        if (event := read_event(line)) is not None:
            at = max(at, event.at)
            yield at, sighting.here.node, event
