"""The working directory through a session with a node, and what comes home."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtrain.errors import NoSpace, PreflightFailed
from dtrain.link import Link, Target
from dtrain.node import wire
from dtrain.spec import Instance
from dtrain.sync import Snapshot, fetch_outputs, scan_workdir, send_tree
from tests.cluster import Workspace
from tests.lan import why_not
from tests.ssh import Sshd

pytestmark = pytest.mark.net


@contextmanager
def session(workspace: Workspace, job: str = "j0b") -> Iterator[Link]:
    link = Link.open(Target(Instance("node0", host=None), str(workspace.nodes), job, "named"))
    try:
        yield link
    finally:
        link.close()


def scan(workspace: Workspace) -> Snapshot:
    return scan_workdir(workspace.workdir, "out", workspace.root / "digests")


def send(link: Link, snapshot: Snapshot) -> int:
    """Returns the bytes that were sent."""
    sent = [0]
    send_tree(link, snapshot, lambda now, total: sent.append(now))
    return sent[-1]


def test_only_what_a_node_lacks_is_sent(workspace: Workspace) -> None:
    workspace.write("large", "x" * 1_000_000)
    workspace.write("same", "x" * 1_000_000)
    workspace.write("nothing", "")
    first = scan(workspace)
    with session(workspace) as link:
        assert send(link, first) == 1_000_000
    with session(workspace) as link:
        assert link.ask(wire.OfferTree(first.hash)) == wire.WantFiles(manifest=False, digests=())  # one question, and nothing is sent
        workspace.write("folder/new", "new")
        assert send(link, scan(workspace)) == 3


def test_what_a_node_has_lost_of_dtrain_itself_is_sent_again(workspace: Workspace) -> None:
    job = workspace.job("launcher: none\ncommand: 'true'\n")
    assert workspace.dtrain("launch", job).code == 0
    (bundle,) = workspace.nodes.glob("bundles/*")
    before = {path: path.read_bytes() for path in bundle.rglob("*.py")}
    (bundle / "dtrain/node/network.py").unlink()
    os.truncate(bundle / "dtrain/node/agent.py", 0)  # which no session needs before the job starts
    result = workspace.dtrain("launch", job)
    assert result.code == 0, result.err
    assert {path: path.read_bytes() for path in bundle.rglob("*.py")} == before and [*bundle.parent.iterdir()] == [bundle]


def test_a_connection_that_ends_in_the_midst_keeps_what_is_whole(workspace: Workspace) -> None:
    workspace.write("a", "a" * 100_000)
    workspace.write("b", "b" * 1_000_000)
    snapshot = scan(workspace)
    with session(workspace) as link:
        link.ask(wire.OfferTree(snapshot.hash))
        link.ask(wire.PutManifest(snapshot.hash), snapshot.manifest)
        link.tell(wire.PutBytes(), b"a" * 100_000 + b"b" * 10)
    assert not list(workspace.nodes.glob("blobs/incoming-*"))
    with session(workspace) as link:
        assert send(link, snapshot) == 1_000_000


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "content": (lambda path: path.write_text("y" * 600_000), "node0: big changed while it was sent"),
    "shorter": (lambda path: os.truncate(path, 5), "big cannot be sent: it became shorter meanwhile"),
    "gone": (lambda path: path.unlink(), "big cannot be sent: No such file or directory"),
    "folder": (_replace_by_folder, "big cannot be sent: Is a directory"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_sent_is_named(workspace: Workspace, change: str) -> None:
    workspace.write("big", "x" * 600_000)
    workspace.write("later", "z" * 600_000)
    snapshot = scan(workspace)
    act, said = CHANGES[change]
    act(workspace.workdir / "big")
    with session(workspace) as link:
        with pytest.raises(PreflightFailed, match=said) as failed:
            send(link, snapshot)
        assert failed.value.hint == "name it in .dtrainignore, or launch again"
    with session(workspace) as link:
        assert "big" not in [entry.path for entry in scan(workspace).entries] or send(link, scan(workspace)) > 0


def test_a_disk_without_room_for_a_jobs_first_event_is_named(workspace: Workspace) -> None:
    """After all else has found its place; and what of the job is there goes."""
    folder = workspace.nodes / "jobs/j0b/node0"
    folder.mkdir(parents=True)
    (folder / wire.EVENTS).symlink_to("/dev/full")
    order = wire.Prepare(
        launcher_argv=("true",), launcher_env={}, worker_argv=("true",), worker_env={}, secrets={}, num_workers=1, gpus=(),
        tree=None, workdir="/", outputs="out", grace_s=0.0, lease_s=None, mpi=None, watch=None,
    )  # fmt: skip
    with session(workspace) as link, pytest.raises(NoSpace, match=f"^node0: No space left on device: {folder}\nhint: make room there"):
        link.ask(order)
    assert not folder.exists()


def test_too_large_a_workdir_is_told_before_anything_connects(workspace: Workspace) -> None:
    workspace.write("train.py", "")
    os.truncate(workspace.write("data.bin", ""), 600_000_000)
    result = workspace.dtrain("launch", workspace.job("script: train.py\n"))
    assert result.code == 78, result.err
    assert "is too large: 600 MB or more" in result.err and "largest: data.bin 600 MB" in result.err and "hint: " in result.err
    assert not workspace.nodes.exists()
    checked = workspace.dtrain("check")
    assert checked.code == 78 and "error workdir-unfit\n" in checked.out and "not fit: 1 error" in checked.out, checked.out


def test_dtrains_own_folders_in_the_workdir_do_not_go_along(workspace: Workspace) -> None:
    workspace.write("train.py", "import os\nprint('sees', sorted(os.listdir()))\n")
    (workspace.workdir / "real").mkdir()
    (workspace.workdir / "link").symlink_to("real")
    cluster = f"{{instances: 1, gpus_per_instance: 1, device: cpu, dir: {workspace.workdir}/link/nodes}}"
    job = workspace.write("job.yaml", f"launcher: none\nscript: train.py\ncluster: {cluster}\n")
    for _ in range(2):
        result = workspace.dtrain("launch", job, env={"XDG_STATE_HOME": str(workspace.workdir)})
        assert result.code == 0, result.err
        assert "sees ['job.yaml', 'link', 'out', 'real', 'train.py']" in result.out + result.err
    (tree,) = [*workspace.workdir.glob("real/nodes/jobs/*/*/tree/real")][:1]
    assert not [*tree.iterdir()]
    refused = workspace.dtrain("launch", job, "--set", f"cluster.dir={workspace.workdir}")
    assert refused.code == 78 and f"error: {workspace.workdir} is the working directory itself" in refused.err and "hint: " in refused.err


def test_a_home_that_a_node_shares_does_not_bring_dtrains_own_folders(workspace: Workspace, sshd: Sshd) -> None:
    cluster = f"{{instances: [box], gpus_per_instance: 1, device: cpu, python: {sys.executable}, dir: {workspace.workdir}/.dtrain}}"
    job = workspace.write("job.yaml", f"launcher: none\ncommand: ls -A\ncluster: {cluster}\n")
    for _ in range(2):
        assert workspace.dtrain("launch", job).code == 0
    assert workspace.dtrain("logs").out.splitlines() == ["[0] job.yaml", "[0] out"]


def test_a_workdir_that_one_node_lacks_is_named(workspace: Workspace) -> None:
    for keys, told in (
        ("workdir: /nowhere/shared\nscript: train.py\n", "the working directory /nowhere/shared is not there"),
        (f"workdir: {workspace.root}\nscript: here/train.py\n", f"the script here/train.py is not there, in {workspace.root}"),
    ):
        result = workspace.dtrain("launch", workspace.job(f"sync: false\n{keys}"))
        assert result.code == 78 and f"error: node0, node1: {told}\nhint: is workdir: the folder that all nodes share" in result.err, (
            result.err
        )
        checked = workspace.dtrain("check", "--json")
        (finding,) = [one for one in json.loads(checked.out)["findings"] if one["level"] == "error"]
        assert checked.code == 78 and (finding["name"], finding["text"]) == ("workdir-missing", f"node0, node1: {told}"), finding
    assert not list(workspace.nodes.glob("jobs/*/*"))


def test_a_launch_removes_what_is_older_than_the_newest_twenty_jobs(workspace: Workspace) -> None:
    """A job that runs stays, however old it is, with its tree."""
    job = workspace.waiting_job("waits")
    launch = workspace.start("launch", job)
    workspace.until(lambda: workspace.dtrain("logs").out.count("ready") == 2, "the workers")
    running = workspace.status()["job"]
    for number in range(25):
        (workspace.nodes / f"jobs/old{number:02}/node0/logs").mkdir(parents=True)
        os.utime(workspace.nodes / f"jobs/old{number:02}", (number, number))
    os.utime(workspace.nodes / "jobs" / running, (0, 0))
    workspace.write("wait.py", "changed")
    text = "name: quick\nlauncher: none\ncommand: echo -n x >out/kept\n"
    assert workspace.dtrain("launch", workspace.job(text, name="quick.yaml")).code == 0
    quick = workspace.status("quick")["job"]
    names = {running, quick, *(f"old{number:02}" for number in range(6, 25))}
    workspace.until(lambda: {path.name for path in (workspace.nodes / "jobs").iterdir()} == names, "the old jobs to go")
    assert "ready" in (workspace.nodes / f"jobs/{running}/node0/tree/wait.py").read_text()
    (workspace.root / "go").touch()
    assert workspace.wait(launch).code == 0
    shutil.rmtree(workspace.nodes / "jobs" / quick)  # by hand: outputs are not there
    assert workspace.dtrain("fetch", "quick", "--to", workspace.root / "home").code == 0
    assert (workspace.root / "home/node1/kept").read_text() == "x"


def test_outputs_come_home_while_the_job_goes_on_with_them(workspace: Workspace) -> None:
    kept = workspace.nodes / "outputs/named/node0"
    for name, text in (("step-1/model.pt", "1"), ("step-2/model.pt", "2"), ("log", "x")):
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        (kept / name).write_text(text)
    (kept / "newest").symlink_to("step-2")
    into = workspace.root / "home/out"
    with session(workspace) as link:
        assert fetch_outputs(link, into, lambda sent, total: None) == (4, 3)
        shutil.rmtree(kept / "step-1")
        (kept / "log").write_text("xy")
        (kept / "newest").unlink()
        (kept / "newest").mkdir()
        assert fetch_outputs(link, into, lambda sent, total: None) == (2, 1)
        link.tell(wire.GetOutputs(("step-1/model.pt", "log")))  # as if it had gone after it was listed
        assert [link.answer() for _ in range(3)] == [
            (wire.FileBytes(last=True, gone=True), b""),
            (wire.FileBytes(last=False), b"xy"),
            (wire.FileBytes(last=True), b""),
        ]
    assert (into / "newest").is_dir() and not (into / "newest").is_symlink() and (into / "log").read_text() == "xy"
    assert (into / "step-1/model.pt").read_text() == "1"  # what is here is not the node's to delete


def test_outputs_at_an_absolute_path_are_used_as_they_are(workspace: Workspace) -> None:
    """Even in the workdir of a node that is this machine: they are not sent, and not copied into themselves."""
    kept = workspace.workdir / "kept/here"
    text = f"name: keeps\nlauncher: none\noutputs: {kept}\ncommand: ls; echo -n x >>$DTRAIN_OUTPUT_DIR/$NODE_RANK\n"
    job = workspace.job(text)
    assert f"DTRAIN_OUTPUT_DIR={kept}" in workspace.dtrain("launch", job, "--dry-run").out
    for sync in ("false", "true"):
        result = workspace.dtrain("launch", job, "--set", f"sync={sync}", "--set", f"workdir={workspace.workdir}")
        assert result.code == 0, result.err
    assert (kept / "0").read_text() == (kept / "1").read_text() == "xx"
    assert {path.name for path in workspace.nodes.glob("jobs/*/*/tree/**/*")} == {"job.yaml", "kept"}
    assert not list(workspace.nodes.glob("outputs/*"))
    assert workspace.dtrain("fetch", "keeps").code == 0
    assert (workspace.workdir / "out/node1/0").read_text() == "xx"
    refused = workspace.dtrain("fetch", "keeps", "--to", kept / "back")
    assert refused.code == 78 and f"lies in the job's outputs, {kept}, and" in refused.err and not (kept / "back").exists()


def test_outputs_that_a_node_cannot_make_are_named(workspace: Workspace) -> None:
    folder = workspace.write("file", "") / "runs"
    result = workspace.dtrain("launch", workspace.job(f"launcher: none\noutputs: {folder}\ncommand: 'true'\n"))
    assert result.code == 78, result.err
    assert f"node0: the folder {folder} for outputs cannot be made or written: Not a directory" in result.err
    assert "hint: make it there, or name another one with outputs:" in result.err and not list(workspace.nodes.glob("jobs/*/*"))


def test_outputs_of_any_depth_and_name_come_home(workspace: Workspace) -> None:
    kept = os.fsencode(workspace.nodes / "outputs/named/node0")
    deep = b"/".join([b"d"] * 300)
    names = [
        b" a b ",
        b"new\nline",
        b"\xff\xe9",
        "caf\u00e9 \u2028".encode(),
        b"-rf",
        b"%s",
        b"\\",
        b"'\"$(x)",
        b"x" * 255,
        deep + b"/\xff deep",
    ]
    os.makedirs(os.path.join(kept, deep))
    for number, name in enumerate(names):
        with open(os.path.join(kept, name), "w") as file:
            file.write(str(number))
    os.mkdir(os.path.join(kept, b"\xff folder\n"))
    os.symlink(b"to \xff\n", os.path.join(kept, b"\xff link"))
    into = os.fsencode(workspace.root / "home/out")
    with session(workspace) as link:
        assert fetch_outputs(link, Path(os.fsdecode(into)), lambda sent, total: None) == (len(names) + 1, len(names))
        assert fetch_outputs(link, Path(os.fsdecode(into)), lambda sent, total: None) == (len(names) + 1, 0)
    for number, name in enumerate(names):
        with open(os.path.join(into, name)) as file:
            assert file.read() == str(number)
    assert os.path.isdir(os.path.join(into, b"\xff folder\n")) and os.readlink(os.path.join(into, b"\xff link")) == b"to \xff\n"


def test_a_fetch_brings_what_it_can_and_names_the_rest(workspace: Workspace) -> None:
    assert workspace.dtrain("launch", workspace.job("name: keeps\nlauncher: none\ncommand: echo -n x >out/kept\n")).code == 0
    into = workspace.root / "home/out"
    into.mkdir()
    (into / "node0").touch()
    result = workspace.dtrain("fetch", "keeps", "--to", into)
    assert result.code == 78 and f"\nnode1: 1 file in {into}/node1, 1 of them new\nerror: " in result.err
    assert "node0: the outputs cannot be written: " in result.err.partition("\n")[2]
    assert (into / "node1/kept").read_text() == "x"


@pytest.mark.root
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_outputs_that_do_not_fit_on_this_machine_are_no_bug(workspace: Workspace) -> None:
    job = workspace.job("name: keeps\nlauncher: none\ncommand: head -c 200000 /dev/zero >out/large\n", instances=1)
    assert workspace.dtrain("launch", job).code == 0
    into = workspace.root / "home/out"
    into.mkdir()
    on_small_disk = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs "$1" && shift && exec "$@"', "sh", into)
    fetch = (sys.executable, "-m", "dtrain", "fetch", "keeps", "--to", into)
    ran = subprocess.run((*on_small_disk, *fetch), cwd=workspace.workdir, env=workspace.env, capture_output=True, text=True, timeout=120)
    said = f"error: {into}/node0: the outputs cannot be written: No space left on device\nhint: make room there, or name another"
    assert ran.returncode == 73 and said in ran.stderr, ran.stderr


def test_ctrl_c_ends_a_fetch_and_leaves_no_half_file(workspace: Workspace) -> None:
    job = workspace.job("name: keeps\nlauncher: none\ncommand: echo x >out/small; truncate -s 20G out/vast\n", instances=1)
    assert workspace.dtrain("launch", job).code == 0
    into = workspace.root / "home/out"
    fetch = workspace.start("fetch", "keeps", "--to", into)
    workspace.until(lambda: list(into.glob("node0/.dtrain-*")), "the large file to come")
    fetch.send_signal(signal.SIGINT)
    result = workspace.wait(fetch)
    assert result.code == 130 and "Traceback" not in result.err
    assert os.listdir(into / "node0") == ["small"]
