"""`check`: all that can be known of a cluster before a worker starts. It finds everything at once and leaves nothing running."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from dtrain import launchers
from dtrain.errors import DtrainError
from dtrain.findings import Finding, listed
from dtrain.launchers import NodeCommand, node_commands
from dtrain.link import Link, Target, make_ready_for
from dtrain.node.wire import NodeFacts
from dtrain.nodes import Probed, connect_and_probe, judge_nodes, prove
from dtrain.plan import LaunchPlan, Rendezvous, gpu_faults, make_plan
from dtrain.preflight import contradictions
from dtrain.spec import JobSpec
from dtrain.sync import check_is_sent, read_workdir

_JOB_FOLDER = "<job folder>"  # which a launch alone has

LOGIN_S = 8.0  # for each node, and all of them at the same time


class Progress(Protocol):
    def step(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of it. Without an error among the findings there is the plan that a launch would carry out now."""

    findings: tuple[Finding, ...]  # errors first, in the order in which a launch would come upon them
    probed: Mapping[str, Probed]  # the nodes that answered
    plan: LaunchPlan | None
    commands: tuple[NodeCommand, ...]
    exit_code: int

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_error)


def check(spec: JobSpec, progress: Progress, *, state: Path, lease_s: float, ignored: Collection[str] = ()) -> Checked:
    """Read the working directory, and reach, ask and try all nodes of a job as a launch would, and go on with the others where some fail.

    Args:
        state: dtrain's folder on this machine.
        lease_s: the plan's, which is a launch's in the foreground.
        ignored: names of findings that count for nothing.

    Raises:
        DtrainError: the job could run on no cluster of this shape, or this machine cannot ask so many nodes.
    """
    make_plan(spec)
    check_is_sent(spec)
    unsent = _workdir_faults(spec, progress, state)
    targets = tuple(Target(instance, spec.cluster.dir, f"check-{token_hex(4)}", spec.name) for instance in spec.cluster.instances)
    make_ready_for(targets)
    links, probed = connect_and_probe(spec, targets, progress.step, LOGIN_S)
    try:
        facts = {node: one.facts for node, one in probed.results.items()}
        failed: list[DtrainError] = [*unsent, *probed.errors.values(), *_launcher_faults(spec, facts)]
        judged = judge_nodes(spec, probed.results)
        busy = gpu_faults(spec, facts)
        progress.step("proving the rendezvous")
        unproved: list[DtrainError] = []
        rendezvous: Rendezvous | None = None
        try:
            rendezvous = _prove(spec, facts, links)
        except DtrainError as error:
            unproved.append(error)
    finally:
        for link in links.values():
            link.close()
    errors = [*failed, *busy, *unproved]
    nodes = {target.node for target in targets}
    warned = contradictions(spec.env, rendezvous.addresses) if rendezvous is not None else ()
    found = [*_found(failed, nodes), *judged, *_found([*busy, *unproved], nodes), *warned]
    plan: LaunchPlan | None = None
    commands: tuple[NodeCommand, ...] = ()
    found = [finding for finding in found if finding.name not in ignored]
    if not any(finding.is_error for finding in found):
        try:
            plan = make_plan(spec, {node: _as_in_a_launch(spec, one) for node, one in facts.items()}, rendezvous, lease_s=lease_s)
            commands = node_commands(spec, plan, "<job>")
        except DtrainError as error:  # what can be told only of all that the nodes said together
            plan = None
            errors.append(error)
            found += _found([error], nodes)
    in_order = sorted(found, key=lambda finding: not finding.is_error)
    return Checked(tuple(in_order), probed.results, plan, commands, _exit_code(in_order, errors))


def _workdir_faults(spec: JobSpec, progress: Progress, state: Path) -> list[DtrainError]:
    if spec.sync:
        progress.step("reading the working directory")
        try:
            read_workdir(spec, state)
        except DtrainError as error:
            return [error]
    return []


def _as_in_a_launch(spec: JobSpec, facts: NodeFacts) -> NodeFacts:
    """Which asks for mpirun only to use it, and has a folder on each node."""
    facts = replace(facts, job_folder=_JOB_FOLDER)
    return facts if spec.launcher == "mpirun" else replace(facts, mpirun="", mpi_daemon="", mpi_version="")


def _launcher_faults(spec: JobSpec, facts: Mapping[str, NodeFacts]) -> list[DtrainError]:
    try:
        if facts:
            launchers.check(spec.launcher, facts)
    except DtrainError as error:
        return [error]
    return []


def _prove(spec: JobSpec, facts: Mapping[str, NodeFacts], links: Mapping[str, Link]) -> Rendezvous | None:
    """Between the nodes that are fit, whatever the others lack."""
    fit = tuple(instance for instance in spec.cluster.instances if instance.name in facts)
    if not fit:
        return None
    return prove(replace(spec.cluster, instances=fit), facts, {instance.name: links[instance.name] for instance in fit})


def _found(errors: Sequence[DtrainError], nodes: Collection[str]) -> list[Finding]:
    """An error of several nodes has a line for each, which begins with its name; what they say alike is one finding."""
    found: dict[tuple[str, str, str | None], list[str]] = {}
    for error in [one for each in errors for one in (each.by_node.values() or [each])]:
        told: list[tuple[str, str]] = []
        for line in error.message.split("\n"):
            node, _, text = line.partition(": ")
            if node in nodes:
                told.append((node, text))
            elif told:
                about, before = told.pop()
                told.append((about, f"{before}\n{line}"))
            else:
                told.append(("", line))
        for node, text in told:
            found.setdefault((error.finding, text, error.hint), []).append(node)
    return [
        Finding(name, tuple(some), f"{listed(some)}: {text}", hint) if all(some) else Finding(name, (), text, hint)
        for (name, text, hint), some in found.items()
    ]


def _exit_code(findings: Sequence[Finding], errors: Sequence[DtrainError]) -> int:
    """As a launch that fails by the first of them."""
    if not findings or not findings[0].is_error:
        return 0
    each = (one for error in errors for one in (error.by_node.values() or [error]))
    return next((error.exit_code for error in each if error.finding == findings[0].name), 78)
