"""What the node side does with files: frames, events, streams by offset."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.bundle import bundle
from dtrain.node import wire
from dtrain.node.folder import JobFolder, read_plain
from dtrain.node.follow import Follower


def _reader(data: bytes) -> Callable[[int], bytes]:
    file = io.BytesIO(data)
    return lambda size: file.read(min(size, 3))


def test_what_a_login_shell_left_behind_prints_between_frames() -> None:
    """It is passed over; within a frame it is noticed, and too much of it is no session."""
    first, second = wire.frame(wire.Done(), b"x" * 100), wire.frame(wire.Commit())
    read = _reader(b"You have mail\0d\n" + first + b"news\0dt" + second)
    assert wire.read_frame(read) == (wire.Done(), b"x" * 100)
    assert wire.read_frame(read) == (wire.Commit(), b"")
    assert wire.read_frame(read) is None
    with pytest.raises(ValueError, match="something else was written into a frame"):
        wire.read_frame(_reader(first[:60] + b"news" + first[60:]))
    with pytest.raises(ValueError, match="no frame of dtrain's"):
        wire.read_frame(_reader(b"y\n" * 100_000 + first))


def test_a_message_survives_its_way() -> None:
    order = wire.Prepare(
        ("a b", ""),
        {"K": "v\n"},
        ("ünï",),
        {},
        {"S": "x"},
        2,
        (0, 3),
        "t4ee",
        None,
        "out",
        1.5,
        None,
        wire.MpiNode("/orted", 1, 2, "10.0.0.1", 60.0, {"10.0.0.1": "n1"}),
        wire.Watch("t0k3n", "n1", "n1", "10.0.0.1", wire.Ports(0, 0), ("n1", "n2")),
    )
    sent = bytearray(wire.frame(order, b"payload") + wire.frame(wire.Done()))

    def read(size: int) -> bytes:
        part = bytes(sent[: min(size, 3)])
        del sent[: len(part)]
        return part

    assert wire.read_frame(read) == (order, b"payload")
    assert wire.read_frame(read) == (wire.Done(), b"")
    assert wire.read_frame(read) is None
    with pytest.raises(ValueError, match="not a dtrain message"):
        wire.from_json('{"type": "Nothing"}')


@pytest.mark.parametrize("name", ["logs/../../../.bashrc", "/etc/passwd", "logs/", "logs/rank0.log/x", "plan.json", "logs/rank0.log\n"])
def test_what_a_node_sends_becomes_no_other_file_than_a_log(name: str) -> None:
    with pytest.raises(ValueError, match="no stream of a job"):
        wire.from_json(wire.to_json(wire.StreamBytes(name, 0)))
    for good in (wire.rank_log(12), wire.SETUP_LOG, wire.LAUNCHER_LOG, wire.EVENTS, wire.METRICS):
        assert wire.from_json(wire.to_json(wire.StreamBytes(good, 0))) == wire.StreamBytes(good, 0)


@pytest.mark.parametrize(
    "damaged",
    [
        '{"type": "LeaseLifted", "at": "now"}',
        '{"type": "LeaseLifted", "at": null}',
        '{"type": "LeaseLifted", "at": true}',
        '{"type": "LeaseLifted", "at": NaN}',
        '{"type": "LauncherStarted", "at": 1.0, "pid": 1.5}',
        '{"type": "LauncherStarted", "at": 1.0, "pid": 18446744073709551616}',
        '{"type": "WorkerEnded", "at": 1, "rank": 0, "local_rank": 0, "exit_code": "1", "signal": null, "traceback": "", "symptom": false}',
        '{"type": "NodeEnded", "at": 1.0, "outcome": "zzz", "reason": "", "detail": "", "survivors": []}',
        '{"type": "NodeEnded", "at": 1.0, "outcome": "lost", "reason": "", "detail": "", "survivors": [7]}',
        '{"type": "Follow", "offsets": {"events.jsonl": "0"}, "once": true}',
        '{"type": ["LeaseLifted"], "at": 1.0}',
        '{"type": "LeaseLifted", "at": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_what_has_values_of_other_types_is_no_message(damaged: str) -> None:
    with pytest.raises(ValueError, match="not a dtrain message"):
        wire.from_json(damaged)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    for path in (tmp_path / "fifo", tmp_path / "large", tmp_path):
        with pytest.raises(OSError) as raised:
            read_plain(str(path))
        assert raised.value.filename == str(path)


def test_an_event_that_was_torn_spoils_no_other(tmp_path: Path) -> None:
    """As on a disk that was full for a moment."""
    folder = JobFolder(str(tmp_path))
    first, second = wire.NodeStopping(1.0, "stop"), wire.PeerLost(2.0, "n2", "its connection ended", 0.5)
    folder.append_event(first)
    with open(folder.stream(wire.EVENTS), "a") as file:
        file.write(wire.to_json(second)[:20])
    folder.append_event(second)
    lines = (tmp_path / wire.EVENTS).read_text().splitlines()
    assert [wire.from_json(lines[0]), wire.from_json(lines[2])] == [first, second] and len(lines) == 3


def test_streams_are_followed_by_offset_and_the_end_comes_last(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    folder.make()
    log = tmp_path / wire.rank_log(0)
    log.write_bytes(b"x" * (3 * wire.CHUNK_BYTES))
    folder.append_event(wire.LauncherStarted(1.0, 1))
    sent: list[tuple[str, int, int]] = []

    def send(message: wire.Message, payload: bytes) -> None:
        assert isinstance(message, wire.StreamBytes)
        sent.append((message.stream, message.offset, len(payload)))

    follower = Follower(folder, {wire.rank_log(0): 5}, send, logs=True)
    assert follower.send_new()
    assert not follower.send_new()
    with log.open("ab") as file:
        file.write(b"the end")
    folder.append_event(wire.NodeEnded(2.0, "succeeded", "", "", ()))
    assert follower.send_new()
    assert sent[-1][0] == wire.EVENTS and sent[-2] == (wire.rank_log(0), 3 * wire.CHUNK_BYTES, 7)
    at = 5
    for stream, offset, size in sent:
        if stream == wire.rank_log(0):
            assert offset == at
            at += size
    assert at == 3 * wire.CHUNK_BYTES + 7


def test_who_wants_no_logs_gets_them_with_the_end_alone(tmp_path: Path) -> None:
    """Whoever has read that a node ended has all of its logs."""
    folder = JobFolder(str(tmp_path))
    folder.make()
    (tmp_path / wire.rank_log(0)).write_bytes(b"long")
    folder.append_event(wire.LauncherStarted(1.0, 1))
    sent: list[tuple[wire.Message, bytes]] = []
    follower = Follower(folder, {}, lambda message, payload: sent.append((message, payload)), logs=False)
    assert follower.send_new() and not follower.send_new()
    assert [message for message, _ in sent] == [wire.StreamBytes(wire.EVENTS, 0)]
    folder.append_event(wire.NodeEnded(2.0, "succeeded", "", "", ()))
    assert follower.send_new()
    assert sent[1] == (wire.StreamBytes(wire.rank_log(0), 0), b"long") and b"NodeEnded" in sent[2][1]


def test_the_bundle_is_the_same_bytes_every_time() -> None:
    first = bundle()
    bundle.cache_clear()
    assert bundle() == first


def test_who_asks_once_hears_an_end_while_a_worker_prints_without_one(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    folder.make()
    log = tmp_path / wire.rank_log(0)
    log.write_bytes(b"x" * 1_000_000)
    sent = []

    def send(message: wire.Message, payload: bytes) -> None:
        sent.append(payload)
        with log.open("ab") as file:
            file.write(b"y" * 2 * wire.CHUNK_BYTES)

    Follower(folder, {wire.rank_log(0): 5}, send, logs=True).send_all()
    assert b"".join(sent) == b"x" * 999_995
