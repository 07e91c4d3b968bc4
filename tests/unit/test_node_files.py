"""What the node side does with files: trees by content, streams by offset, tracebacks out of logs."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.bundle import bundle
from dtrain.node import tree, wire
from dtrain.node.folder import JobFolder
from dtrain.node.follow import Follower
from dtrain.sync import scan_workdir, tree_hash


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


def test_a_content_that_does_not_end_leaves_nothing(tmp_path: Path) -> None:
    blobs = tree.Blobs(str(tmp_path / "blobs"))
    assert blobs.put("0" * 64, b"the start", last=False)
    blobs.close()
    assert list((tmp_path / "blobs").iterdir()) == []


def test_a_message_survives_its_way() -> None:
    order = wire.Prepare(
        ("a b", ""),
        {"K": "v\n"},
        ("ünï",),
        {},
        {"S": "x"},
        2,
        (0, 3),
        (wire.TreeEntry("p", 0o644, 1, "d"),),
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


def test_a_tree_is_laid_out_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/run.sh").write_text("#!/bin/sh\n")
    (source / "deep/er/run.sh").chmod(0o755)
    (source / "same").write_text("#!/bin/sh\n")
    (source / "link").symlink_to("deep/er/run.sh")
    (source / "line\nfeed").write_text("")
    os.mkfifo(source / "pipe")  # would block whoever reads it
    entries = scan_workdir(source, "out")
    blobs = tree.Blobs(str(tmp_path / "blobs"))
    wanted = blobs.missing(entries)
    assert len(wanted) == 2  # contents, not files
    contents = {entry.digest: (source / entry.path).read_bytes() for entry in entries if entry.digest}
    for digest in wanted:
        assert blobs.put(digest, contents[digest], last=True)
    assert blobs.missing(entries) == ()
    blobs.make_tree(entries, str(tmp_path / "copy"))
    assert tree_hash(scan_workdir(tmp_path / "copy", "out")) == tree_hash(entries)
    assert (tmp_path / "copy/link").readlink() == Path("deep/er/run.sh")
    assert not (tmp_path / "copy/pipe").exists()
    assert not blobs.put("0" * 40, b"something else", last=True)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a//b", "link/x"])
def test_no_entry_leaves_the_tree(tmp_path: Path, path: str) -> None:
    (tmp_path / "link").symlink_to("/tmp")
    with pytest.raises(ValueError):
        tree.inside(str(tmp_path), path)


def test_ignore_files_work_as_in_git(tmp_path: Path) -> None:
    for name in ("a.log", "keep.log", "sub/a.log", "sub/deep/b.txt", "build/x", "out/result", ".git/config", "big.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n/build/\n")
    (tmp_path / ".dtrainignore").write_text("big.*\n")
    (tmp_path / "sub/.gitignore").write_text("!a.log\ndeep/\n")
    names = [entry.path for entry in scan_workdir(tmp_path, "out") if not entry.folder]
    assert names == [".dtrainignore", ".gitignore", "keep.log", "sub/.gitignore", "sub/a.log"]


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

    follower = Follower(folder, {wire.rank_log(0): 5}, send)
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


def test_the_bundle_is_the_same_bytes_every_time() -> None:
    first = bundle()
    bundle.cache_clear()
    assert bundle() == first
