"""The state of a job is what its events add up to: `state = state.after(node, event)`. Nobody else writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from dtrain.errors import CTRL_C, STOPPED, NodeUnreachable, PreflightFailed
from dtrain.node import tripwire, wire
from dtrain.reasons import is_port_in_use, reason_of

if TYPE_CHECKING:  # a list of jobs needs no plan, which takes longer to load than the list takes
    from dtrain.plan import LaunchPlan

STOP_CAUSES = ("ctrl-c", "stop")  # a person wanted it
LAUNCHING_SIDE = ""  # node name under which the launching side's own events are kept


class State(str, Enum):
    UNKNOWN = "UNKNOWN"  # of a job that was launched elsewhere: nobody has said yet
    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    LOST = "LOST"

    @property
    def is_final(self) -> bool:
        return self in (State.SUCCEEDED, State.FAILED, State.STOPPED, State.LOST)


# ---- events of the launching side; the nodes' own are in wire.py ----


@dataclass(frozen=True)
class StopAsked(wire.Message):
    """Somebody wants the job to end."""

    at: float
    cause: str  # ctrl-c | stop
    by: str = ""  # user@host of a `dtrain stop`; "": the launcher itself


@dataclass(frozen=True)
class StartFailed(wire.Message):
    """The job could not be started on all nodes, and was ended on those that had it."""

    at: float
    exit_code: int
    text: str
    setup_of: str = ""  # the node whose setup failed; "": it was something else


@dataclass(frozen=True)
class NodeLost(wire.Message):
    """There is evidence that a node's part of the job is gone without a last word."""

    at: float
    node: str
    text: str


Event = wire.Event | StopAsked | StartFailed | NodeLost


@dataclass(frozen=True, slots=True)
class RankState:
    rank: int
    local_rank: int
    state: State = State.PENDING
    pid: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker or a node that ended wrongly."""

    at: float  # by the first node's clock, as far as it is known
    node: str
    rank: int | None  # None: the node's launcher or agent, not a worker
    exit_code: int
    signal: int | None
    reason: str
    traceback: str
    detail: str  # of a node the last lines of its launcher or setup, of a worker what the kernel says of a lack of memory
    symptom: bool  # followed from something else

    @property
    def log(self) -> str:
        """Name of the stream that tells more."""
        if self.rank is not None:
            return wire.rank_log(self.rank)
        return wire.SETUP_LOG if self.reason == "setup-failed" else wire.LAUNCHER_LOG


@dataclass(frozen=True, slots=True)
class NodeState:
    name: str
    ranks: tuple[RankState, ...]
    state: State = State.PENDING
    survivors: tuple[wire.Survivor, ...] = ()
    clock_offset_s: float = 0.0  # how far its clock is ahead of the first node's
    missed: str = ""  # how another node lost touch with it
    has_ended: bool = False  # it said so itself; a node that is lost may still do so
    ended_by: str = ""  # the reason that it gave


@dataclass(frozen=True, slots=True)
class JobState:
    nodes: tuple[NodeState, ...]
    failures: tuple[Failure, ...] = ()
    stop_cause: str | None = None
    start_failed: StartFailed | None = None
    started_at: float | None = None
    ended_at: float | None = None
    is_lease_lifted: bool = False  # of one node: it tells the others

    @classmethod
    def planned(cls, plan: LaunchPlan, first: State = State.PENDING) -> JobState:
        return cls(
            tuple(
                NodeState(node.name, tuple(RankState(worker.rank, worker.local_rank, first) for worker in node.workers), first)
                for node in plan.nodes
            )
        )

    @classmethod
    def of(cls, plan: LaunchPlan, events: Iterable[tuple[str, Event]], first: State = State.PENDING) -> JobState:
        """Args:
        first: of a node without an event.
        """
        state = cls.planned(plan, first)
        for node, event in events:
            state = state.after(node, event)
        return state

    # ---- what it comes to ----

    @property
    def state(self) -> State:
        states = {node.state for node in self.nodes}
        if self.start_failed is not None:
            return State.STOPPED if self.start_failed.exit_code in (CTRL_C, STOPPED) else State.FAILED
        if all(state.is_final for state in states):
            if State.LOST in states:
                return State.LOST
            if self.first_failure is not None:
                return State.FAILED
            return State.STOPPED if State.STOPPED in states or self.stop_cause else State.SUCCEEDED
        known = states - {State.UNKNOWN} or states
        if known in ({State.PENDING}, {State.UNKNOWN}):
            return known.pop()
        return State.RUNNING if all(state is State.RUNNING or state.is_final for state in known) else State.STARTING

    @property
    def first_failure(self) -> Failure | None:
        """The root cause: the earliest failure that is not a symptom; a symptom only where nothing else explains it."""
        causes = [failure for failure in self.failures if not failure.symptom]
        if not causes and self.stop_cause is None and any(node.state is State.FAILED for node in self.nodes):
            causes = list(self.failures)
        told = {failure.node for failure in causes if failure.reason != "node-lost"}  # its own word says more than the others' does
        causes = [failure for failure in causes if failure.reason != "node-lost" or failure.node not in told]
        return min(causes, key=lambda failure: failure.at, default=None)

    @property
    def exit_code(self) -> int | None:
        """Of `dtrain launch`; None while the job is not over."""
        match self.state:
            case State.SUCCEEDED:
                return 0
            case State.STOPPED if self.start_failed is not None:
                return self.start_failed.exit_code
            case State.STOPPED:
                return CTRL_C if self.stop_cause == "ctrl-c" else STOPPED
            case State.LOST:
                return NodeUnreachable.exit_code
            case State.FAILED:
                if self.start_failed is not None:
                    return self.start_failed.exit_code
                assert self.first_failure is not None
                return self.first_failure.exit_code
            case _:
                return None

    @property
    def stopped_by(self) -> str | None:
        """Who ended a job that is STOPPED, or is stopping: ctrl-c, stop, or lease-over."""
        return self.stop_cause or next((node.ended_by for node in self.nodes if node.ended_by == "lease-over"), None)

    @property
    def exit_source(self) -> str | None:
        """Who ended with that code: worker or dtrain."""
        if self.exit_code is None:
            return None
        failure = self.first_failure
        by_worker = self.state is State.SUCCEEDED or (failure is not None and failure.rank is not None)
        return "worker" if by_worker and self.start_failed is None else "dtrain"

    @property
    def is_port_taken(self) -> bool:
        """Whether the job is over because the port of the rendezvous was taken, so that it is worth another launch: no worker began,
        and nobody wanted its end."""
        if self.state is not State.FAILED or self.stop_cause is not None:
            return False
        failure, began = self.first_failure, any(rank.pid is not None for node in self.nodes for rank in node.ranks)
        return failure is not None and failure.reason == "launcher-failed" and is_port_in_use(failure.detail) and not began

    # ---- one event further ----

    def after(self, node: str, event: Event) -> JobState:
        """The state once `event` has happened on `node`."""
        match event:
            case wire.AgentStarted():
                return replace(self._with_node(node, state=State.STARTING), started_at=self.started_at or event.at)
            case wire.LauncherStarted() | wire.NodeStopping():
                return self
            case wire.ClockOffset():
                return self._with_node(node, clock_offset_s=event.offset_s)
            case wire.LeaseLifted():
                return replace(self, is_lease_lifted=True)
            case wire.PeerLost() if all(each.name != event.node for each in self.nodes):
                return self
            case wire.PeerLost():
                text = f"{node} says: {event.how}"
                after = self._with_node(event.node, missed=text)
                # by the first word that was due and did not come
                lost_at = self._on_first_clock(node, event.at - max(0.0, event.silent_s - tripwire.BEAT_S))
                return after._with_failure(_lost(lost_at, event.node, text))
            case wire.WorkerStarted():
                return self._with_rank(node, event.rank, state=State.RUNNING, pid=event.pid)
            case wire.WorkerEnded():
                ended = State.SUCCEEDED if event.exit_code == 0 else State.FAILED
                after = self._with_rank(node, event.rank, state=ended, exit_code=event.exit_code)
                if event.exit_code != 0:
                    after = after._with_failure(_worker_failure(node, event, self._on_first_clock(node, event.at)))
                return after
            case wire.NodeEnded():
                ended = State[event.outcome.upper()]
                after = self._with_node(node, state=ended, survivors=event.survivors, has_ended=True, ended_by=event.reason)
                after = after._with_ranks_over(node, ended)
                if event.outcome == "stopped" and event.reason in STOP_CAUSES:  # as another machine was told
                    after = replace(after, stop_cause=self.stop_cause or event.reason)
                if event.outcome in ("failed", "lost") and event.reason != "worker-failed":
                    after = after._with_failure(_node_failure(node, event, self._on_first_clock(node, event.at)))
                return after._with_end(event.at)
            case StopAsked():
                return replace(self, stop_cause=self.stop_cause or event.cause)
            case NodeLost():
                failure = _lost(event.at, event.node, event.text)
                after = self._with_node(event.node, state=State.LOST)._with_ranks_over(event.node, State.LOST)
                return after._with_failure(failure)._with_end(event.at)
            case StartFailed():
                after = replace(self, start_failed=self.start_failed or event, ended_at=event.at)
                return after._with_failure(_setup_failure(event)) if event.setup_of else after
            case _:
                assert_never(event)

    def _on_first_clock(self, name: str, at: float) -> float:
        return at - next(node.clock_offset_s for node in self.nodes if node.name == name)

    def _with_ranks_over(self, name: str, state: State) -> JobState:
        """No rank outlives its node; one that did not report its end has no exit code."""
        node = next(node for node in self.nodes if node.name == name)
        ranks = tuple(each if each.state.is_final else replace(each, state=state) for each in node.ranks)
        return self._with_node(name, ranks=ranks)

    def _with_end(self, at: float) -> JobState:
        return replace(self, ended_at=at) if all(node.state.is_final for node in self.nodes) else self

    def _with_failure(self, failure: Failure) -> JobState:
        if self.stop_cause is not None:  # a node that has heard of the stop leaves its peers, on nodes that have not yet, alone
            failure = replace(failure, symptom=True)
        return replace(self, failures=(*self.failures, failure))

    def _with_node(self, name: str, **changes: object) -> JobState:
        nodes = tuple(
            replace(node, **changes) if node.name == name else node  # type: ignore[arg-type]
            for node in self.nodes
        )
        return replace(self, nodes=nodes)

    def _with_rank(self, name: str, rank: int, **changes: object) -> JobState:
        node = next(node for node in self.nodes if node.name == name)
        ranks = tuple(replace(each, **changes) if each.rank == rank else each for each in node.ranks)  # type: ignore[arg-type]
        started = all(each.state not in (State.PENDING, State.UNKNOWN) for each in ranks)
        return self._with_node(name, ranks=ranks, state=State.RUNNING if started else node.state)


def _setup_failure(event: StartFailed) -> Failure:
    return Failure(event.at, event.setup_of, None, event.exit_code, None, "setup-failed", "", event.text, symptom=False)


def _lost(at: float, node: str, text: str) -> Failure:
    return Failure(at, node, None, NodeUnreachable.exit_code, None, "node-lost", "", text, symptom=False)


def _worker_failure(node: str, event: wire.WorkerEnded, at: float) -> Failure:
    detail = "" if event.memory is None else event.memory.text
    return Failure(at, node, event.rank, event.exit_code, event.signal, reason_of(event), event.traceback, detail, event.symptom)


def _node_failure(node: str, event: wire.NodeEnded, at: float) -> Failure:
    lost = event.outcome == "lost" or event.reason in ("agent-killed", "guard-killed")
    code = NodeUnreachable.exit_code if lost else PreflightFailed.exit_code
    return Failure(at, node, None, code, None, event.reason, traceback="", detail=event.detail, symptom=False)
