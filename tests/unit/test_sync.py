"""The working directory on its way to a node: what of it goes, what arrives, and what a node keeps."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtrain.errors import PreflightFailed, SpecError
from dtrain.link import Link
from dtrain.node import tree, wire
from dtrain.node.folder import NodeDir
from dtrain.node.prune import NUM_KEPT, prune
from dtrain.node.tree import Found, TreeEntry, Trees
from dtrain.spec import load_job
from dtrain.sync import Snapshot, check_is_sent, fetch_outputs, scan_workdir

DIGEST = "0" * 40


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def scan(work: Path) -> Snapshot:
    return scan_workdir(work, "out", work.parent / "digests")


def write(work: Path, *names: str, text: str = "x") -> None:
    for name in names:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)


def bring(trees: Trees, snapshot: Snapshot) -> list[str]:
    """What a session does with what is sent to it; returns the paths of which the content was missing."""
    if trees.manifest(snapshot.hash) is None:
        trees.put_manifest(snapshot.hash, snapshot.manifest)
    wanted = trees.missing(snapshot.entries)
    incoming = trees.receive(wanted)
    stream = b"".join((snapshot.root / entry.path).read_bytes() for entry in wanted)
    for at in range(0, len(stream), 7):
        incoming.take(stream[at : at + 7])
    assert not incoming.left_bytes
    return [entry.path for entry in wanted]


def test_a_tree_is_laid_out_as_it_was(work: Path, tmp_path: Path) -> None:
    write(work, "deep/er/run.sh", "same", "line\nfeed", os.fsdecode(b"latin-\xe9"), "caf\u00e9", "cafe\u0301", text="#!/bin/sh\n")
    (work / "deep/er/run.sh").chmod(0o755)
    (work / "large").write_bytes(os.urandom(100_000))
    (work / "nothing").touch()
    (work / "hollow").mkdir()
    (work / "closed").mkdir()
    write(work, "closed/inner")
    (work / "closed").chmod(0o555)
    for name, target in (("to-file", "deep/er/run.sh"), ("to-folder", "deep"), ("nowhere", "gone"), ("absolute", "/etc"), ("up", "../..")):
        (work / name).symlink_to(target)
    os.mkfifo(work / "pipe")  # would block whoever reads it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(work / "socket"))
    snapshot = scan(work)
    trees = Trees(str(tmp_path / "blobs"), str(tmp_path / "manifests"))
    assert len(bring(trees, snapshot)) == 3  # contents, not files
    assert bring(trees, snapshot) == []
    trees.make_tree(snapshot.entries, str(tmp_path / "copy"))
    assert scan(tmp_path / "copy").manifest == snapshot.manifest
    names = {entry.path for entry in snapshot.entries}
    assert names >= {"hollow", "nothing", "up", "caf\u00e9", "cafe\u0301", os.fsdecode(b"latin-\xe9")} and not names & {"pipe", "socket"}
    assert (tmp_path / "copy/to-folder").readlink() == Path("deep") and os.access(tmp_path / "copy/deep/er/run.sh", os.X_OK)


def test_a_later_tree_has_neither_what_was_deleted_nor_what_was_of_another_kind(work: Path, tmp_path: Path) -> None:
    write(work, "deleted", "file", "folder/inner", "kept")
    trees = Trees(str(tmp_path / "blobs"), str(tmp_path / "manifests"))
    bring(trees, before := scan(work))
    (work / "deleted").unlink()
    (work / "file").unlink()
    (work / "folder/inner").unlink()
    (work / "folder").rmdir()
    write(work, "file/inner", "folder", text="y")
    now = scan(work)
    assert len(bring(trees, now)) == 1  # the same content needs no second
    for name, snapshot in (("before", before), ("now", now)):
        trees.make_tree(snapshot.entries, str(tmp_path / name))
        assert scan(tmp_path / name).manifest == snapshot.manifest


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "..", "folder/..", "folder/../../x", "", "folder//b", "folder/", "link/x", "file/x", "no/x"]
)
def test_no_entry_leaves_the_tree(tmp_path: Path, path: str) -> None:
    entries = [
        TreeEntry("folder", 0o755, 0, "", folder=True),
        TreeEntry("link", 0o777, 0, "", link="/tmp"),
        TreeEntry("file", 0o644, 0, ""),
    ]
    trees = Trees(str(tmp_path / "blobs"), str(tmp_path / "manifests"))
    with pytest.raises(ValueError, match="not a path inside the working directory"):
        trees.make_tree([*entries, TreeEntry(path, 0o644, 0, "")], str(tmp_path / "tree"))


def test_ignore_files_work_as_in_git(work: Path) -> None:
    write(
        work,
        "a.log",
        "keep.log",
        "sub/a.log",
        "sub/deep/b.txt",
        "build/x",
        "out/result",
        ".git/config",
        "big.bin",
        "module/.git",
        "sub/out",
    )
    write(work, "models/a/weights.pt", "models/a/config", "models/b/weights.pt")
    (work / ".gitignore").write_text("*.log\n!keep.log\n/build/\nweights.*\n")
    (work / ".dtrainignore").write_text("big.*\n")
    (work / "sub/.gitignore").write_text("!a.log\ndeep/\n")
    (work / "models/b/.gitignore").write_text("!weights.pt\n")
    names = [entry.path for entry in scan(work).entries if not entry.folder]
    own = [".dtrainignore", ".gitignore"]
    assert names == [
        *own,
        "keep.log",
        "models/a/config",
        "models/b/.gitignore",
        "models/b/weights.pt",
        "sub/.gitignore",
        "sub/a.log",
        "sub/out",
    ]


@pytest.mark.filterwarnings("error")
def test_a_line_that_is_no_pattern_names_nothing_as_in_git(work: Path) -> None:
    odd = ["[z-a]", "!", "foo\\", "[[]", "[a&&b]"]
    write(work, "m", "foo", "foo\\", "[", "a.log", "keep")
    (work / ".gitignore").write_text("\n".join([*odd, "*.log"]))
    subprocess.run(("git", "init", "-q", str(work)), check=True)
    listed = subprocess.run(("git", "-C", str(work), "ls-files", "-oz", "--exclude-standard"), check=True, capture_output=True, text=True)
    names = [entry.path for entry in scan(work).entries if not entry.folder]
    assert names == sorted(listed.stdout.rstrip("\0").split("\0")) == [".gitignore", "foo", "foo\\", "keep", "m"]


def test_a_working_directory_that_is_too_large_is_refused_with_what_is_large(work: Path) -> None:
    for name, size in (("data/train/images.bin", 300_000_000), ("run.pt", 250_000_000), ("data/index", 1_000_000), ("train.py", 1_000)):
        write(work, name)
        os.truncate(work / name, size)
    with pytest.raises(PreflightFailed) as refused:
        scan(work)
    assert "551 MB or more, where at most 500 MB are sent" in refused.value.message
    assert "largest: data/train/images.bin 300 MB, run.pt 250 MB, train.py 0 MB" in refused.value.message
    assert ".dtrainignore" in str(refused.value.hint) and "sync: false" in str(refused.value.hint)
    (work / ".dtrainignore").write_text("*.pt\n/data/train\n")
    assert {entry.path for entry in scan(work).entries} == {".dtrainignore", "data", "data/index", "train.py"}


def test_only_what_has_changed_is_read_again(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "a", "b")
    first = scan(work)
    assert not (work.parent / "digests").exists()  # they may change again within the same tick of the clock
    later_ns = time.time_ns() + 10_000_000_000
    monkeypatch.setattr("dtrain.digests.time.time_ns", lambda: later_ns)
    assert scan(work) == first
    (kept,) = (work.parent / "digests").glob("*.json")
    kept.write_text(kept.read_text().replace(first.entries[0].digest, DIGEST))
    assert [entry.digest for entry in scan(work).entries] == [DIGEST, DIGEST]  # taken from there
    times = (work / "a").stat()
    (work / "a").write_text("y")
    os.utime(work / "a", ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` and checkouts do
    assert [entry.digest == DIGEST for entry in scan(work).entries] == [False, True]
    kept.write_text('{"a": [1')
    assert scan(work).entries[1] == first.entries[1]


@pytest.mark.parametrize("closed", ["file", "folder", ".gitignore"])
def test_what_cannot_be_read_is_named(closed: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        work = Path(folder, "work")
        write(work, "folder/.gitignore", "file", ".gitignore")
        (work / closed).chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # nothing is closed to root
        try:
            with pytest.raises(PreflightFailed, match=rf"cannot be read: .*/{closed}: Permission denied"):
                scan(work)
        finally:
            os.seteuid(user)


def test_a_content_that_is_not_whole_is_not_kept(work: Path, tmp_path: Path) -> None:
    write(work, "a", text="the whole")
    trees = Trees(str(tmp_path / "blobs"), str(tmp_path / "manifests"))
    wanted = trees.missing(scan(work).entries)
    incoming = trees.receive(wanted)
    incoming.take(b"the ")
    incoming.close()
    incoming = trees.receive(wanted)
    with pytest.raises(ValueError, match="a changed while it was sent"):
        incoming.take(b"the while")
    assert not incoming.left_bytes and [*(tmp_path / "blobs").iterdir()] == []
    trees.receive(wanted).take(b"the whole")
    assert trees.missing(wanted) == []
    (blob,) = (path for path in (tmp_path / "blobs").rglob("*") if path.is_file())
    os.truncate(blob, 3)  # as a crash of the machine may leave it
    assert trees.missing(wanted) == wanted
    with pytest.raises(ValueError, match="what this node keeps of a is damaged"):
        trees.make_tree(wanted, str(tmp_path / "tree"))
    with pytest.raises(ValueError, match="not the one that was offered"):
        trees.put_manifest(DIGEST, b"[]")


# ---- what a node keeps ----


@pytest.fixture
def node(tmp_path: Path) -> NodeDir:
    return NodeDir.at(str(tmp_path / "node"))


def add_job(node: NodeDir, number: int, snapshot: Snapshot | None = None) -> Path:
    folder = node.job(f"job{number:02}", "n1")
    folder.make()
    os.close(folder.lock())
    if snapshot is not None:
        bring(node.trees(), snapshot)
        folder.use_tree(snapshot.hash)
        node.trees().make_tree(snapshot.entries, folder.tree)
    os.utime(Path(folder.path).parent, (number, number))
    return Path(folder.path)


def contents(node: NodeDir) -> set[str]:
    return {path.read_text() for path in Path(node.blobs).rglob("*") if path.is_file()}


def test_old_jobs_go_and_what_only_they_used(node: NodeDir, work: Path) -> None:
    """But none that runs, or has not yet said how it ended; and outputs never."""
    for name, text in (("shared", "shared"), ("file", "old")):
        write(work, name, text=text)
    (work / "closed").mkdir()
    write(work, "closed/inner", text="old")
    (work / "closed").chmod(0o555)
    oldest = add_job(node, 0, scan(work))
    Path(node.jobs, "no-job-of-dtrain").touch()
    write(work, "file", text="new")
    running, unsettled = add_job(node, 1, scan(work)), add_job(node, 2)
    for number in range(3, 3 + NUM_KEPT):
        add_job(node, number)
    outputs = Path(node.outputs("name", "n1"))
    outputs.mkdir(parents=True)
    Path(node.blobs, "incoming-of-one-that-was-killed").touch()
    node.job("job02", "n1").unsettle()
    lock = node.job("job01", "n1").lock()
    prune(node)
    Path(node.jobs, "no-job-of-dtrain").unlink()
    assert sorted(os.listdir(node.jobs)) == [f"job{number:02}" for number in range(1, 3 + NUM_KEPT)]
    assert not oldest.exists() and unsettled.exists()
    assert contents(node) == {"shared", "new", "old"}  # closed/inner is the newer tree's too
    os.close(lock)
    node.job("job02", "n1").settled()
    prune(node)
    assert not running.parent.exists() and len(os.listdir(node.jobs)) == NUM_KEPT and outputs.exists()
    assert contents(node) == set() and os.listdir(node.removed) == [] and os.listdir(f"{node.root}/manifests") == []


@pytest.mark.parametrize("damaged", [b"", b"[]"])
def test_a_list_of_files_that_is_damaged_is_wanted_again(node: NodeDir, work: Path, damaged: bytes) -> None:
    """As after a crash of the machine. Nothing waits for it meanwhile: what no job uses goes, and a job keeps its copies."""
    write(work, "file", text="unused")
    bring(node.trees(), scan(work))
    write(work, "file", text="used")
    snapshot = scan(work)
    job = add_job(node, 1, snapshot)
    manifest = Path(node.root, "manifests", snapshot.hash)
    manifest.write_bytes(damaged)
    prune(node)
    assert "unused" not in contents(node) and (job / "tree/file").read_text() == "used"
    assert node.trees().manifest(snapshot.hash) is None
    bring(node.trees(), snapshot)
    assert node.trees().manifest(snapshot.hash) == [*snapshot.entries] and contents(node) == {"used"}


def test_nothing_goes_while_somebody_brings_a_tree(node: NodeDir, work: Path) -> None:
    write(work, "file", text="brought")
    bring(node.trees(), scan(work))
    lock = node.lock_trees(shared=True)
    other = node.lock_trees(shared=True)
    for held in (lock, other):
        prune(node)
        assert contents(node) == {"brought"}
        os.close(held)
    prune(node)  # the job never came
    assert contents(node) == set()


def test_folders_may_lie_deeper_than_python_calls(node: NodeDir, work: Path) -> None:
    """On their way to a node, and where they are removed, however deep a worker went."""
    deep = work
    for _ in range(1100):
        deep = deep / "d"
        os.mkdir(deep)
    snapshot = scan(work)
    assert len(snapshot.entries) == 1100
    copy = Path(add_job(node, 0, snapshot), "tree")
    assert scan(copy).manifest == snapshot.manifest
    here = os.open(copy, os.O_RDONLY)
    for _ in range(3000):  # no path is as long
        os.mkdir("e", dir_fd=here)
        below = os.open("e", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    for number in range(1, 1 + NUM_KEPT):
        add_job(node, number)
    prune(node)
    assert os.listdir(node.removed) == []
    tree.remove(str(work))  # pytest does not come as deep


def test_a_removal_that_was_killed_is_ended_by_the_next(node: NodeDir, work: Path) -> None:
    write(work, "file")
    job = add_job(node, 1, scan(work))
    Path(node.removed).mkdir()
    job.parent.rename(Path(node.removed) / "job01")
    (Path(node.removed) / "job01/n1/lock").unlink()
    prune(node)
    assert os.listdir(node.removed) == [] and contents(node) == set()


# ---- fetch ----


class _Said:
    """A channel whose other end has said all beforehand, whatever it is told."""

    def __init__(self, *frames: bytes) -> None:
        self._said = io.BytesIO(b"".join(frames))

    def read(self, size: int) -> bytes:
        return self._said.read(size)

    def write(self, data: bytes) -> None: ...

    def stderr(self) -> str:
        return ""

    def close(self) -> None: ...


def fetch_from(into: Path, entries: Sequence[Found], *contents: bytes) -> tuple[int, int]:
    frames = [wire.frame(wire.FileBytes(last=True), content) for content in contents]
    return fetch_outputs(Link("n1", _Said(wire.frame(wire.OutputFiles(), tree.pack(entries)), *frames)), into, lambda sent, total: None)


def found(path: str, mode: int = 0o644, *, link: str | None = None, folder: bool = False) -> Found:
    return Found(path, mode, 0 if folder or link else 1, 1, 1, 1, link, folder)


OUTSIDE = [
    [found("../kept")],
    [found("sub", folder=True), found("sub/../../kept")],
    [found("way", link=".."), found("way/kept")],
    [found("way/kept"), found("way", link="..")],  # the link comes after the look at the file's path
    [found("way", link=".."), found("way", folder=True), found("../kept", folder=True)],
    [found("../other", link="kept")],
    [found("kept\0")],
]  # fmt: skip


@pytest.mark.parametrize("entries", OUTSIDE)
def test_no_node_writes_outside_of_where_its_outputs_go(tmp_path: Path, entries: list[Found]) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ValueError):
        fetch_from(tmp_path / "into", entries, b"x", b"x")
    assert (tmp_path / "kept").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["into", "kept"]
    assert not list((tmp_path / "into").glob(".dtrain-*"))


def test_what_is_fetched_takes_the_place_of_what_was_of_another_kind(tmp_path: Path) -> None:
    into = tmp_path / "into"
    write(into, "file-then", "link-then/inner")
    (into / "link-now").symlink_to("file-then")
    (into / "hollow").mkdir()
    entries = [found("file-then", folder=True), found("hollow", 0o4755), found("link-now"), found("newest", link="link-now")]
    assert fetch_from(into, entries, b"1", b"2") == (3, 2)
    assert (into / "file-then").is_dir() and (into / "hollow").read_text() == "1" and (into / "newest").read_text() == "2"
    assert not (into / "link-now").is_symlink() and (into / "hollow").stat().st_mode & 0o7777 == 0o755
    assert fetch_from(into, entries) == (3, 0)
    with pytest.raises(OSError, match="not empty"):  # what lies there is not the node's to delete
        fetch_from(into, [found("link-then", link="x")])


def test_a_fetch_that_breaks_off_leaves_what_is_whole(tmp_path: Path) -> None:
    into, entries = tmp_path / "into", [found("a"), found("b")]
    with pytest.raises(Exception, match="the session ended"):
        fetch_from(into, entries, b"1")
    assert os.listdir(into) == ["a"]
    (into / ".dtrain-partial-killed").touch()
    os.utime(into / ".dtrain-partial-killed", (1, 1))
    ended = subprocess.Popen("true")
    ended.wait()
    here = f".dtrain-partial-{socket.gethostname()}-"
    for name in (f"{here}{ended.pid}-x", f"{here}{os.getpid()}-x", f".dtrain-partial-elsewhere-{ended.pid}-x"):
        (into / name).touch()
    assert fetch_from(into, entries, b"2") == (2, 1)
    under_way = {f"{here}{os.getpid()}-x", f".dtrain-partial-elsewhere-{ended.pid}-x"}
    assert set(os.listdir(into)) == {"a", "b", *under_way}


@pytest.mark.parametrize(
    ("job", "ignore", "where", "cause"),
    [
        ("script: out/train.py", "", "1:9", "out is the folder of the job's outputs"),
        ("name: x\nscript: sub/train.py", "sub/.gitignore: train.*", "2:9", ".gitignore or .dtrainignore names sub/train.py"),
        ("module: pkg.train", ".gitignore: pkg/", "1:9", "pkg/train.py is not sent to the nodes: .gitignore or .dtrainignore names pkg"),
        ("trainer: {model: 'nets:net', data: digits, epochs: 1}", ".dtrainignore: nets*", "1:18", "trainer.model: nets.py is not sent"),
    ],
)
def test_what_the_job_runs_must_go_to_the_nodes(work: Path, job: str, ignore: str, where: str, cause: str) -> None:
    """Its hint is followed, and then it does."""
    write(work, "out/train.py", "sub/train.py", "pkg/__init__.py", "pkg/train.py", "nets.py")
    file, _, rule = ignore.partition(": ")
    if ignore:
        write(work, file, text=rule)
    write(work, "job.yaml", text=job)
    spec = load_job(work / "job.yaml", environ={})
    with pytest.raises(SpecError) as caught:
        check_is_sent(spec)
    (problem,) = caught.value.problems
    assert str(problem.where) == f"{work}/job.yaml:{where}" and cause in problem.message
    if ignore:
        line, _, target = str(problem.hint).removeprefix("write a line ").partition(" into ")
        Path(target).write_text(line)
        check_is_sent(spec)
        assert {"sub/train.py", "pkg/train.py", "nets.py"} & {entry.path for entry in scan(work).entries}
    (work / "link").symlink_to("sub")
    write(work, "job.yaml", text="script: link/train.py")
    check_is_sent(load_job(work / "job.yaml", environ={}))
