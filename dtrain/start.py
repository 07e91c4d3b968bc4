"""Starting a job on all nodes or on none: connect, probe, prove, plan, sync and PREPARE everywhere, then COMMIT everywhere.

In between the job's setup runs, below the agents, which end it like all that is theirs. Then all nodes join the first one's
(tripwire.py): from then on they end together, whatever becomes of this process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Protocol, TypeVar

from dtrain import launchers
from dtrain.errors import CTRL_C, DtrainError, NoSuchJob, PreflightFailed, SetupFailed, StoppedElsewhere
from dtrain.findings import ENDS_AT_LOGOUT, KINDS, Finding
from dtrain.git import Look
from dtrain.intake import Intake, Silent
from dtrain.jobstate import StartFailed
from dtrain.launchers import NodeCommand, node_commands, plan_json
from dtrain.link import Link, Target, make_ready_for
from dtrain.node import wire
from dtrain.nodes import Probed, connect, judge_nodes, on_all, probe, prove
from dtrain.plan import LaunchPlan, make_plan
from dtrain.preflight import contradictions
from dtrain.rendezvous import ports_of
from dtrain.spec import ClusterSpec, JobSpec
from dtrain.spec.dump import dump_job, job_file
from dtrain.store import JOB_FILE, Store
from dtrain.sync import Snapshot, check_is_sent, read_workdir, send_tree

_LOOK_S = 1.0  # between two looks at whether somebody wants the job to end
_T = TypeVar("_T")


class Progress(Protocol):
    """Is told how the start goes; `sending` comes from several threads."""

    def step(self, text: str) -> None: ...

    def busy(self, text: str) -> None: ...

    def found(self, finding: Finding) -> None:
        """Something is not as it should be with the nodes, and does not stop the job."""

    def planned(self, job: str, plan: LaunchPlan) -> None: ...

    def sending(self, node: str, sent_bytes: int, total_bytes: int) -> None: ...

    def setting_up(self, num_nodes: int) -> None:
        """The setup runs on so many nodes; 0: on none any more."""

    def printed(self, node: str, stream: str, data: bytes) -> None:
        """What a node's setup printed; called by one thread at a time."""

    def committing(self) -> None:
        """From now on workers run; whoever breaks the start off has to stop them."""


@dataclass(frozen=True, slots=True)
class Started:
    """A job that runs: what it is, and an open session with each of its nodes."""

    job: str
    plan: LaunchPlan
    targets: tuple[Target, ...]
    links: Mapping[str, Link]


def targets_of(cluster: ClusterSpec, job: str, name: str, outputs: str = "") -> tuple[Target, ...]:
    """How to reach the nodes of a job, whose file has these outputs."""
    absolute = outputs if os.path.isabs(outputs) else ""
    return tuple(Target(instance, cluster.dir, job, name, absolute) for instance in cluster.instances)


def start(spec: JobSpec, store: Store, progress: Progress, *, lease_s: float | None, environ: Mapping[str, str] = os.environ) -> Started:
    """Start a job on every node of its cluster.

    Args:
        lease_s: the job stops when its launcher is gone for longer; None: never.
        environ: where the values of the job's secrets are taken from.

    Raises:
        DtrainError: a node could not be reached or cannot run the job, with a line for each node concerned. Nothing is
            running then, on any node.
    """
    make_plan(spec, lease_s=lease_s)  # what is wrong whatever the nodes say is answered before anything starts
    check_is_sent(spec)
    git = Look(spec.workdir, spec.outputs)
    snapshot = None
    if spec.sync:
        progress.step("reading the working directory")
        snapshot = read_workdir(spec, store.root)
    job = store.new_job_id()
    targets = targets_of(spec.cluster, job, spec.name, spec.outputs)
    make_ready_for(targets)
    reached = connect(targets, progress.step)
    links = reached.results
    try:
        reached.all()
        probed = probe(spec, links).all()
        facts = {node: one.facts for node, one in probed.items()}
        launchers.check(spec.launcher, facts)
        _judge(spec, probed, progress, is_detached=lease_s is None)
        make_plan(spec, facts, lease_s=lease_s)  # GPUs that are not free are told before the rest is tried
        if len(links) > 1:
            progress.step("proving the rendezvous")
        rendezvous = prove(spec.cluster, facts, links)
        _tell(contradictions(spec.env, rendezvous.addresses), spec, progress)
        plan = make_plan(spec, facts, rendezvous, lease_s=lease_s)
        in_order = node_commands(spec, plan, job)
        commands = {command.node: command for command in in_order}
        checkout = git.checkout()
        record = store.add(
            job,
            plan,
            spec.cluster,
            workdir=spec.workdir,
            outputs=spec.outputs,
            git_commit=None if checkout is None else checkout.commit,
            git_changed=None if checkout is None else checkout.changed,
            workdir_hash=snapshot.hash if snapshot is not None else None,
            files={"plan.json": plan_json(spec, plan, in_order), **({JOB_FILE: dump_job(spec)} if job_file(spec) else {})},
            overrides=(*store.overrides_in(spec.path), *spec.overrides),
        )
        progress.planned(job, plan)
        secrets = {name: environ[name] for name in spec.secrets}
        watches = _watches(spec.cluster, plan)
        exported = record.exported()
        watched = _Stoppable(progress, store, job)
        try:
            prepared = on_all(
                links,
                lambda node, link: _prepare(spec, plan, commands[node], link, snapshot, exported, secrets, watches.get(node), watched),
            )
            if spec.setup is not None:
                _set_up(links, store, job, plan, progress)
            first, *others = (node.name for node in plan.nodes)
            on_all({node: links[node] for node in others}, lambda node, link: link.ask(wire.Join(prepared[first].watch_port)))
            watched.look()  # whoever asks later finds all nodes prepared, and tells them
            progress.committing()
            _commit(links)
        except BaseException as error:  # Ctrl-C too: what is prepared must end
            why = watched.why(error)
            _call_off(store, job, plan, links, why, plan.grace_s if spec.setup else 0.0)
            raise why from None if why is error else error
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return Started(job, plan, targets, links)


def _judge(spec: JobSpec, probed: Mapping[str, Probed], progress: Progress, *, is_detached: bool) -> None:
    """Raises PreflightFailed: the nodes do not fit together, or one would end a job that nobody follows."""
    found = judge_nodes(spec, probed)
    stopping = [finding for finding in found if finding.is_error or (is_detached and finding.name == ENDS_AT_LOGOUT)]
    _tell([finding for finding in found if finding not in stopping], spec, progress)
    errors = [finding for finding in stopping if finding.name not in spec.preflight.ignore]
    if errors:
        first = errors[0]
        on = (
            f"; dtrain check shows more, and preflight: {{ignore: [{first.name}]}} goes on all the same"
            if KINDS[first.name].can_pass
            else ""
        )
        raise PreflightFailed("\n".join(finding.text for finding in errors), hint=f"{first.cure}{on}", finding=first.name)


def _tell(found: Sequence[Finding], spec: JobSpec, progress: Progress) -> None:
    for finding in found:
        if finding.name not in spec.preflight.ignore:
            progress.found(finding)


def _commit(links: Mapping[str, Link]) -> None:
    """Let every node run. Where one does, the job has begun: that another's part was over before it heard so, as when the first
    one's worker failed at once, is the job's end and not the start's, and who follows the job hears why.

    Raises:
        DtrainError: no node runs, or one cannot be heard.
    """

    def ask(link: Link) -> NoSuchJob | None:
        try:
            link.ask(wire.Commit())
        except NoSuchJob as error:
            return error
        return None

    over = [error for error in on_all(links, lambda node, link: ask(link)).values() if error is not None]
    if len(over) == len(links):
        raise over[0]


class _Stoppable:
    """Progress that ends by an error once somebody has asked for the job's end."""

    def __init__(self, progress: Progress, store: Store, job: str) -> None:
        self._progress = progress
        self._store = store
        self._job = job
        self._look_at_s = 0.0

    def look(self) -> None:
        self._look_at_s = time.monotonic() + _LOOK_S
        if self._store.is_stop_asked(self._job):
            raise _stopped()

    def why(self, error: BaseException) -> BaseException:
        """Behind an error: a node that was told to stop is not there to be told to start."""
        return _stopped() if isinstance(error, DtrainError) and self._store.is_stop_asked(self._job) else error

    def sending(self, node: str, sent_bytes: int, total_bytes: int) -> None:
        if time.monotonic() >= self._look_at_s:
            self.look()
        self._progress.sending(node, sent_bytes, total_bytes)


def _stopped() -> StoppedElsewhere:
    return StoppedElsewhere("`dtrain stop` came from another shell before the job ran")


def _prepare(
    spec: JobSpec,
    plan: LaunchPlan,
    command: NodeCommand,
    link: Link,
    snapshot: Snapshot | None,
    record: bytes,
    secrets: dict[str, str],
    watch: wire.Watch | None,
    progress: _Stoppable,
) -> wire.Prepared:
    if snapshot is not None:
        send_tree(link, snapshot, lambda sent, total: progress.sending(command.node, sent, total))
    node = next(node for node in plan.nodes if node.name == command.node)
    reply = link.ask(
        wire.Prepare(
            launcher_argv=command.argv,
            launcher_env=command.env,
            worker_argv=command.worker_argv,
            worker_env=command.worker_env,
            secrets=secrets,
            num_workers=len(node.workers),
            gpus=node.gpus,
            tree=None if snapshot is None else snapshot.hash,
            workdir=None if spec.sync else str(spec.workdir),
            outputs=spec.outputs,
            grace_s=plan.grace_s,
            lease_s=plan.lease_s,
            mpi=command.mpi,
            watch=watch,
            setup=spec.setup,
            python=node.python,
        ),
        record,
    )
    assert isinstance(reply, wire.Prepared)
    return reply


def _watches(cluster: ClusterSpec, plan: LaunchPlan) -> dict[str, wire.Watch]:
    """How the agents of several nodes watch each other, by node."""
    if len(plan.nodes) == 1:
        return {}
    token, first, names = token_hex(32), plan.nodes[0].name, tuple(node.name for node in plan.nodes)
    ports = ports_of(cluster)
    return {name: wire.Watch(token, name, first, plan.master_address, ports, names if name == first else ()) for name in names}


def _set_up(links: Mapping[str, Link], store: Store, job: str, plan: LaunchPlan, progress: Progress) -> None:
    """Run the job's setup on all nodes. The first failure ends it on the others.

    Raises:
        SetupFailed: it failed on a node.
        DtrainError: a node is gone, or its part of the job was stopped.
    """
    telling = threading.Lock()
    working, errors = set(links), []

    def ask(node: str, link: Link) -> None:
        try:
            _set_up_node(node, link)
        except DtrainError as error:
            with telling:
                errors.append(error)
            _tell_to_stop(links, plan.grace_s)
            raise
        with telling:
            working.discard(node)
            progress.setting_up(len(working))

    def _set_up_node(node: str, link: Link) -> None:
        link.tell(wire.Setup())
        message, data = link.answer()
        while isinstance(message, wire.StreamBytes):
            with telling:
                store.write_log(job, node, message.stream, message.offset, data)
                progress.printed(node, message.stream, data)
            message, data = link.answer()
        assert isinstance(message, wire.SetupEnded)
        if message.exit_code != 0:
            raise _setup_failed(node, message, store.log(job, node, wire.SETUP_LOG))

    progress.setting_up(len(links))
    try:
        on_all(links, ask, at_once=len(links))  # however many: none waits for the end of another
    except DtrainError:
        raise errors[0] from None  # what the others say follows from it


def _setup_failed(node: str, ended: wire.SetupEnded, log: Path) -> SetupFailed:
    return SetupFailed(
        "\n  ".join((f"{node}: setup failed with exit code {ended.exit_code}; its last lines:", *ended.last_words.splitlines())),
        hint=f"all that it printed is in {log}",
        node=node,
    )


def _tell_to_stop(links: Mapping[str, Link], grace_s: float) -> None:
    for link in links.values():
        try:
            link.tell(wire.Stop("failure", grace_s))
        except DtrainError:
            continue  # an agent that hears no COMMIT ends by itself


def _call_off(store: Store, job: str, plan: LaunchPlan, links: Mapping[str, Link], error: BaseException, grace_s: float) -> None:
    """End what was prepared, and record why the job never ran."""
    _tell_to_stop(links, grace_s)
    setup_of = error.node if isinstance(error, SetupFailed) else ""
    code, text = DtrainError.exit_code, str(error) or type(error).__name__
    match error:
        case DtrainError():
            code = error.exit_code
        case KeyboardInterrupt():
            code, text = CTRL_C, "Ctrl-C came first"
        case SystemExit(code=int(asked)):
            code, text = asked, "a TERM to its launcher came first"
        case _:
            pass
    Intake(store, job, plan, Silent()).take_own(StartFailed(time.time(), code, text, setup_of))
