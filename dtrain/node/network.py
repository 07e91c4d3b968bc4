"""A port of this node, and the proof that other nodes reach it there.

Every node keeps one port, listens on it at each of its addresses, and others dial it. Both sides show that they know the
token of this start and mean the same node, since an address alone says nothing: each machine with Docker has a 172.17.0.1.

dialer:    nonce (16 bytes), HMAC-SHA256(token, "dial" + name of the node that it means + nonce)
listener:  HMAC-SHA256(token, "here" + its own name + nonce); to anything else it hangs up without a word
dialer:    bulk (more than the largest frame holds), for a network may let small packets through and lose larger ones
listener:  as much
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from dtrain.node.wire import DialTarget, Ports

DIAL_TIMEOUT_S = 3.0  # a lost first packet is sent again after 1 s
_LATE_S = 0.25  # for the other addresses, once every node has answered at one: a dead one would cost each start 3 s
GUEST_TIMEOUT_S = 5.0
MOST_GUESTS = 512  # connections that a listener has open; for one more the oldest makes room
_DIALS_AT_ONCE = 256  # together below the usual limit of 1024 open files
_BACKLOG = 1024

_NONCE_BYTES = 16
_MAC_BYTES = 32
_HELLO_BYTES = _NONCE_BYTES + _MAC_BYTES
_BULK_BYTES = 9216  # a jumbo frame has 9000
_BUFFER_BYTES = 65536  # what is sent fits into it, so that nothing has to be sent in parts

_NOBODYS = "127.255.255.254"  # an address of this node that nobody uses

_ANOTHER = "another machine answered"
_BROKE = "it hung up"
LOSES_LARGE = "larger packets are lost (MTU)"
NO_ROUTE = "no route"

# EINVAL: a blackhole route. EAFNOSUPPORT: a kernel without IPv6.
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT)

# Closing resets: no port is in TIME_WAIT after the proof, where it could not be kept again for a minute.
_RESET = struct.pack("ii", 1, 0)


# ---- a port -------------------------------------------------------------------------------------------------------


def reserve_port(ports: Ports) -> socket.socket:
    """A port that is free on every address of this node, kept bound without listening.

    On every address, because torch's store listens on all of them. It binds with SO_REUSEADDR, as torchrun does, which the
    kernel allows next to a bound socket that has SO_REUSEADDR and does not listen. Ours gets that only once it is bound, so
    another reserve_port gets another port; it is there for the listener of the proof, and set_free takes it away and gives it.

    Raises:
        OSError: EADDRINUSE, when none is free.
    """
    window = range(ports.first, ports.last + 1)
    unused = ((port, False) for port in window)
    left_over = ((port, True) for port in _ports_of_connections(window))
    for port, is_reuse in itertools.chain(unused, left_over):
        try:
            return _bind_everywhere(port, is_reuse)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _bind_everywhere(port: int, is_reuse: bool) -> socket.socket:
    """With is_reuse also next to connections in TIME_WAIT, but not next to another reserve_port's socket.

    That one is no less bound with SO_REUSEADDR, so it is looked for from an address where no connection has ever been.
    """
    held, wildcard = _socket_of_both_families()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as witness:
        try:
            if is_reuse:
                witness.bind((_NOBODYS, port))
                witness.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_reuse)
            held.bind((wildcard, port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        except OSError:
            held.close()
            raise
    return held


def set_free(held: socket.socket, is_free: bool) -> None:
    """Whether a program that asks for a kept port by its number, with SO_REUSEADDR, may listen on it: torchrun as well as anybody."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_free)


def _socket_of_both_families() -> tuple[socket.socket, str]:
    try:
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # a kernel without IPv6
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0"
    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
    return held, "::"


def _ports_of_connections(window: range) -> Iterator[int]:
    """Local ports of TCP connections, also of those in TIME_WAIT, which keep a port for a minute after their job.

    A port that another start keeps is in no such list: its socket neither listens nor is connected.
    """
    found: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            next(file)  # the header
            found.update(int(line.split()[1].rpartition(":")[2], 16) for line in file)
    yield from sorted(found.intersection(window))


# ---- the listener -------------------------------------------------------------------------------------------------


class _Guest:
    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.hello = b""
        self.is_known = False
        self.bulk_bytes = 0


class Listener:
    """Answers those who dial this node and know the token, in a thread of its own.

    It listens on each address by itself, never on all: what answers at an address then is what was asked for.
    """

    def __init__(
        self,
        token: str,
        node: str,
        addresses: Iterable[str],
        port: int,
        *,
        guest_timeout_s: float = GUEST_TIMEOUT_S,
        most_guests: int = MOST_GUESTS,
    ) -> None:
        self.failed: dict[str, str] = {}  # addresses that it does not listen on, and why
        self._token = token
        self._node = node
        self._guest_timeout_s = guest_timeout_s
        self._most_guests = most_guests
        self._guests: dict[socket.socket, _Guest] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        self._ended, self._end = socket.socketpair()
        self._selector.register(self._ended, selectors.EVENT_READ)
        for address in addresses:
            try:
                self._selector.register(listen(address, port), selectors.EVENT_READ, self._accept)
            except OSError as error:
                not_ours = error.errno == errno.EADDRNOTAVAIL
                self.failed[address] = "it is no address of this node" if not_ours else os.strerror(error.errno or 0)
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is self._ended:
                    self._close_all()
                    return
                key.data(key.fileobj)
            now_s = time.monotonic()
            for connection in [connection for connection, guest in self._guests.items() if guest.until_s <= now_s]:
                self._drop(connection)

    def _wait_s(self) -> Optional[float]:
        for guest in self._guests.values():
            return max(0.0, guest.until_s - time.monotonic())
        return None

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it hung up already
            return
        _set_up(connection)
        if len(self._guests) >= self._most_guests:
            self._drop(next(iter(self._guests)))
        self._guests[connection] = _Guest(time.monotonic() + self._guest_timeout_s)
        self._selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self, connection: socket.socket) -> None:
        guest = self._guests.get(connection)
        if guest is None:
            return  # dropped since the selector spoke of it
        try:
            part = connection.recv(_BULK_BYTES if guest.is_known else _HELLO_BYTES - len(guest.hello))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part or not self._answer(connection, guest, part):
            self._drop(connection)

    def _answer(self, connection: socket.socket, guest: _Guest, part: bytes) -> bool:
        """Whether it was for us. The dialer hangs up: a reset from here could overtake the answer."""
        if guest.is_known:
            guest.bulk_bytes += len(part)
            reply = bytes(_BULK_BYTES) if guest.bulk_bytes == _BULK_BYTES else b""
        else:
            guest.hello += part
            if len(guest.hello) < _HELLO_BYTES:
                return True
            nonce, mac = guest.hello[:_NONCE_BYTES], guest.hello[_NONCE_BYTES:]
            if not hmac.compare_digest(mac, _mac(self._token, b"dial", self._node, nonce)):
                return False
            guest.is_known = True
            reply = _mac(self._token, b"here", self._node, nonce)
        with contextlib.suppress(OSError):  # it hung up
            connection.send(reply)
        return guest.bulk_bytes <= _BULK_BYTES

    def _drop(self, connection: socket.socket) -> None:
        del self._guests[connection]
        self._selector.unregister(connection)
        connection.close()

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def listen(address: str, port: int) -> socket.socket:
    listener = _tcp_socket(address)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # next to the socket that keeps the port
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, True)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _tcp_socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def _set_up(connection: socket.socket) -> None:
    """One end of a proof."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def _mac(token: str, word: bytes, node: str, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), word + node.encode() + nonce, "sha256")


# ---- the dialer ---------------------------------------------------------------------------------------------------


def dial(token: str, targets: Sequence[DialTarget], timeout_s: float = DIAL_TIMEOUT_S) -> tuple[str, ...]:
    """Dial all at once. "" for each target where the right node answered, else a few words: why not.

    Once every node has answered at one of its addresses, the others have little time left.
    """
    causes: list[str] = []
    for start in range(0, len(targets), _DIALS_AT_ONCE):
        causes += _dial_at_once(token, targets[start : start + _DIALS_AT_ONCE], timeout_s)
    return tuple(causes)


class _Call:
    """A dial under way."""

    def __init__(self, index: int, hello: bytes, expected: bytes) -> None:
        self.index = index
        self.hello = hello
        self.expected = expected
        self.is_through = self.is_answered = False
        self.heard = bytearray()


def _dial_at_once(token: str, targets: Sequence[DialTarget], timeout_s: float) -> list[str]:
    causes = ["timed out"] * len(targets)
    silent = {target.node for target in targets}
    until_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        for index, target in enumerate(targets):
            try:
                connection = connections.enter_context(_tcp_socket(target.address))
                _set_up(connection)
                with contextlib.suppress(BlockingIOError):
                    connection.connect((target.address, target.port))
            except OSError as error:
                causes[index] = _why(error)
                continue
            nonce = os.urandom(_NONCE_BYTES)
            hello = nonce + _mac(token, b"dial", target.node, nonce)
            call = _Call(index, hello, expected=_mac(token, b"here", target.node, nonce))
            selector.register(connection, selectors.EVENT_WRITE, call)
        while selector.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                cause = _go_on(key.fileobj, key.data, selector)
                if key.data.is_answered:
                    causes[key.data.index] = LOSES_LARGE  # unless more comes
                if cause is not None:
                    causes[key.data.index] = cause
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    if not cause and silent:
                        silent.discard(targets[key.data.index].node)
                        until_s = until_s if silent else min(until_s, time.monotonic() + _LATE_S)
    return causes


def _go_on(connection: socket.socket, call: _Call, selector: selectors.BaseSelector) -> Optional[str]:
    """The outcome of a call, or None while there is none yet."""
    if not call.is_through:
        number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            return _why(OSError(number, os.strerror(number)))
        call.is_through = True
        selector.modify(connection, selectors.EVENT_READ, call)
        with contextlib.suppress(OSError):  # hung up on: read says so
            connection.send(call.hello)  # fits into a buffer that is empty
        return None
    wanted = _BULK_BYTES if call.is_answered else _MAC_BYTES
    try:
        part = connection.recv(wanted - len(call.heard))
    except BlockingIOError:
        return None
    except OSError:
        part = b""
    call.heard += part
    if part and len(call.heard) < wanted:
        return None
    if call.is_answered:
        return "" if part else _BROKE
    if not hmac.compare_digest(bytes(call.heard), call.expected):
        return _ANOTHER
    call.is_answered = True
    call.heard.clear()
    with contextlib.suppress(OSError):
        connection.send(bytes(_BULK_BYTES))
    return None


def _why(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    if error.errno == errno.ETIMEDOUT:
        return "timed out"
    if error.errno in _NO_ROUTE:
        return NO_ROUTE
    if error.errno == errno.ECONNRESET:
        return _ANOTHER
    return os.strerror(error.errno or 0).lower()
