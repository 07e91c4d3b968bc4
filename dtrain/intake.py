"""Taking in what nodes send: bytes of streams become stored events, a state, and copies of logs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Protocol, TypeVar

from typing_extensions import ParamSpec

from dtrain.errors import STOPPED, LogGap, NodeUnreachable, NoSpace
from dtrain.findings import listed
from dtrain.jobstate import LAUNCHING_SIDE, Event, JobState, NodeLost, StartFailed, State
from dtrain.metrics import read_metric
from dtrain.node import wire
from dtrain.plan import LaunchPlan
from dtrain.store import Store, read_event

P = ParamSpec("P")
T = TypeVar("T")


class Watcher(Protocol):
    """Is told what happens, in the thread that takes it in."""

    def changed(self, state: JobState, node: str, event: Event) -> None: ...

    def printed(self, node: str, stream: str, data: bytes) -> None:
        """Bytes of a log, complete and in order for each stream."""

    def measured(self, metric: Mapping[str, Any]) -> None: ...

    def disconnected(self, node: str, error: str) -> None: ...

    def reconnected(self, node: str) -> None: ...

    def unkept(self, error: NoSpace) -> None:
        """From now on nothing is put into the store, which could not be written or read. Said once."""


class Silent:
    """A watcher that nobody looks at."""

    def changed(self, state: JobState, node: str, event: Event) -> None: ...
    def printed(self, node: str, stream: str, data: bytes) -> None: ...
    def measured(self, metric: Mapping[str, Any]) -> None: ...
    def disconnected(self, node: str, error: str) -> None: ...
    def reconnected(self, node: str) -> None: ...
    def unkept(self, error: NoSpace) -> None: ...


class Intake:
    """One job. Taking the same bytes again, as after a reconnect or next to another follower, changes nothing.

    No job ends because a disk is full here, or the store is locked or broken. When it takes something not, or cannot be read, it is
    given nothing more, as it has no gaps; who asks the nodes next brings the rest.
    """

    def __init__(self, store: Store, job: str, plan: LaunchPlan, watcher: Watcher) -> None:
        self._store = store
        self._job = job
        self._watcher = watcher
        self._partial: dict[tuple[str, str], bytes] = {}  # the start of a line whose end has not arrived
        self._silent: set[str] = set()  # nodes that never had the job
        self._printed: dict[tuple[str, str], int] = {}  # how far the watcher was told of a log
        self.unkept: NoSpace | None = None  # why the store has not all of what was taken
        events, self._offsets = self._look(store.events_and_offsets) or ([], {})
        self._own_offset = self._offsets.get(LAUNCHING_SIDE, 0)
        self.state = JobState.of(plan, events, self._look(store.first_state) or State.PENDING)

    def offsets(self, node: str, wanted: Mapping[str, int] | None = None) -> dict[str, int]:
        """Where to follow a node's streams from at first: its events from where this state ends, for another follower may be ahead.

        Args:
            wanted: by log, from where the watcher wants to be told; else from where the store ends.
        """
        known = {**(self._look(self._store.offsets, node) or {}), wire.EVENTS: self._offsets.get(node, 0), **(wanted or {})}
        self._printed.update({(node, stream): offset for stream, offset in known.items()})
        return known

    def kept_logs(self, node: str) -> dict[str, int]:
        """How far the copies of a node's logs go, by stream; none where nothing is kept."""
        kept = self._look(self._store.offsets, node) if self.unkept is None else None
        if kept is None:
            return {}
        taken = {stream for each, stream in self._printed if each == node} - {wire.EVENTS, wire.METRICS}
        return {stream: kept.get(stream, 0) for stream in taken}

    def take(self, node: str, message: wire.Message, data: bytes) -> None:
        """Take what a node sent.

        Raises:
            LogGap: bytes of a log do not follow on what was taken; nothing is changed.
        """
        match message:
            case wire.StreamBytes(wire.EVENTS):
                self._take_events(node, message, data)
            case wire.StreamBytes(wire.METRICS):
                metrics = [(offset, len(text), read_metric(text)) for offset, text in self._lines(node, message, data)]
                self._keep(self._store.append_metrics, node, metrics)
                for _, _, metric in metrics:
                    self._watcher.measured(metric)
            case wire.StreamBytes(stream, offset):
                self._take_log(node, stream, offset, data)
            case wire.CaughtUp(alive=False):
                self._take_silence(node)
            case _:
                pass

    def take_own(self, event: Event) -> None:
        """An event of the launching side."""
        if not (self._keep(self._store.append_own, event) and self.take_others()):
            self._take_event(LAUNCHING_SIDE, event)
            self._conclude()

    def saw(self, seen_at: Mapping[str, float]) -> None:
        """When some nodes were last heard from, by this machine's clock."""
        self._keep(self._store.saw, seen_at)

    def take_others(self) -> bool:
        """Events of the launching side that are in the store and not yet in the state: this process's own, and others'.

        Returns:
            Whether the store can be read now.
        """
        events = self._look(self._store.own_events, self._own_offset)
        for behind, event in events or ():
            self._own_offset = behind
            self._take_event(LAUNCHING_SIDE, event)
        if events:
            self._keep(self._store.keep_state, self.state)
        self._conclude()
        return events is not None

    def _keep(self, write: Callable[Concatenate[str, P], None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Put something of the job into the store. Whether it is there."""
        if self.unkept is None:
            try:
                write(self._job, *args, **kwargs)
            except NoSpace as error:
                self._end_keeping(error)
        return self.unkept is None

    def _look(self, read: Callable[Concatenate[str, P], T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What the store says of the job; None where it cannot be read now. After it was in vain once, nobody waits for it."""
        try:
            with contextlib.nullcontext() if self.unkept is None else self._store.without_waiting():
                return read(self._job, *args, **kwargs)
        except NoSpace as error:
            self._end_keeping(error)
            return None

    def _end_keeping(self, error: NoSpace) -> None:
        if self.unkept is None:
            self.unkept = error
            self._watcher.unkept(error)

    def _take_log(self, node: str, stream: str, offset: int, data: bytes) -> None:
        """What comes again, as its copy here was deleted, is not shown again."""
        printed = self._printed.get((node, stream), 0)
        if offset > printed:
            raise LogGap(node, stream, offset, printed)
        self._keep(self._store.write_log, node, stream, offset, data)
        if new := data[printed - offset :]:
            self._printed[node, stream] = printed + len(new)
            self._watcher.printed(node, stream, new)

    def _take_event(self, node: str, event: Event) -> None:
        self.state = self.state.after(node, event)
        self._watcher.changed(self.state, node, event)

    def _take_events(self, node: str, where: wire.StreamBytes, data: bytes) -> None:
        self.take_others()  # a stop that was asked for before this counts before this
        lines = [(offset, text, event) for offset, text in self._lines(node, where, data) if (event := read_event(text)) is not None]
        states = []
        for _, _, event in lines:
            self.state = self.state.after(node, event)
            states.append(self.state)
        self._keep(self._store.append, node, [(offset, text.decode()) for offset, text, _ in lines], self.state)
        for state, (_, _, event) in zip(states, lines, strict=True):
            self._watcher.changed(state, node, event)
        if lines:
            self._silent.discard(node)
            self._conclude()

    def _take_silence(self, node: str) -> None:
        """Neither agent nor guard is there, and all that they wrote was read: without a last word, they were killed."""
        self.take_others()
        state = next(each.state for each in self.state.nodes if each.name == node)
        if state in (State.PENDING, State.UNKNOWN):
            self._silent.add(node)
            self._conclude()
        elif not state.is_final:
            self.take_own(NodeLost(time.time(), node, "dtrain's agent and guard on it are gone"))

    def _conclude(self) -> None:
        """A job that some nodes never had, and that is over on the others, will not run, unless somebody is still starting it."""
        is_open = any(not each.state.is_final and each.name not in self._silent for each in self.state.nodes)
        if not self._silent or is_open or self.state.start_failed is not None:
            return
        if self.state.stop_cause is not None:  # who starts a job looks for that once all nodes have it, before any runs it
            self.take_own(StartFailed(time.time(), STOPPED, "`dtrain stop` came before all nodes had it"))
        elif self._look(self._store.is_launcher_gone):
            self.take_own(StartFailed(time.time(), NodeUnreachable.exit_code, "its launcher was killed before all nodes had it"))
        elif self._look(self._store.was_launched_here) is False:  # whoever starts it elsewhere cannot go on either
            text = f"it is over, and {listed(sorted(self._silent))} had none of it"
            self.take_own(StartFailed(time.time(), NodeUnreachable.exit_code, text))

    def _lines(self, node: str, where: wire.StreamBytes, data: bytes) -> list[tuple[int, bytes]]:
        """Offset and text of each line that is complete by now, with its newline."""
        before = self._partial.pop((node, where.stream), b"")
        *whole, rest = (before + data).split(b"\n")
        if rest:
            self._partial[node, where.stream] = rest
        offset, lines = where.offset - len(before), []
        for line in whole:
            lines.append((offset, line + b"\n"))
            offset += len(line) + 1
        return lines
