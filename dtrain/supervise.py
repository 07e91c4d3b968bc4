"""Following a job on all its nodes: one queue for all of them, one thread that takes from it.

A thread per node only receives. The calling thread stores each event, works out the state, and tells the callbacks. A
connection that breaks is opened again from the offsets that are known; a lost connection is never a lost node. Others may
follow the same job, and stop it: what they say is read from the store.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dtrain.errors import LogGap, NoSpace
from dtrain.follower import Connected, Follower, FollowerEnded, Received
from dtrain.intake import Intake, Watcher
from dtrain.jobstate import JobState, NodeLost, State, StopAsked
from dtrain.link import Link, Target, make_ready_for
from dtrain.node import wire
from dtrain.plan import LaunchPlan
from dtrain.store import Store

_PING_S = 5.0  # or a third of the lease, if that is sooner
_TICK_S = 1.0  # between two looks at what other processes say of the job, and two notes of when nodes were heard
# A node of which nothing is heard for so long is lost, where the others have lost it too; and where it is to stop and all others
# have ended, it is not waited for.
_SILENT_S = 2 * wire.SAY_S
_OVERTIME_S = 45.0  # beyond the grace: what an agent takes to KILL and to look, and its guard after it


@dataclass(frozen=True, slots=True)
class _Stop:
    cause: str
    grace_s: float
    by: str


@dataclass(frozen=True, slots=True)
class _Detach:
    within_s: float


@dataclass(frozen=True, slots=True)
class _Abandon:
    pass


_Item: TypeAlias = Received | Connected | _Stop | _Detach | _Abandon | FollowerEnded


class Supervisor:
    """Follows one job to its end."""

    def __init__(self, store: Store, job: str, plan: LaunchPlan, watcher: Watcher) -> None:
        self._store = store
        self._job = job
        self._plan = plan
        self._watcher = watcher
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._followers: dict[str, Follower] = {}
        self._ended: set[str] = set()
        self._intake = Intake(store, job, plan, watcher)
        self._voice = _Voice(self._tell_all)
        self._abandoned = False
        self._detach_until_s: float | None = None  # None: it was not asked for
        self._errors: dict[str, str] = {}  # why nodes are not connected
        self._stopping_since_s: float | None = None  # as this process was told
        self._stop_until_s = 0.0
        self._noted: dict[str, float] = {}  # when nodes were heard, as the store knows
        self._tick_at_s = 0.0
        self._began_s = time.monotonic()

    @property
    def state(self) -> JobState:
        return self._intake.state

    @property
    def unkept(self) -> NoSpace | None:
        """Why the store has not all of what the nodes said."""
        return self._intake.unkept

    def request_stop(self, cause: str, grace_s: float, by: str = "") -> None:
        """End the job, and follow until no node has any of it. May be called from a signal handler and from any thread.

        Args:
            by: user@host, where it is not the launcher that asks.
        """
        self._inbox.put(_Stop(cause, grace_s, by))
        self._voice.say(wire.Stop(cause, grace_s))

    def request_detach(self) -> None:
        """Let the job go on without a launcher, and follow it until a node has heard of that, which tells the others. May be called
        from a signal handler. A job without a lease needs none anyway.

        Where no node can be told for the length of the lease, the job has come to the end of it.
        """
        if self._plan.lease_s is not None:
            self._inbox.put(_Detach(self._plan.lease_s))
            self._voice.say(wire.Detach())

    def abandon(self) -> None:
        """Stop following, whatever the job does. May be called from a signal handler."""
        self._inbox.put(_Abandon())

    @property
    def is_abandoned(self) -> bool:
        return self._abandoned

    def waited_for(self) -> list[str]:
        """Nodes that have not said that they ended."""
        return [node for node in self._followers if node not in self._ended]

    def unheard(self) -> dict[str, str]:
        """By node that was to stop and has not said that it did, why not."""
        return {node: why for node in self.waited_for() if (why := self._why_unheard(node)) is not None}

    def untold(self) -> list[str]:
        """Nodes that no order has reached: there is no connection to them."""
        return [node for node in self.waited_for() if not self._followers[node].is_connected]

    def run(
        self,
        targets: Sequence[Target],
        links: Mapping[str, Link],
        *,
        renew_lease: bool = False,
        detach: bool = False,
        offsets: Mapping[str, Mapping[str, int]] | None = None,
    ) -> JobState:
        """Follow until every node has ended; where the job was asked to stop, until every node that answers has. Less far where it
        is detached or abandoned. An error that nobody foresaw ends this, and no job: it goes on as without its launcher.

        Args:
            targets: nodes of the job; those that have ended may be left out.
            links: open sessions by node; a node without one is connected to.
            renew_lease: say that the launcher is there, which only the launcher may.
            detach: follow only until all workers run, whose logs are left to who attaches.
            offsets: by node and stream, from where the watcher wants to be told; else from where the store ends.
        """
        make_ready_for(target for target in targets if target.node not in links)
        for target in targets:
            known = self._intake.offsets(target.node, (offsets or {}).get(target.node))
            self._followers[target.node] = Follower(target, links.get(target.node), known, self._inbox, logs=not detach)
        while not self._inbox.empty():  # a stop is in the store before any node is told, or asked whether it has the job
            self._take(self._inbox.get())
        for follower in self._followers.values():
            follower.start()
        self._voice.begin(min(_PING_S, (self._plan.lease_s or _PING_S * 3) / 3) if renew_lease else None)
        try:
            while not self._is_over() and not (detach and self._runs_well()):
                self._tick()
                try:
                    item = self._inbox.get(timeout=max(0.0, self._tick_at_s - time.monotonic()))
                except queue.Empty:
                    continue
                self._take(item)
        except (KeyboardInterrupt, SystemExit):  # of a notebook; the commands hand theirs over
            if renew_lease:
                self._tell_all(wire.Stop("failure", self._plan.grace_s))
            raise
        finally:
            self._voice.end()
            for follower in self._followers.values():
                follower.stop()
            self._note_contacts()
        return self.state

    def _is_over(self) -> bool:
        if self._abandoned:
            return True
        if self._stopping_since_s is None:
            is_left = self._detach_until_s is not None and (self.state.is_lease_lifted or time.monotonic() >= self._detach_until_s)
            return is_left or self.state.state.is_final
        return all(self._why_unheard(node) is not None for node in self.waited_for())

    def _runs_well(self) -> bool:
        """All workers run, none has failed, and nobody wants the end."""
        return self.state.state is State.RUNNING and not self.state.failures and self._stopping_since_s is None

    def _why_unheard(self, node: str) -> str | None:
        """Why a node that is to stop is not waited for any more, if it is so."""
        if self._stopping_since_s is None:
            return None
        now_s = time.monotonic()
        if now_s - max(self._followers[node].heard_s, self._stopping_since_s) > _SILENT_S:
            return self._errors.get(node, f"{node}: no answer for {_SILENT_S:g} s")
        return None if now_s < self._stop_until_s else f"{node}: it was told, and has not said that it ended"

    def _tick(self) -> None:
        if time.monotonic() >= self._tick_at_s:
            self._intake.take_others()
            self._look_for_lost_nodes()
            self._note_contacts()
            self._tick_at_s = time.monotonic() + _TICK_S

    def _note_contacts(self) -> None:
        heard = {node: follower.heard_s for node, follower in self._followers.items() if follower.heard_s > self._noted.get(node, 0.0)}
        if heard:
            self._intake.saw({node: _wall_clock(heard_s) for node, heard_s in heard.items()})
            self._noted.update(heard)

    def _take(self, item: _Item) -> None:
        match item:
            case Received(node, message, payload):
                follower = self._followers[node]
                if follower.is_asked_for(item):
                    try:
                        self._intake.take(node, message, payload)
                        follower.took(item)
                    except LogGap as gap:
                        follower.ask_again(gap, self._intake.kept_logs(node))
                    if isinstance(message, wire.CaughtUp) and self._stopping_since_s is not None:
                        self._leave(node)  # none of the job is there, nor will be
                self._leave_those_that_ended()
                follower.handled()
            case Connected(node, None):
                self._errors.pop(node, None)
                self._watcher.reconnected(node)
            case Connected(node, error):
                self._errors[node] = error or ""
                self._watcher.disconnected(node, error or "")
            case _Detach(within_s):
                self._detach_until_s = time.monotonic() + within_s
            case _Abandon():
                self._abandoned = True
            case FollowerEnded(node):
                raise RuntimeError(f"nothing is received from {node} any more")
            case _Stop(cause, grace_s, by):
                self._stopping_since_s = self._stopping_since_s or time.monotonic()
                self._stop_until_s = time.monotonic() + grace_s + _OVERTIME_S
                self._intake.take_own(StopAsked(time.time(), cause, by))

    def _leave_those_that_ended(self) -> None:
        """Nothing more is expected of them. That the nodes end together is their own business (node/tripwire.py)."""
        for node in self.state.nodes:
            if node.state.is_final and node.name in self._followers and node.name not in self._ended:
                self._leave(node.name)

    def _leave(self, node: str) -> None:
        self._ended.add(node)
        self._followers[node].stop()

    def _look_for_lost_nodes(self) -> None:
        """The other nodes say that one is gone, and this machine hears nothing of it either."""
        for node in self.state.nodes:
            if node.missed and not node.state.is_final and self._silent_s(node.name) >= _SILENT_S:
                self._intake.take_own(NodeLost(time.time(), node.name, node.missed))
        self._leave_those_that_ended()

    def _silent_s(self, node: str) -> float:
        follower = self._followers.get(node)
        return 0.0 if follower is None else time.monotonic() - max(follower.heard_s, self._began_s)

    def _tell_all(self, order: wire.Message) -> None:
        for node, follower in tuple(self._followers.items()):
            if node not in self._ended:
                follower.tell(order)


class _Voice:
    """Says to all nodes what must not wait: the thread that follows may stand still, as before a terminal that takes nothing."""

    def __init__(self, tell_all: Callable[[wire.Message], None]) -> None:
        self._tell_all = tell_all
        self._orders: queue.SimpleQueue[wire.Message | None] = queue.SimpleQueue()

    def begin(self, ping_s: float | None) -> None:
        """Args:
        ping_s: between two signs of life of the launcher; None: it is not the launcher that speaks.
        """
        threading.Thread(target=self._speak, args=(ping_s,), name="voice", daemon=True).start()

    def say(self, order: wire.Message) -> None:
        """May be called from a signal handler."""
        self._orders.put(order)

    def end(self) -> None:
        self._orders.put(None)

    def _speak(self, ping_s: float | None) -> None:
        while True:
            try:
                order = self._orders.get(timeout=ping_s)
            except queue.Empty:
                order = wire.Ping()
            if order is None:
                return
            self._tell_all(order)


def _wall_clock(monotonic_s: float) -> float:
    return time.time() - (time.monotonic() - monotonic_s)
