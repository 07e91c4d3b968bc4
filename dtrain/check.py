"""`check`: all that can be known of a cluster before a worker starts. It finds everything at once and leaves nothing running."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Protocol

from dtrain import launchers
from dtrain.errors import DtrainError
from dtrain.findings import Finding
from dtrain.launchers import NodeCommand, node_commands
from dtrain.link import Link, Target, make_ready_for
from dtrain.nodes import Probed, connect, probe, prove
from dtrain.plan import LaunchPlan, Rendezvous, counted, make_plan
from dtrain.preflight import contradictions, judge
from dtrain.spec import JobSpec
from dtrain.sync import check_is_sent

_JOB_FOLDER = "<job folder>"  # which a launch alone has

LOGIN_S = 8.0  # for each node, and all of them at the same time


class Progress(Protocol):
    def step(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of it. Without an error among the findings there is the plan that a launch would carry out now."""

    findings: tuple[Finding, ...]
    probed: Mapping[str, Probed]  # the nodes that answered
    plan: LaunchPlan | None
    commands: tuple[NodeCommand, ...]
    exit_code: int

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_error)


def check(spec: JobSpec, progress: Progress, *, ignored: Collection[str] = ()) -> Checked:
    """Reach, ask and try all nodes of a job as a launch would.

    Args:
        ignored: names of findings that count for nothing.

    Raises:
        DtrainError: the job could run on no cluster of this shape, or this machine cannot ask so many nodes.
    """
    make_plan(spec)
    check_is_sent(spec)
    targets = tuple(Target(instance, spec.cluster.dir, f"check-{token_hex(4)}", spec.name) for instance in spec.cluster.instances)
    make_ready_for(targets)
    progress.step(f"connecting to {counted(len(targets), 'node')}")
    reached = connect(targets, LOGIN_S)
    links = reached.results
    try:
        progress.step(f"asking {counted(len(links), 'node')}")
        probed = probe(spec, links)
        errors = {**reached.errors, **probed.errors}
        facts = {node: one.facts for node, one in probed.results.items()}
        findings = list(judge(facts, {node: one.clock_offset_s for node, one in probed.results.items()}))
        progress.step("proving the rendezvous")
        plan: LaunchPlan | None = None
        commands: tuple[NodeCommand, ...] = ()
        rendezvous: Rendezvous | None = None
        try:
            rendezvous = _prove(spec, probed.results, links)
            if not errors and not any(finding.is_error and finding.name not in ignored for finding in findings):
                launchers.check(spec.launcher, facts)
                plan = make_plan(spec, {node: replace(one, job_folder=_JOB_FOLDER) for node, one in facts.items()}, rendezvous)
                commands = node_commands(spec, plan, "<job>")
        except DtrainError as error:
            errors[""] = error
        if rendezvous is not None:
            findings += contradictions(spec.env, rendezvous.addresses)
    finally:
        for link in links.values():
            link.close()
    found = tuple(finding for finding in (*_found(errors, {target.node for target in targets}), *findings) if finding.name not in ignored)
    return Checked(found, probed.results, plan, commands, _exit_code(found, errors))


def _prove(spec: JobSpec, probed: Mapping[str, Probed], links: Mapping[str, Link]) -> Rendezvous | None:
    """Between the nodes that are fit, whatever the others lack."""
    fit = tuple(instance for instance in spec.cluster.instances if instance.name in probed)
    if not fit:
        return None
    facts = {node: one.facts for node, one in probed.items()}
    return prove(replace(spec.cluster, instances=fit), facts, {instance.name: links[instance.name] for instance in fit})


def _found(errors: Mapping[str, DtrainError], nodes: Collection[str]) -> list[Finding]:
    """An error of several nodes has a line for each, which begins with its name."""
    found = []
    for node, error in errors.items():
        texts: list[str] = []
        for line in error.message.split("\n"):
            if texts and line.startswith(" "):
                texts[-1] += f"\n{line}"
            else:
                texts.append(line)
        for text in texts:
            named = node or text.partition(":")[0]
            found.append(Finding(error.finding, (named,) if named in nodes else (), text, error.hint))
    return found


def _exit_code(findings: Collection[Finding], errors: Mapping[str, DtrainError]) -> int:
    """As a launch that fails by the first of them."""
    first = next((finding for finding in findings if finding.is_error), None)
    if first is None:
        return 0
    return next((error.exit_code for error in errors.values() if error.finding == first.name), 78)
