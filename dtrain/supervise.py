"""Following a job on all its nodes: one queue for all of them, one thread that takes from it.

A thread per node only receives. The calling thread stores each event, works out the state, and tells the callbacks. A
connection that breaks is opened again from the offsets that are known; a lost connection is never a lost node.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dtrain.errors import DtrainError, NodeUnreachable
from dtrain.intake import Intake, Silent, Watcher
from dtrain.jobstate import JobState, NodeLost, StopAsked
from dtrain.link import Link, Target
from dtrain.node import wire
from dtrain.plan import LaunchPlan
from dtrain.store import JobRecord, Store

_FRAMES_AHEAD = 64  # of one node, received and not yet handled: a slow disk here slows the sending, never the job
_PING_S = 5.0  # or a third of the lease, if that is sooner
_SILENT_S = 2 * wire.SAY_S  # a node that the others lost, and of which nothing is heard here for so long either, is lost
_RETRY_FIRST_S, _RETRY_MOST_S = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class _Received:
    node: str
    message: wire.Message
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Connection:
    node: str
    error: str | None  # None: it is there again


@dataclass(frozen=True, slots=True)
class _Stop:
    cause: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class _Abandon:
    pass


@dataclass(frozen=True, slots=True)
class _FollowerEnded:
    node: str


_Item: TypeAlias = _Received | _Connection | _Stop | _Abandon | _FollowerEnded


class Supervisor:
    """Follows one job to its end."""

    def __init__(self, store: Store, job: str, plan: LaunchPlan, watcher: Watcher) -> None:
        self._store = store
        self._job = job
        self._plan = plan
        self._watcher = watcher
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._followers: dict[str, _Follower] = {}
        self._ended: set[str] = set()
        self._intake = Intake(store, job, plan, watcher)
        self._abandoned = False

    @property
    def state(self) -> JobState:
        return self._intake.state

    def request_stop(self, cause: str, grace_s: float) -> None:
        """End the job. May be called from a signal handler and from any thread."""
        self._inbox.put(_Stop(cause, grace_s))

    def abandon(self) -> None:
        """Stop following, whatever the job does. May be called from a signal handler."""
        self._inbox.put(_Abandon())

    def run(
        self,
        targets: Sequence[Target],
        links: Mapping[str, Link],
        *,
        renew_lease: bool = False,
        offsets: Mapping[str, Mapping[str, int]] | None = None,
    ) -> JobState:
        """Follow until every node has ended.

        Args:
            links: open sessions by node; a node without one is connected to.
            renew_lease: say that the launcher is there, which only the launcher may.
            offsets: by node and stream, from where the watcher wants to be told; else from where the store ends.
        """
        for target in targets:
            wanted = (offsets or {}).get(target.node, {})
            known = {**self._store.offsets(self._job, target.node), **wanted}
            self._followers[target.node] = _Follower(target, links.get(target.node), known, self._inbox)
        for follower in self._followers.values():
            follower.start()
        ping_at = 0.0
        ping_s = min(_PING_S, (self._plan.lease_s or _PING_S * 3) / 3)
        try:
            while not self.state.state.is_final and not self._abandoned:
                if time.monotonic() >= ping_at:
                    if renew_lease:
                        self._tell_all(wire.Ping())
                    ping_at = time.monotonic() + ping_s
                    self._look_for_lost_nodes()
                    continue
                try:
                    item = self._inbox.get(timeout=max(0.0, ping_at - time.monotonic()))
                except queue.Empty:
                    continue
                self._take(item)
        except BaseException:
            if renew_lease:  # nobody is left to look after the job
                self._tell_all(wire.Stop("failure", self._plan.grace_s))
            raise
        finally:
            for follower in self._followers.values():
                follower.stop()
        return self.state

    def _take(self, item: _Item) -> None:
        match item:
            case _Received(node, message, payload):
                self._intake.take(node, message, payload)
                self._leave_those_that_ended()
                self._followers[node].handled()
            case _Connection(node, None):
                self._watcher.reconnected(node)
            case _Connection(node, error):
                self._watcher.disconnected(node, error or "")
            case _Abandon():
                self._abandoned = True
            case _FollowerEnded(node):
                raise RuntimeError(f"nothing is received from {node} any more")
            case _Stop(cause, grace_s):
                self._intake.take_own(StopAsked(time.time(), cause))
                self._tell_all(wire.Stop(cause, grace_s))

    def _leave_those_that_ended(self) -> None:
        """Nothing more is expected of them. That the nodes end together is their own business (node/tripwire.py)."""
        for node in self.state.nodes:
            if node.state.is_final and node.name not in self._ended:
                self._ended.add(node.name)
                self._followers[node.name].stop()

    def _look_for_lost_nodes(self) -> None:
        """The other nodes say that one is gone, and this machine hears nothing of it either."""
        for node in self.state.nodes:
            if node.missed and not node.state.is_final and self._followers[node.name].silent_s() >= _SILENT_S:
                self._intake.take_own(NodeLost(time.time(), node.name, node.missed))
        self._leave_those_that_ended()

    def _tell_all(self, order: wire.Message) -> None:
        for node, follower in self._followers.items():
            if node not in self._ended:
                follower.tell(order)


class _Follower(threading.Thread):
    """Receives from one node, and reconnects."""

    def __init__(self, target: Target, link: Link | None, offsets: dict[str, int], inbox: queue.SimpleQueue[Any]) -> None:
        super().__init__(name=f"follow {target.node}", daemon=True)
        self._target = target
        self._link = link
        self._offsets = offsets
        self._inbox = inbox
        self._ahead = threading.Semaphore(_FRAMES_AHEAD)
        self._stopped = threading.Event()
        self._stop_asked: wire.Stop | None = None  # said again after a reconnect: it may not have arrived
        self._heard_s = time.monotonic()

    def silent_s(self) -> float:
        """For how long nothing has been heard of the node."""
        link = self._link
        return time.monotonic() - max(self._heard_s, link.heard_s if link is not None else 0.0)

    def tell(self, order: wire.Message) -> None:
        if isinstance(order, wire.Stop):
            self._stop_asked = order
        link = self._link
        if link is not None:
            try:
                link.tell(order)
            except NodeUnreachable:
                return  # the receiving thread notices and reconnects

    def handled(self) -> None:
        self._ahead.release()

    def stop(self) -> None:
        self._stopped.set()
        self._ahead.release()
        link = self._link
        if link is not None:
            link.close()

    def run(self) -> None:
        try:
            self._follow()
        finally:
            if not self._stopped.is_set():  # by an error that nobody foresaw: the traceback is printed, and the job needs an end
                self._inbox.put(_FollowerEnded(self._target.node))

    def _follow(self) -> None:
        wait_s = _RETRY_FIRST_S
        lost: str | None = None  # why there is no connection
        while not self._stopped.is_set():
            try:
                if self._link is None:
                    self._link = Link.open(self._target)
                link = self._link
                link.tell(wire.Follow(self._offsets, once=False))
                if self._stop_asked is not None:
                    link.tell(self._stop_asked)
                if lost is not None:
                    self._inbox.put(_Connection(self._target.node, None))
                lost, wait_s = None, _RETRY_FIRST_S
                self._receive(link)
                error = "the connection broke"
                link.close()
            except DtrainError as reason:
                error = reason.message
            if self._stopped.is_set():
                return
            if self._link is not None:
                self._heard_s = self._link.heard_s
            self._link = None
            if error != lost:
                self._inbox.put(_Connection(self._target.node, error))
            lost = error
            self._stopped.wait(wait_s)
            wait_s = min(2 * wait_s, _RETRY_MOST_S)

    def _receive(self, link: Link) -> None:
        while True:
            received = link.receive()
            if received is None or self._stopped.is_set():
                return
            message, payload = received
            if isinstance(message, wire.StreamBytes):
                self._offsets[message.stream] = message.offset + len(payload)
            self._ahead.acquire()
            self._inbox.put(_Received(self._target.node, message, payload))


def catch_up(store: Store, jobs: Sequence[tuple[JobRecord, Sequence[Target]]], timeout_s: float) -> dict[str, dict[str, str]]:
    """Bring the store up to what the nodes of some jobs know now, all nodes at once.

    Returns:
        By job, why each node that could not be asked in time was not, by name.
    """
    intakes = {record.job: Intake(store, record.job, record.plan, Silent()) for record, _ in jobs}
    told: queue.SimpleQueue[tuple[Target, wire.Message | DtrainError, bytes]] = queue.SimpleQueue()
    waiting = {(target.job, target.node) for _, targets in jobs for target in targets}
    for _, targets in jobs:
        for target in targets:
            offsets = store.offsets(target.job, target.node)
            threading.Thread(target=_ask_once, args=(target, offsets, told), daemon=True).start()
    problems: dict[str, dict[str, str]] = {record.job: {} for record, _ in jobs}
    deadline = time.monotonic() + timeout_s
    while waiting:
        try:
            target, message, payload = told.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(message, DtrainError):
            problems[target.job][target.node] = message.message
        else:
            intakes[target.job].take(target.node, message, payload)
        if isinstance(message, (DtrainError, wire.CaughtUp)):
            waiting.discard((target.job, target.node))
    for job, node in sorted(waiting):
        problems[job][node] = f"no answer within {timeout_s:g} s"
    for job, intake in intakes.items():
        for each in intake.state.nodes:
            if each.missed and not each.state.is_final and each.name in problems[job]:  # neither do the other nodes hear of it
                intake.take_own(NodeLost(time.time(), each.name, each.missed))
    return problems


def _ask_once(target: Target, offsets: dict[str, int], told: queue.SimpleQueue[tuple[Target, wire.Message | DtrainError, bytes]]) -> None:
    try:
        link = Link.open(target)
        try:
            link.tell(wire.Follow(offsets, once=True))
            message: wire.Message = wire.Done()
            while not isinstance(message, wire.CaughtUp):
                message, payload = link.answer()
                told.put((target, message, payload))
        finally:
            link.close()
    except DtrainError as error:
        told.put((target, error, b""))
