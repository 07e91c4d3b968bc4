"""All nodes of a cluster at once: reach them, ask them, let them prove where they meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Generic, TypeVar

from dtrain import rendezvous
from dtrain.errors import DtrainError, NodesBusy
from dtrain.findings import Finding, listed
from dtrain.link import LOGIN_S, Link, Target
from dtrain.node import wire
from dtrain.plan import Rendezvous, counted, python_of
from dtrain.preflight import judge, judge_gpus
from dtrain.spec import ClusterSpec, Instance, JobSpec, Script
from dtrain.trainers.config import TrainerConfig

_AT_ONCE = 64
_SLOW_S, _LOOK_S = 2.0, 1.0  # until those that do not answer are named; between two looks at who they are
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Outcomes(Generic[_T]):
    """What came of the same work on all nodes."""

    results: dict[str, _T]  # by node, in the order in which they were given
    errors: dict[str, DtrainError]

    def all(self) -> dict[str, _T]:
        """Raises DtrainError: where some failed, one error that tells of all of them."""
        if self.errors:
            raise _all_of(self.errors)
        return self.results


@dataclass(frozen=True, slots=True)
class Probed:
    facts: wire.NodeFacts
    clock_offset_s: float  # how far its clock is ahead of ours, at least; negative: behind


def connect(targets: Sequence[Target], step: Callable[[str], None], within_s: float = LOGIN_S) -> Outcomes[Link]:
    """A link to each node, which whoever asks for it closes.

    Args:
        step: is told what is waited for.
    """
    return _reach(targets, f"connecting to {counted(len(targets), 'node')}", step, within_s, lambda target, link: link)[1]


def connect_and_probe(
    spec: JobSpec, targets: Sequence[Target], step: Callable[[str], None], within_s: float
) -> tuple[dict[str, Link], Outcomes[Probed]]:
    """Both at once, so that who answers is asked while others are still waited for; also for mpirun, whatever the launcher is.

    Args:
        step: is told what is waited for.

    Returns:
        Links to the nodes that were reached, which whoever asks for them closes, and what they said.
    """
    asking = f"asking {counted(len(targets), 'node')}"
    return _reach(targets, asking, step, within_s, lambda target, link: _ask(spec, target.instance, link, mpi=True))


def _reach(
    targets: Sequence[Target], doing: str, step: Callable[[str], None], within_s: float, then: Callable[[Target, Link], _T]
) -> tuple[dict[str, Link], Outcomes[_T]]:
    step(doing)
    links: dict[str, Link] = {}

    def reach(target: Target) -> _T:
        links[target.node] = Link.open(target, within_s)
        return then(target, links[target.node])

    work = [(target.node, partial(reach, target)) for target in targets]
    try:
        return links, outcomes(work, waiting=lambda nodes: step(f"{doing}: waiting for {listed(nodes)}"))
    except BaseException:
        for link in tuple(links.values()):
            link.close()
        raise


def probe(spec: JobSpec, links: Mapping[str, Link]) -> Outcomes[Probed]:
    instances = {instance.name: instance for instance in spec.cluster.instances}
    return outcomes([(node, partial(_ask, spec, instances[node], link, mpi=spec.launcher == "mpirun")) for node, link in links.items()])


def _ask(spec: JobSpec, instance: Instance, link: Link, *, mpi: bool) -> Probed:
    workdir = None if spec.sync else str(spec.workdir)
    script = spec.run.path if isinstance(spec.run, Script) and spec.setup is None else None  # which may make it
    asked_at = time.time()
    reply = link.ask(wire.Probe(python_of(instance), mpi=mpi, activate=instance.activate, workdir=workdir, script=script))
    answered_at = time.time()
    assert isinstance(reply, wire.NodeFacts)
    clock_s = reply.machine.clock_s
    return Probed(reply, clock_s - min(max(clock_s, asked_at), answered_at))


def judge_nodes(spec: JobSpec, probed: Mapping[str, Probed]) -> tuple[Finding, ...]:
    """What all that they said together says against the job."""
    facts = {node: one.facts for node, one in probed.items()}
    judged = judge(
        facts,
        {node: one.clock_offset_s for node, one in probed.items()},
        is_trainer=isinstance(spec.run, TrainerConfig),
        brings_torch=spec.setup is not None,
        is_one_machine=len(spec.cluster.instances) == 1 or all(instance.host is None for instance in spec.cluster.instances),
    )
    return (*judged, *judge_gpus(spec.cluster, facts))


def prove(cluster: ClusterSpec, facts: Mapping[str, wire.NodeFacts], links: Mapping[str, Link]) -> Rendezvous:
    """Let the nodes dial each other, choose where they meet, and let the first node keep the port that was dialled there.

    Where there are several, it keeps a second one, for the agents' watch.
    """
    token = token_hex(32)
    ports = rendezvous.ports_of(cluster)
    targets = rendezvous.candidates(cluster, facts)

    def listen(node: str, link: Link) -> wire.Listening:
        reply = link.ask(wire.Listen(token, tuple(address.address for address in targets[node]), ports))
        assert isinstance(reply, wire.Listening)
        return reply

    listening = on_all(links, listen)
    targets = rendezvous.listened_on(targets, listening, facts)
    dials = rendezvous.dials(targets, {node: reply.port for node, reply in listening.items()})

    def dial(node: str, link: Link) -> wire.Dialed:
        reply = link.ask(wire.Dial(token, dials[node]))
        assert isinstance(reply, wire.Dialed)
        return reply

    dialed = on_all(links, dial) if len(links) > 1 else {}
    chosen = rendezvous.choose(targets, rendezvous.tries(dials, dialed, facts))
    first = cluster.instances[0].name
    others = {node: link for node, link in links.items() if node != first}
    on_all(others, lambda node, link: link.ask(wire.Settle(hold=False)))  # before: they may be this machine, with this window
    links[first].ask(wire.Settle(hold=True, watch=ports if others else None))
    return Rendezvous(chosen, listening[first].port)


def on_all(links: Mapping[str, Link], work: Callable[[str, Link], _T], at_once: int = _AT_ONCE) -> dict[str, _T]:
    """Results by node. Raises DtrainError: where some fail, one error that tells of all of them."""
    return outcomes([(node, partial(work, node, link)) for node, link in links.items()], at_once).all()


def outcomes(
    work: Sequence[tuple[str, Callable[[], _T]]], at_once: int = _AT_ONCE, waiting: Callable[[Sequence[str]], None] | None = None
) -> Outcomes[_T]:
    """The results and the errors of work on several nodes at the same time.

    Args:
        waiting: is told for which nodes, after a while and then every second.
    """
    pool = ThreadPoolExecutor(max(1, min(at_once, len(work))))
    try:
        futures = [(node, pool.submit(task)) for node, task in work]
        if waiting is not None:
            pause_s = _SLOW_S
            while left := wait([future for _, future in futures], pause_s).not_done:
                waiting([node for node, future in futures if future in left])
                pause_s = _LOOK_S
        errors = {node: error for node, future in futures if (error := future.exception()) is not None}
    finally:  # after Ctrl-C nobody waits for those that are under way; closing their links ends them
        pool.shutdown(wait=False, cancel_futures=True)
    told = {}
    for node, error in errors.items():
        if not isinstance(error, DtrainError):
            raise error
        told[node] = error
    return Outcomes({node: future.result() for node, future in futures if node not in errors}, told)


def _all_of(by_node: Mapping[str, DtrainError]) -> DtrainError:
    errors = [*by_node.values()]
    first = next((error for error in errors if not isinstance(error, NodesBusy)), errors[0])  # waiting would not help with it
    if len(errors) == 1:
        return first
    if len({error.hint for error in errors}) == 1:
        told = type(first)("\n".join(error.message for error in errors), hint=first.hint)
    else:
        told = type(first)("\n".join(str(error) for error in errors))
    told.finding, told.by_node = first.finding, by_node
    return told
