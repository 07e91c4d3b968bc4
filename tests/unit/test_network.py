"""The proof between nodes, on the real loopback: a port that is kept, listeners, dials."""

from __future__ import annotations

import errno
import hmac
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest

from dtrain.node import network
from dtrain.node.addresses import addresses
from dtrain.node.network import Listener, dial, reserve_port, set_free
from dtrain.node.wire import DialTarget, Ports

ANY = Ports(0, 0)
TOKEN = "0123abcd"


def _port(held: socket.socket) -> int:
    port: int = held.getsockname()[1]
    return port


def _bind_as_torch_does(port: int) -> socket.socket:
    """As libuv in torch's store: on every address, with SO_REUSEADDR."""
    server = socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("::" if socket.has_ipv6 else "0.0.0.0", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with reserve_port(ANY) as held:
        yield held


@pytest.fixture
def listener(held: socket.socket) -> Iterator[Listener]:
    with closing(Listener(TOKEN, "node1", ["127.0.0.1"], _port(held))) as listener:
        assert listener.failed == {}
        yield listener


# ---- addresses ----


def test_addresses_are_those_of_this_machine() -> None:
    found = addresses()
    assert [address.prefix_length for address in found if (address.interface, address.address) == ("lo", "127.0.0.1")] == [8]
    interfaces = {name for _, name in socket.if_nameindex()}
    for address in found:
        assert address.interface in interfaces and address.speed_mbit >= 0
        family = socket.AF_INET6 if ":" in address.address else socket.AF_INET
        with socket.socket(family) as one:
            one.bind((address.address, 0))  # fails for an address that is not ours
    assert not [address for address in found if address.address.startswith(("169.254.", "fe80:", "127.0.1."))]


# ---- a port ----


def test_a_kept_port_is_free_for_torch_and_for_nobody_else(held: socket.socket) -> None:
    port = _port(held)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(OSError) as none_free:
        reserve_port(Ports(port, port))
    assert none_free.value.errno == errno.EADDRINUSE
    with _bind_as_torch_does(port) as server:
        held.close()  # once torch listens
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            pass


@pytest.mark.parametrize("was_used", [False, True])
def test_a_port_that_is_not_set_free_is_nobodys(was_used: bool) -> None:
    """Not even of who asks for it as torch does, or had begun to while it was free; also where a connection is in TIME_WAIT."""
    window = _free_window(1)
    if was_used:
        _use(window.first)
    with reserve_port(window) as held, ExitStack() as stack:
        thief = stack.enter_context(socket.socket())
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", window.first))
        set_free(held, False)
        with pytest.raises(OSError, match="in use"):
            thief.listen()
        thief.close()
        with pytest.raises(OSError, match="in use"):
            _bind_as_torch_does(window.first)
        set_free(held, True)
        stack.enter_context(_bind_as_torch_does(window.first))


def test_a_port_is_kept_on_every_address() -> None:
    """torch's store listens on all of them: a port that is taken on one is of no use to it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError) as none_free:
            reserve_port(Ports(_port(other), _port(other)))
        assert none_free.value.errno == errno.EADDRINUSE


def _free_window(size: int) -> Ports:
    """Consecutive ports that nothing is left on, below those that the kernel chooses from."""
    for first in range(20000 + os.getpid() % 97 * 100, 32000, size):
        with ExitStack() as stack:
            try:
                for port in range(first, first + size):
                    stack.enter_context(socket.socket(socket.AF_INET6)).bind(("::", port))
            except OSError:
                continue
            return Ports(first, first + size - 1)
    raise AssertionError("no free ports")


def test_a_window_is_used_up_port_by_port() -> None:
    window = _free_window(3)
    with ExitStack() as stack:
        kept = [_port(stack.enter_context(reserve_port(window))) for _ in range(3)]
        assert kept == list(range(window.first, window.last + 1))
        with pytest.raises(OSError) as none_free:
            reserve_port(window)
        assert none_free.value.errno == errno.EADDRINUSE
    with reserve_port(window) as again:
        assert _port(again) == window.first


def test_a_port_of_a_job_that_has_just_ended_is_kept_again() -> None:
    """The store's end closes first when torchrun is killed, so the port is in TIME_WAIT for a minute."""
    window = _free_window(1)
    _use(window.first)
    with reserve_port(window) as held, _bind_as_torch_does(window.first):
        assert _port(held) == window.first
    with reserve_port(window), pytest.raises(OSError, match="Address already in use"):
        reserve_port(window)  # another start on the same machine


def _use(port: int) -> None:
    """A connection in TIME_WAIT is left of it."""
    with _bind_as_torch_does(port) as server:
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
        assert client.recv(1) == b""
        client.close()


# ---- the proof ----


def test_the_right_node_answers(held: socket.socket, listener: Listener) -> None:
    target = DialTarget("node1", "127.0.0.1", _port(held))
    began_s = time.monotonic()
    assert dial(TOKEN, [target] * 600) == ("",) * 600
    assert time.monotonic() - began_s < network.DIAL_TIMEOUT_S  # it is over when all have answered


def test_a_proof_leaves_the_port_to_torch(held: socket.socket, listener: Listener) -> None:
    port = _port(held)
    assert dial(TOKEN, [DialTarget("node1", "127.0.0.1", port)]) == ("",)
    listener.close()
    with _bind_as_torch_does(port):
        pass
    held.close()
    with reserve_port(Ports(port, port)), socket.socket() as strict, pytest.raises(OSError):
        strict.bind(("127.0.0.1", port))
    with socket.socket() as strict:  # nothing in TIME_WAIT either
        strict.bind(("127.0.0.1", port))


def test_ipv6(held: socket.socket) -> None:
    """Beside IPv4, where the machine has it; where it has not, that is said and harms nothing."""
    here = "::1" in {address.address for address in addresses()}
    port = _port(held)
    with closing(Listener(TOKEN, "node1", ["::1", "127.0.0.1"], port)) as listener:
        assert (listener.failed == {}) == here and "127.0.0.1" not in listener.failed
        v6, v4 = dial(TOKEN, [DialTarget("node1", "::1", port), DialTarget("node1", "127.0.0.1", port)])
        assert ((v6 == "") == here, v4) == (True, "")


def test_it_listens_on_the_given_address_alone(held: socket.socket, listener: Listener) -> None:
    assert dial(TOKEN, [DialTarget("node1", "127.0.0.2", _port(held))]) == ("refused",)


@pytest.mark.parametrize(("token", "node"), [("0123abce", "node1"), (TOKEN, "node2"), (TOKEN, "node"), ("", "")])
def test_who_means_another_start_or_node_gets_no_answer(held: socket.socket, listener: Listener, token: str, node: str) -> None:
    assert dial(token, [DialTarget(node, "127.0.0.1", _port(held))]) == ("another machine answered",)


def test_all_are_dialled_at_once_and_each_has_its_cause(held: socket.socket, listener: Listener) -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed = stack.enter_context(reserve_port(ANY))
        targets = [
            DialTarget("node1", "127.0.0.1", _port(silent)),
            DialTarget("node1", "127.0.0.1", _port(closed)),
            DialTarget("node1", "255.255.255.255", 1),
            DialTarget("node1", "127.0.0.1", _port(held)),
        ]
        began_s = time.monotonic()
        causes = dial(TOKEN, [*targets, targets[0]], timeout_s=0.3)
        assert time.monotonic() - began_s < 2.0  # one deadline for all, not one each
    assert causes == ("timed out", "refused", "no route", "", "timed out")


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.2p1\r\n" * 4, bytes(32), bytes(31)])
def test_another_server_is_no_node(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        causes = pool.submit(dial, TOKEN, [DialTarget("node1", "127.0.0.1", _port(server))])
        with server.accept()[0] as connection:
            connection.sendall(said)
            with suppress(OSError):  # the dialer hangs up on too much
                connection.shutdown(socket.SHUT_WR)
            assert causes.result() == ("another machine answered",)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: node1\r\nUser-Agent: scanner\r\n\r\n", bytes(48), os.urandom(500)])
def test_garbage_gets_no_answer(held: socket.socket, listener: Listener, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", _port(held)), timeout=10) as stranger:
        stranger.sendall(said)
        with pytest.raises(ConnectionResetError):
            stranger.recv(1)
    assert dial(TOKEN, [DialTarget("node1", "127.0.0.1", _port(held))]) == ("",)


@pytest.mark.parametrize(
    ("num_bytes", "is_there", "cause"),
    [(0, True, "larger packets are lost (MTU)"), (1400, True, "larger packets are lost (MTU)"), (1400, False, "it hung up")],
)
def test_a_path_on_which_only_the_first_words_come_through(num_bytes: int, is_there: bool, cause: str) -> None:
    """The right node answers in few bytes; of what has more nothing or a part arrives, or it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        causes = pool.submit(dial, TOKEN, [DialTarget("node1", "127.0.0.1", _port(server))], 0.5)
        with server.accept()[0] as connection:
            nonce = connection.recv(48, socket.MSG_WAITALL)[:16]
            connection.sendall(hmac.digest(TOKEN.encode(), b"herenode1" + nonce, "sha256") + bytes(num_bytes))
            if not is_there:
                connection.shutdown(socket.SHUT_WR)
            assert causes.result() == (cause,)


def test_strangers_that_stay_silent_do_not_keep_others_out(held: socket.socket) -> None:
    with closing(Listener(TOKEN, "node1", ["127.0.0.1"], _port(held), most_guests=20)), ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", _port(held)), timeout=10)) for _ in range(50)]
        assert dial(TOKEN, [DialTarget("node1", "127.0.0.1", _port(held))]) == ("",)
        with pytest.raises(ConnectionResetError):
            strangers[0].recv(1)  # the oldest made room


def test_a_silent_stranger_is_hung_up_on(held: socket.socket) -> None:
    with (
        closing(Listener(TOKEN, "node1", ["127.0.0.1"], _port(held), guest_timeout_s=0.1)),
        socket.create_connection(("127.0.0.1", _port(held)), timeout=10) as stranger,
        pytest.raises(ConnectionResetError),
    ):
        stranger.recv(1)


def test_an_address_that_is_not_ours(held: socket.socket) -> None:
    with closing(Listener(TOKEN, "node1", ["192.0.2.77", "127.0.0.1"], _port(held))) as listener:
        assert listener.failed == {"192.0.2.77": "it is no address of this node"}
        assert dial(TOKEN, [DialTarget("node1", "127.0.0.1", _port(held))]) == ("",)


def test_after_close_nobody_listens(held: socket.socket) -> None:
    with closing(Listener(TOKEN, "node1", ["127.0.0.1"], _port(held))) as listener:
        stranger = socket.create_connection(("127.0.0.1", _port(held)), timeout=10)
        assert dial(TOKEN, [DialTarget("node1", "127.0.0.1", _port(held))]) == ("",)
        listener.close()
        with stranger, pytest.raises(ConnectionResetError):
            stranger.recv(1)
        assert dial(TOKEN, [DialTarget("node1", "127.0.0.1", _port(held))]) == ("refused",)
