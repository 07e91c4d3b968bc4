"""The tripwire between agents, on real sockets; time passes by moving the clock that it reads."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dtrain.node import wire
from dtrain.node.tripwire import BEAT_S, SILENT_S, Tripwire, listening_socket

TOKEN = "t0k3n"
ANY = wire.Ports(0, 0)
NAMES = ("n1", "n2", "n3")


class Node:
    """An agent's end, and what it was told."""

    def __init__(self, name: str, *, token: str = TOKEN, names: tuple[str, ...] = NAMES, silent_s: float = 0.0) -> None:
        self.name = name
        self.said: list[tuple[str, wire.Message]] = []
        self.lost: list[tuple[str, str]] = []
        self.clocks: list[float] = []
        self.pass_on: tuple[type[wire.Message], ...] = ()  # said again to all
        self.selector = selectors.DefaultSelector()
        watch = wire.Watch(token, name, NAMES[0], "127.0.0.1", ANY, names if name == NAMES[0] else ())
        self.tripwire = Tripwire(
            watch,
            self.selector,
            self.hear,
            lambda node, how, silent_s: self.lost.append((node, how)),
            self.clocks.append,
            lambda: silent_s,
        )

    def hear(self, node: str, message: wire.Message) -> None:
        self.said.append((node, message))
        if isinstance(message, self.pass_on):
            self.tripwire.tell(message)

    def turn(self) -> None:
        """What the agent's loop does once."""
        for key, _ in self.selector.select(0):
            key.data(key.fileobj)
        self.tripwire.check()


class Job:
    """The first node, and others that join it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.listener = listening_socket("127.0.0.1", ANY)
        self.port: int = self.listener.getsockname()[1]
        self.first = Node("n1")
        self.first.tripwire.listen(self.listener)
        self.nodes.append(self.first)

    def join(self, node: Node) -> None:
        """The first node's loop goes on meanwhile, as it does in a process of its own."""
        failed: list[OSError] = []

        def join() -> None:
            try:
                node.tripwire.join("127.0.0.1", self.port)
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=join)
        thread.start()
        while thread.is_alive():
            self.first.turn()
            thread.join(0.005)
        if failed:
            raise failed[0]
        self.nodes.append(node)

    def settle(self) -> None:
        """Until nobody has anything more to read."""
        for _ in range(20):
            for node in self.nodes:
                node.turn()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    for node in job.nodes:
        for key in list(node.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        node.selector.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the tripwire takes for the time: [0] is what has passed more than really has."""
    ahead = [0.0]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    return ahead


def test_what_one_node_says_reaches_the_first_and_from_there_any_other(job: Job) -> None:
    second, third = Node("n2"), Node("n3")
    job.join(second)
    assert [abs(ahead_s) < 0.5 for ahead_s in second.clocks] == [True]
    assert job.first.tripwire.missing == {"n3"}
    job.join(third)
    assert job.first.tripwire.missing == set() and job.first.tripwire.nodes == {"n2", "n3"}
    second.tripwire.tell(wire.Stop("failure", 1.5))
    job.settle()
    assert job.first.said == [("n2", wire.Stop("failure", 1.5))] and third.said == []
    job.first.tripwire.tell(wire.StartDaemon(("a b",)), "n3")
    job.first.tripwire.tell(wire.Finish())
    job.settle()
    assert second.said == [("n1", wire.Finish())]
    assert third.said == [("n1", wire.StartDaemon(("a b",))), ("n1", wire.Finish())]


def test_what_comes_together_with_the_welcome_is_heard(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job was stopped while this node joined. The kernel hands both over in one piece, as it may."""
    second = Node("n2")
    send = socket.socket.send
    held: list[bytes] = []

    def in_one_piece(connection: socket.socket, data: bytes) -> int:
        if b'"Welcome"' in data:
            held.append(data)
            job.first.tripwire.tell(wire.Stop("failure", 0.0), "n2")
            return len(data)
        return send(connection, b"".join([*held, data])) - sum(map(len, held))

    monkeypatch.setattr(socket.socket, "send", in_one_piece)
    job.join(second)
    assert second.said == [("n1", wire.Stop("failure", 0.0))]


def test_a_node_that_says_goodbye_is_not_lost_and_one_that_does_not_is(job: Job) -> None:
    second, third = Node("n2"), Node("n3")
    job.join(second)
    job.join(third)
    second.tripwire.leave()
    job.settle()
    assert job.first.said == [("n2", wire.Bye())] and job.first.lost == []
    for key in list(third.selector.get_map().values()):  # what the kernel does when the agent is killed
        third.selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
    job.settle()
    assert job.first.lost == [("n3", "its connection ended")]
    assert job.first.tripwire.nodes == set()


def test_silence_is_noticed_on_both_sides(job: Job, clock: list[float]) -> None:
    second = Node("n2")
    job.join(second)
    for _ in range(10):
        clock[0] += BEAT_S + 0.1
        assert second.tripwire.wait_s() == 0.0
        job.settle()  # beats are said, read and answered
    assert job.first.lost == second.lost == []
    for _ in range(5):
        clock[0] += BEAT_S + 0.1
        job.first.tripwire.check()  # and nothing is read
        second.tripwire.check()
    assert job.first.lost == [("n2", "said nothing for 15 s")]
    assert [node for node, _ in second.lost] == ["n1"]


def test_who_was_stopped_itself_blames_nobody(job: Job, clock: list[float]) -> None:
    """Like a laptop that was asleep: the others may have lost it, and say so."""
    second = Node("n2")
    job.join(second)
    clock[0] += SILENT_S + 10
    second.tripwire.tell(wire.Stop("failure", 1.0))
    job.first.tripwire.check()
    assert job.first.lost == []
    job.settle()
    assert job.first.lost == [] and ("n2", wire.Stop("failure", 1.0)) in job.first.said


def test_the_last_words_of_a_node_are_heard_although_it_is_gone(job: Job) -> None:
    """The first node says something to it before it reads, which the kernel answers with a reset."""
    second = Node("n2")
    job.join(second)
    second.tripwire.tell(wire.Stop("failure", 1.0))
    second.tripwire.leave()
    for _ in range(3):
        job.first.tripwire.tell(wire.Finish())
    job.settle()
    assert job.first.said == [("n2", wire.Stop("failure", 1.0)), ("n2", wire.Bye())] and job.first.lost == []


def test_words_that_came_in_one_piece_are_all_heard_although_it_is_gone(job: Job, clock: list[float]) -> None:
    """The beat is answered and the stop passed on, which the kernel answers with a reset, while the goodbye is still to be taken."""
    second = Node("n2")
    job.join(second)
    job.first.pass_on = (wire.Stop,)
    clock[0] += BEAT_S + 0.1
    second.tripwire.check()
    second.tripwire.tell(wire.Stop("lease-over", 1.0))
    second.tripwire.leave()
    job.settle()
    assert [type(message) for _, message in job.first.said] == [wire.Beat, wire.Stop, wire.Bye] and job.first.lost == []


def test_beats_carry_the_clock_and_the_launchers_silence(job: Job, clock: list[float]) -> None:
    second = Node("n2", silent_s=7.0)
    job.join(second)
    clock[0] += BEAT_S + 0.1
    job.settle()
    (name, beat), *_ = job.first.said
    assert name == "n2" and isinstance(beat, wire.Beat) and beat.launcher_silent_s == 7.0
    (_, answer), *_ = second.said
    assert isinstance(answer, wire.Beat) and answer.of == beat.at and answer.launcher_silent_s == 0.0


def test_a_clock_that_is_set_is_told_of_again(job: Job, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    second = Node("n2")
    job.join(second)
    wall = time.time
    for node in job.nodes:  # only n2's beats bear the new time
        clock[0] += BEAT_S + 0.1
        monkeypatch.setattr(time, "time", lambda: wall() + 180)
        second.turn()
        monkeypatch.setattr(time, "time", wall)
        job.first.turn()
        monkeypatch.setattr(time, "time", lambda: wall() + 180)
        second.turn()
        monkeypatch.setattr(time, "time", wall)
        assert node.lost == []
    assert [round(ahead_s) for ahead_s in second.clocks] == [0, 180]


def test_who_does_not_know_the_token_joins_nothing(job: Job) -> None:
    with pytest.raises(OSError, match="its connection has ended"):
        job.join(Node("n2", token="another"))
    assert job.first.tripwire.nodes == set() and job.first.lost == []
    with pytest.raises(OSError, match="its connection has ended"):  # no node of this job
        job.join(Node("n9"))
    job.join(Node("n2"))
    with pytest.raises(OSError, match="its connection has ended"):  # it is there already
        job.join(Node("n2"))
    assert job.first.tripwire.nodes == {"n2"}


def test_what_somebody_recorded_is_good_for_nothing(job: Job) -> None:
    """A node's words, said again on a new connection, are sealed with another key."""
    recorded = _Recording(job.port)
    second = Node("n2")
    job.port = recorded.port
    recorded.start()
    job.join(second)
    second.tripwire.tell(wire.Stop("stop", 0.0))
    until = time.monotonic() + 10
    while not job.first.said and time.monotonic() < until:
        job.settle()
    assert job.first.said == [("n2", wire.Stop("stop", 0.0))]
    job.first.said.clear()
    job.settle()
    replay = socket.create_connection(("127.0.0.1", recorded.target))
    replay.sendall(bytes(recorded.heard))
    job.settle()
    assert job.first.said == [] and job.first.tripwire.nodes == {"n2"}
    replay.settimeout(5)
    while replay.recv(4096):  # the nonce, then the end
        pass
    replay.close()
    recorded.close()


def test_a_changed_byte_ends_the_connection(job: Job) -> None:
    relay = _Recording(job.port)
    second = Node("n2")
    job.port = relay.port
    relay.start()
    job.join(second)
    relay.is_changing = True
    second.tripwire.tell(wire.Stop("stop", 0.0))
    until = time.monotonic() + 10
    while not job.first.lost and time.monotonic() < until:  # the relay is a thread of its own
        job.settle()
    assert job.first.lost == [("n2", "its connection was tampered with")]
    assert job.first.said == []
    relay.close()


def test_a_crowd_of_strangers_keeps_nobody_out(job: Job, clock: list[float]) -> None:
    strangers = []
    for _ in range(300):
        strangers.append(socket.create_connection(("127.0.0.1", job.port)))
        job.first.turn()
    strangers[-1].sendall(b"\xff" * 100)
    job.join(Node("n2"))
    assert job.first.tripwire.nodes == {"n2"}
    clock[0] += 6
    job.first.turn()
    job.first.turn()
    assert len(job.first.selector.get_map()) == 2  # the listener and n2
    for stranger in strangers:
        stranger.close()


def test_nobody_there_is_told_apart(job: Job) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            Node("n2").tripwire.join("127.0.0.1", unused.getsockname()[1])


class _Recording:
    """Stands between a node and the first one, and keeps what the node says."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.heard = bytearray()
        self.is_changing = False
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._closing = False

    def start(self) -> None:
        self._thread.start()

    def _relay(self) -> None:
        node, _ = self._listener.accept()
        first = socket.create_connection(("127.0.0.1", self.target))
        with node, first, selectors.DefaultSelector() as selector:
            selector.register(node, selectors.EVENT_READ, first)
            selector.register(first, selectors.EVENT_READ, node)
            while not self._closing:
                for key, _ in selector.select(0.02):
                    assert isinstance(key.fileobj, socket.socket)
                    data = bytearray(key.fileobj.recv(65536))
                    if not data:
                        return
                    if key.fileobj is node:
                        self.heard += data
                        if self.is_changing:
                            data[6] ^= 1
                    key.data.sendall(data)

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._listener.close()
