"""The tripwire: the agents of a job watch each other, also when nobody else does.

The agent of every node holds one TCP connection to that of the first node. A node that stops says why, and the first node
tells the others; one whose connection ends without a Bye, or that says nothing for SILENT_S, is lost, and its job with it.

    first node:  nonce (16 bytes)
    other node:  nonce (16 bytes), and from then on both: sealed messages; the first are Hello and Welcome
    sealed:      length (4 bytes, big-endian), message as JSON, HMAC-SHA256 of its sender's role, its number and the JSON

The key is made of the job's token and both nonces, so that nothing recorded is good for anything later.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import os
import selectors
import socket
import struct
import time
from typing import Callable, Optional

from dtrain.node import network, procs, wire

BEAT_S = 3.0  # between two words of a node that has nothing to say
SILENT_S = 15.0  # a node that says nothing for so long is lost
_GUEST_S = 5.0  # from the connection to the Hello
_MOST_GUESTS = 256  # connections without a Hello; for one more the oldest makes room
_JOIN_TIMEOUT_S = 5.0
_CLOCK_STEP_S = 0.02  # a clock that has gone further away from the first node's is told of anew

_NONCE_BYTES = 16
_MAC_BYTES = 32
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 256 * 1024  # of one message
_FIRST, _OTHER = b"first", b"other"


class _Line:
    """One connection to another agent. Nothing is believed but what is sealed."""

    def __init__(self, connection: socket.socket, token: str, me: bytes) -> None:
        self.connection = connection
        self.node = ""  # that has proved to know the token
        self.heard_s = time.monotonic()
        self.untaken: collections.deque[wire.Message] = collections.deque()  # heard; what one of them leads to may take the next
        self._token = token.encode()
        self._me, self._them = (_FIRST, _OTHER) if me == _FIRST else (_OTHER, _FIRST)
        self._nonce = os.urandom(_NONCE_BYTES)
        self._key = b""  # once their nonce is here
        self._num_sent = self._num_heard = 0
        self._received = b""

    def begin(self) -> None:
        self.connection.sendall(self._nonce)

    def say(self, message: wire.Message) -> None:
        """Send a message.

        Raises:
            OSError: the connection is gone, or so full that nobody can be at its other end.
        """
        text = wire.to_json(message).encode()
        data = _LENGTH.pack(len(text)) + text + self._seal(self._me, self._num_sent, text)
        self._num_sent += 1
        if self.connection.send(data) < len(data):
            raise OSError("it takes nothing any more")

    def hear(self) -> list[wire.Message]:
        """Messages that have arrived.

        Raises:
            OSError: the connection is gone.
            ValueError: something that no agent of this job has said.
        """
        part = self.connection.recv(_MOST_BYTES)
        if not part:
            raise ConnectionResetError("its connection has ended")
        self._received += part
        if not self._key:
            if len(self._received) < _NONCE_BYTES:
                return []
            theirs, self._received = self._received[:_NONCE_BYTES], self._received[_NONCE_BYTES:]
            nonces = self._nonce + theirs if self._me == _FIRST else theirs + self._nonce
            self._key = hmac.digest(self._token, b"tripwire" + nonces, "sha256")
        messages = []
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            if size > (_MOST_BYTES if self.node else 1024):
                raise ValueError("a message that is too long")
            whole = _LENGTH.size + size + _MAC_BYTES
            if len(self._received) < whole:
                break
            text, mac = self._received[_LENGTH.size : whole - _MAC_BYTES], self._received[whole - _MAC_BYTES : whole]
            if not hmac.compare_digest(mac, self._seal(self._them, self._num_heard, text)):
                raise ValueError("a message without a seal")
            self._received = self._received[whole:]
            self._num_heard += 1
            messages.append(wire.from_json(text))
        self.heard_s = time.monotonic()
        return messages

    @property
    def has_key(self) -> bool:
        return bool(self._key)

    def _seal(self, role: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, role + number.to_bytes(8, "big") + text, "sha256")


class Tripwire:
    """One agent's end of it. The agent's own selector and thread do the work."""

    def __init__(
        self,
        watch: Optional[wire.Watch],
        selector: selectors.BaseSelector,
        on_word: Callable[[str, wire.Message], None],
        on_lost: Callable[[str, str, float], None],
        on_clock: Callable[[float], None],
        launcher_silent_s: Callable[[], float],
    ) -> None:
        """Args:
        watch: who watches whom; None: the job has one node.
        on_word: called with a node and what it said.
        on_lost: called with a node, how it was lost, and for how many seconds nothing was heard of it.
        on_clock: called with how many seconds this node's clock is ahead of the first one's, when that is known and when it changes.
        launcher_silent_s: for how long the launching side has said nothing, which every Beat tells.
        """
        self._watch = watch
        self._selector = selector
        self._on_word = on_word
        self._on_lost = on_lost
        self._lines: dict[str, _Line] = {}  # by node
        self._guests: dict[_Line, float] = {}  # until when; oldest first
        self._beat_at_s = float("inf")
        self._checked_s = time.monotonic()
        self._is_first = watch is not None and watch.node == watch.first
        self._expected: set[str] = set(watch.nodes) - {watch.first} if watch is not None and self._is_first else set()
        self._on_clock = on_clock
        self._launcher_silent_s = launcher_silent_s
        self._clock_offset_s = 0.0

    # ---- becoming one ----

    def listen(self, listener: socket.socket) -> None:
        """Take the connections of the other nodes, which may be more than a process has files by default."""
        procs.allow_most_files()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def join(self, address: str, port: int) -> None:
        """Connect to the first node's agent.

        Raises:
            OSError: it is not reached, or somebody else answers there.
        """
        assert self._watch is not None
        until_s = time.monotonic() + _JOIN_TIMEOUT_S
        connection = socket.create_connection((address, port), timeout=_JOIN_TIMEOUT_S)
        line = _Line(connection, self._watch.token, _OTHER)
        try:
            line.begin()
            heard: list[wire.Message] = []
            asked_at = 0.0
            while not heard:
                connection.settimeout(max(0.01, until_s - time.monotonic()))
                if line.has_key and not asked_at:
                    asked_at = time.time()
                    line.say(wire.Hello(self._watch.node, asked_at))
                heard = line.hear()
            answered_at = time.time()
            if not isinstance(heard[0], wire.Welcome):
                raise ValueError("no Welcome")
        except ValueError as error:
            connection.close()
            raise OSError(f"another process answers there: {error}") from error
        except OSError:
            connection.close()
            raise
        line.node = self._watch.first
        self._add(line)
        self._beat_at_s = time.monotonic() + BEAT_S
        self._tell_clock((asked_at + answered_at) / 2 - heard[0].at)
        self._take(line, heard[1:])

    # ---- while it is one ----

    @property
    def nodes(self) -> set[str]:
        """The nodes that are watched now."""
        return set(self._lines)

    @property
    def is_first(self) -> bool:
        """Whether this node tells all others what one of them says."""
        return self._is_first

    @property
    def missing(self) -> set[str]:
        """The nodes that the first one expects and that have not joined yet."""
        return self._expected

    def tell(self, message: wire.Message, node: str = "") -> None:
        """Say something to a node, or to all that are watched."""
        for line in [line for name, line in self._lines.items() if node in ("", name)]:
            self._say(line, message)

    def wait_s(self) -> float:
        """Until check() has something to do."""
        now_s = time.monotonic()
        silent = min((line.heard_s + SILENT_S for line in self._lines.values()), default=float("inf"))
        return max(0.0, min(self._beat_at_s, silent, *self._guests.values()) - now_s)

    def check(self) -> None:
        """Say that this node is there, and see whether the others are."""
        now_s = time.monotonic()
        slept_s = now_s - self._checked_s
        self._checked_s = now_s
        if slept_s > 2 * BEAT_S:  # this process was stopped: who said nothing meanwhile, is for the others to judge
            for line in self._lines.values():
                line.heard_s += slept_s
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + BEAT_S
            self.tell(wire.Beat(time.time(), 0.0, self._launcher_silent_s()))
        for line in list(self._lines.values()):
            if now_s >= line.heard_s + SILENT_S:
                self._lose(line, f"said nothing for {SILENT_S:g} s")
        for line in [line for line, until_s in self._guests.items() if until_s <= now_s]:
            self._drop(line)

    def leave(self) -> None:
        """This node is over."""
        self.tell(wire.Bye())
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):  # unread data would make the kernel break the connection, and eat the Bye
                while line.connection.recv(_MOST_BYTES):
                    pass
            self._drop(line)

    # ---- connections ----

    def _accept(self, listener: socket.socket) -> None:
        assert self._watch is not None
        try:
            connection, _ = listener.accept()
        except OSError:  # it hung up already
            return
        line = _Line(connection, self._watch.token, _FIRST)
        if len(self._guests) >= _MOST_GUESTS:
            self._drop(next(iter(self._guests)))
        self._guests[line] = time.monotonic() + _GUEST_S
        self._add(line)
        with contextlib.suppress(OSError):  # hear says so
            line.begin()

    def _add(self, line: _Line) -> None:
        line.connection.setblocking(False)
        line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._selector.register(line.connection, selectors.EVENT_READ, lambda _: self._hear(line))
        if line.node:
            self._lines[line.node] = line

    def _hear(self, line: _Line) -> None:
        if not self._is_open(line):
            return  # dropped since the selector spoke of it
        try:
            messages = line.hear()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(line, _why(error))
            return
        except ValueError:
            if line.node:
                self._lose(line, "its connection was tampered with")
            else:
                self._drop(line)
            return
        self._take(line, messages)

    def _take(self, line: _Line, messages: list[wire.Message]) -> None:
        line.untaken.extend(messages)
        while line.untaken and self._is_open(line):
            message = line.untaken.popleft()
            if not line.node:
                self._welcome(line, message)
            elif isinstance(message, wire.Beat):
                self._beat(line, message)
            elif isinstance(message, wire.Bye):
                self._drop(line)
                self._on_word(line.node, message)
            else:
                self._on_word(line.node, message)

    def _welcome(self, line: _Line, message: wire.Message) -> None:
        if not isinstance(message, wire.Hello) or message.node not in self._expected:
            self._drop(line)
            return
        del self._guests[line]
        self._expected.discard(message.node)
        line.node = message.node
        self._lines[line.node] = line
        self._say(line, wire.Welcome(time.time()))

    def _beat(self, line: _Line, beat: wire.Beat) -> None:
        if self._is_first:
            self._say(line, wire.Beat(time.time(), beat.at, self._launcher_silent_s()))
        elif beat.of:  # halfway between ours and this answer the first node's clock stood at its `at`
            now = time.time()
            offset_s, exact_to_s = (beat.of + now) / 2 - beat.at, (now - beat.of) / 2
            if abs(offset_s - self._clock_offset_s) > _CLOCK_STEP_S + exact_to_s:
                self._tell_clock(offset_s)
        self._on_word(line.node, beat)

    def _tell_clock(self, offset_s: float) -> None:
        self._clock_offset_s = offset_s
        self._on_clock(offset_s)

    def _say(self, line: _Line, message: wire.Message) -> None:
        try:
            line.say(message)
        except OSError as error:
            self._take(line, [])  # it may have said why before it went
            while self._is_open(line) and self._has_more(line):
                self._hear(line)
            self._lose(line, _why(error))

    def _has_more(self, line: _Line) -> bool:
        with contextlib.suppress(OSError):
            return bool(line.connection.recv(1, socket.MSG_PEEK))
        return False

    def _lose(self, line: _Line, how: str) -> None:
        silent_s = time.monotonic() - line.heard_s
        was_open = self._is_open(line)
        self._drop(line)
        if line.node and was_open:
            self._on_lost(line.node, how, silent_s)

    def _is_open(self, line: _Line) -> bool:
        return self._lines.get(line.node) is line or line in self._guests

    def _drop(self, line: _Line) -> None:
        if self._is_open(line):
            self._guests.pop(line, None)
            self._lines.pop(line.node, None)
            self._selector.unregister(line.connection)
            line.connection.close()


def listening_socket(address: str, ports: wire.Ports) -> socket.socket:
    """A socket on which the first node's agent hears the others.

    Raises:
        OSError: EADDRINUSE, when no port is free.
    """
    held = network.reserve_port(ports)  # no port that another job keeps for its rendezvous
    with held:
        return network.listen(address, held.getsockname()[1])


def _why(error: OSError) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "its connection ended"
    return (error.strerror or str(error)).lower()
