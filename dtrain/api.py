"""What the command line and a notebook call."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.catchup import catch_up, tails
from dtrain.errors import DtrainError, GpusMissing, NodesBusy, NodeUnreachable, NoSpace, NoSuchJob, PreflightFailed
from dtrain.findings import Finding
from dtrain.intake import Silent, Watcher
from dtrain.jobstate import JobState, State
from dtrain.link import Link, Target, make_ready_for
from dtrain.nodes import Outcomes, outcomes
from dtrain.plan import LaunchPlan
from dtrain.spec import JobSpec, load_job
from dtrain.start import Progress, start, targets_of
from dtrain.store import JobRecord, Store
from dtrain.supervise import Supervisor
from dtrain.sync import fetch_outputs

LEASE_S = 900.0  # how long a foreground job outlives its launcher
ASK_NODES_S = 3.0
_LEAVE_S = 2.0
_WAIT_S = (2.0, 4.0)  # between two looks at whether GPUs are free; at random, so that two who wait do not meet for ever


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was started from this process."""

    id: str
    plan: LaunchPlan
    store: Store
    targets: tuple[Target, ...]
    links: Mapping[str, Link]
    again: Callable[[], Job]  # launches the same as another job

    def supervisor(self, watcher: Watcher) -> Supervisor:
        return Supervisor(self.store, self.id, self.plan, watcher)

    def wait(self) -> JobState:
        """Follow the job to its end, its logs going to the store. Where another process took the port of the rendezvous before its
        launcher could, another job is launched in its place, once, and followed.

        Raises:
            NoSpace: the job has ended, and the store has not all of it.
            DtrainError: the other one could not be launched.
        """
        state = self._follow()
        return self.again()._follow() if state.is_port_taken else state

    def _follow(self) -> JobState:
        supervisor = self.supervisor(Silent())
        state = supervisor.run(self.targets, self.links, renew_lease=True)
        if (lack := unkept(self.store, self.id, supervisor)) is not None:
            raise lack
        return state


def launch(
    job: JobSpec | str | Path,
    *,
    store: Store | None = None,
    progress: Progress | None = None,
    lease_s: float | None = LEASE_S,
    wait: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Job:
    """Start a job on all its nodes.

    Args:
        job: a job file, or what `load_job` made of one.
        lease_s: the job stops when this process is gone, or says nothing, for longer; None: never.
        wait: where others hold the GPUs, try again until they are free, however long that takes.

    Raises:
        DtrainError: nothing is running, and the error says why.
    """
    spec = job if isinstance(job, JobSpec) else load_job(Path(job), environ=environ)
    kept = store or Store.default(environ)
    told = progress or _Quiet()
    again = functools.partial(launch, spec, store=kept, progress=told, lease_s=lease_s, wait=wait, environ=environ)
    while True:
        try:
            started = start(spec, kept, told, lease_s=lease_s, environ=environ)
            return Job(started.job, started.plan, kept, started.targets, started.links, again)
        except NodesBusy as error:
            if not wait or isinstance(error, GpusMissing):
                raise
            told.busy(error.message)
        time.sleep(random.uniform(*_WAIT_S))


def targets(record: JobRecord) -> tuple[Target, ...]:
    """How to reach the nodes of a job again.

    Raises:
        NodeUnreachable: they are played by another machine, as where several share a home.
    """
    host = record.launched_by.rpartition("@")[2]
    if host != socket.gethostname() and any(instance.host is None for instance in record.cluster.instances):
        raise NodeUnreachable(f"the nodes of job {record.job} are played by {host}", hint=f"run this command on {host}")
    return targets_of(record.cluster, record.job, record.name, record.outputs)


def refresh(
    store: Store,
    records: Sequence[JobRecord],
    *,
    lost_too: bool = False,
    logs: bool = False,
    within_s: float = ASK_NODES_S,
    silent: Mapping[str, DtrainError] | None = None,
) -> dict[str, dict[str, str]]:
    """Ask the nodes of the jobs that are not over for what the store does not have, all at once.

    Args:
        lost_too: also ask the lost nodes of jobs that are over: they may be there again, and know better.
        logs: also for what the workers of nodes that run have printed.
        within_s: how long a node may be silent.
        silent: by node that has just not answered, why not; it is not asked again.

    Returns:
        By job id, why each node that did not answer did not.
    """
    asked, problems = [], {}
    for record in records:
        if not record.state.is_final or (lost_too and record.state is State.LOST):
            try:
                asked.append((record, unended(record, store.state(record), lost_too=True)))
            except NodeUnreachable as error:
                problems[record.job] = {instance.name: error.message for instance in record.cluster.instances}
    return {**problems, **catch_up(store, asked, within_s, logs=logs, silent=silent)}


def unended(record: JobRecord, state: JobState, *, lost_too: bool = False) -> tuple[Target, ...]:
    """How to reach those nodes of a job that have not said that they ended.

    Args:
        lost_too: also those that others gave up for lost.
    """
    ended = {node.name for node in state.nodes if (node.has_ended if lost_too else node.state.is_final)}
    return tuple(target for target in targets(record) if target.node not in ended)


def the_running_one(store: Store, name: str | None = None) -> JobRecord | None:
    """The only job, or the only one of that name, that is not over, as its nodes know it now; None: there is none.

    Raises:
        NoSuchJob: there are several.
    """

    def running() -> list[JobRecord]:
        return [record for record in store.jobs() if name in (None, record.name) and not record.state.is_final]

    refresh(store, running())
    return the_one(running())


def the_one(running: Sequence[JobRecord], options: str = "") -> JobRecord | None:
    """The only one; None: there is none.

    Args:
        options: of the `dtrain stop` that means one of them.

    Raises:
        NoSuchJob: there are several.
    """
    if len(running) > 1:
        named = ", ".join(f"{record.name} {record.job}" for record in running)
        raise NoSuchJob(f"{len(running)} jobs are running: {named}", hint=f"say which one: dtrain stop {running[0].job}{options}")
    return running[0] if running else None


def find(
    store: Store,
    wanted: str | None,
    *,
    logs: bool = False,
    within_s: float = ASK_NODES_S,
    silent: Mapping[str, DtrainError] | None = None,
) -> tuple[JobRecord, dict[str, str]]:
    """The job that a person means, as its nodes know it now; and why each node that did not answer did not.

    Args:
        logs, within_s, silent: as for refresh.

    Raises:
        NoSuchJob: there is none, or several.
    """
    record = store.find(wanted)
    problems = refresh(store, [record], lost_too=True, logs=logs, within_s=within_s, silent=silent).get(record.job, {})
    found = store.find(wanted)  # another one, where that one turned out to be over
    return found, problems if found.job == record.job else {}


def log_ends(
    store: Store,
    record: JobRecord,
    streams: Sequence[tuple[str, str]],
    num_lines: int,
    text: str | None,
    *,
    within_s: float,
    silent: Mapping[str, DtrainError],
) -> tuple[dict[tuple[str, str], bytes], dict[str, str]]:
    """The ends of those logs of which the store may not have all, without bringing what stands before.

    Args:
        streams: nodes and which of their logs.
        num_lines, text: the last lines, or the last of those that hold a text.
        within_s, silent: as for refresh.

    Returns:
        By node and stream the lines; and by node why it could not be asked.
    """
    if record.state.is_final and record.state is not State.LOST:
        return {}, {}
    try:
        reached = unended(record, store.state(record), lost_too=True)
    except NodeUnreachable as error:
        return {}, {node: error.message for node, _ in streams}
    wanted = [(target, [stream for node, stream in streams if node == target.node]) for target in reached]
    return tails([(target, of_node) for target, of_node in wanted if of_node], num_lines, text, within_s, silent)


def unkept(store: Store, job: str, supervisor: Supervisor) -> NoSpace | None:
    """Why the store has not all of a job that was followed. Of one that is over what is missing is brought, if that can be by now."""
    if supervisor.unkept is None or not supervisor.state.state.is_final:
        return supervisor.unkept
    try:
        store = Store(store.root)  # opened anew: its file may have been put there again, and what lacks in it is made
        record = store.find(job)
        store.keep_state(job, store.state(record))  # as long as the disk is full, or the store broken, nothing is asked for
        problems = refresh(store, [record], lost_too=True, logs=True).get(job)  # None: another one who follows it has brought all
    except NoSpace as error:
        return error
    except NoSuchJob:
        return supervisor.unkept
    return supervisor.unkept if problems else None


def fetch(
    record: JobRecord,
    into: Path,
    node: str | None,
    progress: Callable[[str, int, int], None],
    silent: Mapping[str, DtrainError] | None = None,
) -> Outcomes[tuple[int, int]]:
    """Bring the outputs of a job's name home, each node's into a folder of its own.

    Args:
        node: only this one's.
        progress: called with node, bytes got and bytes to get.
        silent: by node that has just not answered, why not; it is not asked again.

    Returns:
        For each node, files there now and files that were sent, or why they could not be brought.
    """
    wanted = [target for target in targets(record) if node in (None, target.node)]
    if not wanted:
        raise NoSuchJob(f"job {record.job} has no node {node}", hint=f"its nodes: {', '.join(target.node for target in targets(record))}")
    if os.path.isabs(record.outputs) and into.resolve().is_relative_to(Path(record.outputs).resolve()):
        raise PreflightFailed(  # where a node is this machine, or shares the folder with it
            f"{into} lies in the job's outputs, {record.outputs}, and they would be copied into themselves",
            hint="name another folder with --to",
        )
    make_ready_for(wanted)
    leaving = threading.Event()
    under_way: list[threading.Event] = []

    def moved(node: str, moved_bytes: int, total_bytes: int) -> None:
        if leaving.is_set():
            raise KeyboardInterrupt
        progress(node, moved_bytes, total_bytes)

    def fetch_from(target: Target) -> tuple[int, int]:
        if silent is not None and target.node in silent:
            raise silent[target.node]
        with contextlib.closing(Link.open(target)) as link:
            ended = threading.Event()
            under_way.append(ended)
            try:
                return fetch_outputs(link, into / target.node, functools.partial(moved, target.node))
            except (OSError, ValueError) as error:  # of our own disk; ValueError: a link there leads elsewhere
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    no_room = f"{into / target.node}: the outputs cannot be written: {error.strerror}"
                    raise NoSpace(no_room, hint="make room there, or name another folder with --to") from error
                raise PreflightFailed(
                    f"{into / target.node}: the outputs cannot be written: {error}", hint="name another folder with --to"
                ) from error
            finally:
                ended.set()

    try:
        return outcomes([(target.node, functools.partial(fetch_from, target)) for target in wanted])
    except BaseException:  # after Ctrl-C nobody waits for a node, but each file that is under way is removed
        leaving.set()
        until_s = time.monotonic() + _LEAVE_S
        for ended in under_way:
            ended.wait(max(0.0, until_s - time.monotonic()))
        raise


class _Quiet:
    def step(self, text: str) -> None: ...
    def busy(self, text: str) -> None: ...
    def found(self, finding: Finding) -> None: ...
    def planned(self, job: str, plan: LaunchPlan) -> None: ...
    def sending(self, node: str, sent_bytes: int, total_bytes: int) -> None: ...
    def setting_up(self, num_nodes: int) -> None: ...
    def printed(self, node: str, stream: str, data: bytes) -> None: ...
    def committing(self) -> None: ...
