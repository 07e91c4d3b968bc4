"""A follower: a thread that receives what one node sends of a job, and connects again when the connection breaks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.errors import AccessDenied, DtrainError, LogGap, NodeUnreachable
from dtrain.link import Link, Target
from dtrain.node import wire

_FRAMES_AHEAD = 64  # of one node, received and not yet handled: a slow disk here slows the sending, never the job
_RETRY_FIRST_S, _RETRY_MOST_S = 0.5, 10.0
_WELL_S = 5.0  # a node that speaks sense for so long is connected to again at once
_REFUSED_S = 300.0  # a node may ban who is refused again and again


@dataclass(frozen=True, slots=True)
class Received:
    node: str
    message: wire.Message
    payload: bytes
    num_asked_again: int  # before this came


@dataclass(frozen=True, slots=True)
class Connected:
    node: str
    error: str | None  # begins with the name of the node; None: it is there again


@dataclass(frozen=True, slots=True)
class FollowerEnded:
    node: str


class Follower(threading.Thread):
    """Receives from one node, and reconnects.

    Args:
        logs: those of a node that runs too.
    """

    def __init__(
        self, target: Target, link: Link | None, offsets: dict[str, int], inbox: queue.SimpleQueue[Any], *, logs: bool = True
    ) -> None:
        super().__init__(name=f"follow {target.node}", daemon=True)
        self._target = target
        self._link = link
        self._offsets = offsets
        self._logs = logs
        self._inbox = inbox
        self._ahead = threading.Semaphore(_FRAMES_AHEAD)
        self._stopped = threading.Event()
        self._taken = dict(offsets)  # how far the streams were taken in, while more of them is received
        self._again: tuple[dict[str, int], LogGap] | None = None  # from where to receive again, and why
        self._num_asked_again = 0  # as the one who takes in counts them,
        self._num_began_again = 0  # and as the one who receives does
        self._asked: dict[type[wire.Message], wire.Message] = {}  # said again after a reconnect: it may not have arrived
        self._heard_s = 0.0
        self.is_connected = False

    @property
    def heard_s(self) -> float:
        """When something last came from the node; 0: not yet."""
        link = self._link
        if link is not None:
            self._heard_s = link.heard_s
        return self._heard_s

    def tell(self, order: wire.Message) -> None:
        before = self._asked.get(wire.Stop)
        if isinstance(order, wire.Stop) and isinstance(before, wire.Stop) and before.grace_s <= order.grace_s:
            order = before  # a later one shortens the grace, and never makes it longer
        if isinstance(order, (wire.Stop, wire.Detach)):
            self._asked[type(order)] = order
        link = self._link
        if link is not None:
            try:
                link.tell(order)
            except NodeUnreachable:
                return  # the receiving thread notices and reconnects

    def is_asked_for(self, received: Received) -> bool:
        """False for what was on its way when `ask_again` was called: it comes again."""
        return received.num_asked_again == self._num_asked_again

    def took(self, received: Received) -> None:
        if isinstance(received.message, wire.StreamBytes):
            self._taken[received.message.stream] = received.message.offset + len(received.payload)

    def ask_again(self, gap: LogGap, kept: Mapping[str, int]) -> None:
        """Receive that log from where the part of it that is here ends, and all else from where it was taken in.

        Args:
            kept: how far the copies of logs go: where one was deleted, others may be too.
        """
        self._num_asked_again += 1
        shorter = {stream: end for stream, end in kept.items() if end < self._taken.get(stream, 0)}
        self._again = {**self._taken, **shorter, gap.stream: gap.end}, gap
        link = self._link
        if link is not None:
            threading.Thread(target=link.close, daemon=True).start()  # which may wait until all was received

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
                self._inbox.put(FollowerEnded(self._target.node))

    def _follow(self) -> None:
        wait_s = _RETRY_FIRST_S
        lost: str | None = None  # why there is no connection
        while not self._stopped.is_set():
            try:
                if self._link is None:
                    self._link = Link.open(self._target)
                link = self._link
                if self._again is not None:
                    (self._offsets, _), self._again = self._again, None
                    self._num_began_again += 1
                link.tell(wire.Follow(self._offsets, once=False, logs=self._logs))
                for order in tuple(self._asked.values()):
                    link.tell(order)
                self.is_connected = True
                if lost is not None:
                    self._inbox.put(Connected(self._target.node, None))
                lost, began_s = None, time.monotonic()
                self._receive(link)
                error = f"{self._target.node}: the connection broke"
                if link.nonsense:
                    error += f": {link.nonsense}"
                if time.monotonic() > began_s + _WELL_S or (self._again is None and not link.nonsense):
                    wait_s = _RETRY_FIRST_S
                link.close()
            except DtrainError as reason:
                error = reason.message
                if isinstance(reason, AccessDenied):
                    wait_s = _REFUSED_S
            if self._stopped.is_set():
                return
            if self._again is not None:
                error = self._again[1].message
            self.is_connected = False
            self._link = None
            if error != lost:
                self._inbox.put(Connected(self._target.node, error))
            lost = error
            self._stopped.wait(wait_s)
            wait_s = min(2 * wait_s, _RETRY_MOST_S)

    def _receive(self, link: Link) -> None:
        while True:
            received = link.receive()
            if received is None or self._stopped.is_set() or self._again is not None:
                return
            message, payload = received
            if isinstance(message, wire.StreamBytes):
                self._offsets[message.stream] = message.offset + len(payload)
            self._ahead.acquire()
            self._inbox.put(Received(self._target.node, message, payload, self._num_began_again))
