"""A link: the launching side's end of a session with one node."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

from dtrain.bundle import Bundle, bundle
from dtrain.errors import DtrainError, NodeUnreachable, NoSpace, NoSuchJob, PreflightFailed
from dtrain.node import wire
from dtrain.spec import Instance
from dtrain.transport import Channel, transport_to


@dataclass(frozen=True, slots=True)
class Target:
    """Which job on which node a link is about."""

    instance: Instance
    dir: str
    job: str
    name: str

    @property
    def node(self) -> str:
        return self.instance.name


class Link:
    """Orders go out, replies and streams come in. One thread may receive while others tell."""

    def __init__(self, node: str, channel: Channel) -> None:
        self.node = node
        self._channel = channel
        self._writing = threading.Lock()

    @classmethod
    def open(cls, target: Target) -> Link:
        """Reach a node, make sure that it has our code, and start a session about a job.

        Raises:
            NodeUnreachable: no way in, or no usable Python there.
            AccessDenied: refused by the node, or its host key by us.
        """
        channel = transport_to(target.instance).open()
        link = cls(target.node, channel)
        try:
            _boot(channel, target, bundle())
            link.ask(wire.Open(target.dir, target.job, target.name, target.node))
        except (OSError, DtrainError) as error:
            complaint = channel.stderr()
            channel.close()
            if isinstance(error, DtrainError) and not isinstance(error, NodeUnreachable):
                raise
            raise NodeUnreachable(f"{target.node}: no session could be started there: {complaint or error}") from error
        return link

    def tell(self, order: wire.Message, payload: bytes = b"") -> None:
        """Send an order.

        Raises:
            NodeUnreachable: the connection is gone.
        """
        try:
            with self._writing:
                self._channel.write(wire.frame(order, payload))
        except (OSError, ValueError) as error:  # ValueError: closed by us
            raise NodeUnreachable(f"{self.node}: the connection is gone") from error

    def receive(self) -> tuple[wire.Message, bytes] | None:
        """Next message and payload; None when the session has ended.

        Raises:
            DtrainError: the node could not do what it was told.
        """
        try:
            received = wire.read_frame(self._channel.read)
        except (OSError, ValueError):
            return None
        if received is not None and isinstance(received[0], wire.Failed):
            raise _as_error(self.node, received[0])
        return received

    def answer(self) -> tuple[wire.Message, bytes]:
        received = self.receive()
        if received is None:
            raise NodeUnreachable(f"{self.node}: the session ended: {self._channel.stderr() or 'no reason given'}")
        return received

    def ask(self, order: wire.Message) -> wire.Message:
        """Send an order and wait for its reply."""
        self.tell(order)
        return self.answer()[0]

    def close(self) -> None:
        self._channel.close()


def _boot(channel: Channel, target: Target, code: Bundle) -> None:
    wanted = {"hash": code.hash, "size": len(code.data), "dir": target.dir}
    channel.write(code.boot.hex().encode() + b"\n" + json.dumps(wanted).encode() + b"\n")
    said = b""
    while not said.endswith(b"\n"):
        part = channel.read(1)
        if not part:
            raise NodeUnreachable("it ended before it took dtrain's code")
        said += part
    if said == b"want\n":
        channel.write(code.data)


def _as_error(node: str, failed: wire.Failed) -> DtrainError:
    kinds: dict[str, type[DtrainError]] = {"no-space": NoSpace, "setup": PreflightFailed, "no-job": NoSuchJob}
    return kinds.get(failed.kind, DtrainError)(f"{node}: {failed.text}", hint=failed.hint)
