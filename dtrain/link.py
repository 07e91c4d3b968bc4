"""A link: the launching side's end of a session with one node."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dtrain.bundle import Bundle, bundle
from dtrain.errors import DtrainError, NodesBusy, NodeUnreachable, NoSpace, NoSuchJob, PreflightFailed
from dtrain.node import wire
from dtrain.spec import Instance
from dtrain.transport import Channel, make_ready, transport_to

LOGIN_S = 20.0  # a node that takes longer to log in to is named, and holds up no other
_MAKE_ROOM = "make room there, or choose another dir: in the cluster file"
_ANOTHER_DIR = "choose another dir: in the cluster file"
_LOOK = "look whether it is up (ping, ssh), and at the network to it"
_MOST_NOISE_BYTES = 64 * 1024
_KEPT_BYTES = 4 * 1024 * 1024  # of freed memory, for the next frames
_DISK_ERRORS: dict[int, tuple[type[DtrainError], str]] = {
    errno.ENOSPC: (NoSpace, _MAKE_ROOM),
    errno.EDQUOT: (NoSpace, _MAKE_ROOM),
    errno.EROFS: (PreflightFailed, _ANOTHER_DIR),
    errno.EACCES: (PreflightFailed, _ANOTHER_DIR),
    errno.EEXIST: (PreflightFailed, _ANOTHER_DIR),
    errno.ENOTDIR: (PreflightFailed, _ANOTHER_DIR),
    errno.ENOENT: (PreflightFailed, _ANOTHER_DIR),  # made where none can be, as in /proc
}


@dataclass(frozen=True, slots=True)
class Target:
    """Which job on which node a link is about."""

    instance: Instance
    dir: str
    job: str
    name: str
    outputs: str = ""  # an absolute path on the node where those of that name lie; "": in `dir`

    @property
    def node(self) -> str:
        return self.instance.name


def make_ready_for(targets: Iterable[Target]) -> None:
    """Before links to all of them are opened at the same time.

    Raises:
        PreflightFailed: this machine does not allow so many open files.
    """
    make_ready([target.instance for target in targets])


class Link:
    """Orders go out, replies and streams come in. One thread may receive while others tell."""

    def __init__(self, node: str, channel: Channel) -> None:
        self.node = node
        self._channel = channel
        self._writing = threading.Lock()
        self._fault = ""
        self.nonsense = ""  # what came that the protocol does not know, and ended the session
        self.heard_s = time.monotonic()  # when something last came from the node

    @classmethod
    def open(cls, target: Target, within_s: float = LOGIN_S) -> Link:
        """Reach a node, make sure that it has our code, and start a session about a job.

        Raises:
            NodeUnreachable: no way in, or no usable Python there.
            AccessDenied: refused by the node, or its host key by us.
        """
        channel = transport_to(target.instance).open(within_s)
        link = cls(target.node, channel)
        try:
            _boot(channel, target, bundle())
            link.ask(wire.Open(target.dir, target.job, target.name, target.node, target.outputs))
        except (OSError, DtrainError) as error:
            complaint = channel.stderr()
            channel.close()
            for number, (kind, hint) in _DISK_ERRORS.items():
                if os.strerror(number) in complaint:
                    raise kind(f"{target.node}: {complaint}", hint=hint) from error
            if isinstance(error, DtrainError) and not isinstance(error, NodeUnreachable):
                raise
            raise NodeUnreachable(f"{target.node}: no session could be started there: {complaint or error}") from error
        _stay_in_touch(link)
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
            why = str(error) if isinstance(error, OSError) and error.errno is None else "the connection is gone"
            raise NodeUnreachable(f"{self.node}: {why}", hint=_LOOK) from error

    def receive(self) -> tuple[wire.Message, bytes] | None:
        """Next message and payload; None when the session has ended.

        Raises:
            DtrainError: the node could not do what it was told.
        """
        received: tuple[wire.Message, bytes] | None = (wire.StillHere(), b"")
        while received is not None and isinstance(received[0], wire.StillHere):
            try:
                received = wire.read_frame(self._channel.read)
                self.heard_s = time.monotonic()
            except (OSError, ValueError) as error:
                self._fault = str(error)
                self.nonsense = self._fault if isinstance(error, ValueError) else ""
                return None
        if received is not None and len(received[1]) == wire.CHUNK_BYTES:
            _keep_freed_memory()
        if received is not None and isinstance(received[0], wire.Failed):
            raise _as_error(self.node, received[0])
        return received

    def answer(self) -> tuple[wire.Message, bytes]:
        received = self.receive()
        if received is None:
            cause = self._channel.stderr() or self._fault or "the connection is gone"
            raise NodeUnreachable(f"{self.node}: the session ended: {cause}", hint=_LOOK)
        return received

    def ask(self, order: wire.Message, payload: bytes = b"") -> wire.Message:
        """Send an order and wait for its reply."""
        self.tell(order, payload)
        return self.answer()[0]

    def close(self) -> None:
        _open_links.discard(self)
        self._channel.close()

    def say_that_we_are_here(self) -> None:
        """Unless something is being sent just now, which says it too."""
        if self._writing.acquire(blocking=False):
            try:
                self._channel.write(wire.frame(wire.StillHere()))
            except (OSError, ValueError):
                _open_links.discard(self)  # whoever receives from it notices
            finally:
                self._writing.release()


@functools.cache
def _keep_freed_memory() -> None:
    """Once there is a flood of logs: glibc gives freed memory back beyond twice the largest block that was freed so far (mallopt(3),
    M_MMAP_THRESHOLD), and getting it again and again is half of what the flood costs here."""
    bytes(_KEPT_BYTES // 2)


# A session ends when it hears nothing for a while; one thread speaks for all links, whatever their users are busy with.
_open_links: set[Link] = set()


@functools.cache
def _speaker() -> threading.Thread:
    def speak() -> None:
        while True:
            time.sleep(wire.SAY_S)
            for link in tuple(_open_links):
                link.say_that_we_are_here()

    thread = threading.Thread(target=speak, name="stay in touch", daemon=True)
    thread.start()
    return thread


def _stay_in_touch(link: Link) -> None:
    _open_links.add(link)
    _speaker()


def _boot(channel: Channel, target: Target, code: Bundle) -> None:
    channel.write(code.start(target.dir))
    said = b""
    while not said.endswith((b"have\n", b"want\n")):  # between what a start-up file left behind prints
        part = channel.read(1)
        if not part or len(said) > _MOST_NOISE_BYTES:
            raise NodeUnreachable("it ended before it took dtrain's code, or prints something else")
        said += part
    if said.endswith(b"want\n"):
        channel.write(code.data)


def _as_error(node: str, failed: wire.Failed) -> DtrainError:
    kinds: dict[str, type[DtrainError]] = {"no-space": NoSpace, "setup": PreflightFailed, "busy": NodesBusy, "no-job": NoSuchJob}
    return kinds.get(failed.kind, DtrainError)(f"{node}: {failed.text}", hint=failed.hint, finding=failed.finding)
