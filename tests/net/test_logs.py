"""What workers print, on its way to a person: per rank, whole, harmless, and as much of it as was asked for."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Workspace
from tests.lan import DIR, Lan, small_disk

pytestmark = pytest.mark.net

# Numbered lines, and then none before there is a file `go`.
COUNT = """
import os, time
rank = os.environ["RANK"]
for i in range(100):
    print(f"rank {rank} line {i}" + (" [/red]" if i % 10 == 0 else ""))
print("ready")
while not os.path.exists(os.environ["GO"]): time.sleep(0.05)
print("late [/red]")
print("no newline", end="")
"""


def test_as_much_of_the_logs_as_was_asked_for(workspace: Workspace) -> None:
    """While the job runs, so what is printed is there at once: nobody flushes, and no buffer of Python's is full."""
    workspace.write("count.py", COUNT)
    job = workspace.job(f"name: count\nscript: count.py\nenv: {{GO: {workspace.root / 'go'}}}\n", gpus=2)
    launch = workspace.start("launch", job)
    workspace.until(lambda: launch.poll() is not None or workspace.printed("ready") == 4, "the workers")

    def logs(*options: str) -> list[str]:
        result = workspace.dtrain("logs", *options)
        assert (result.code, result.err) == (0, ""), result.err
        return result.out.splitlines()

    assert len(logs()) == 4 * 101
    assert logs("--node", "node1", "--tail", "1") == ["[2] ready", "[3] ready"]
    assert logs("--node", "node1", "--ranks", "0,3", "--tail", "2") == ["[3] rank 3 line 99", "[3] ready"]
    assert logs("--ranks", "1", "--grep", "[/red]", "--tail", "2") == ["[1] rank 1 line 80 [/red]", "[1] rank 1 line 90 [/red]"]
    assert logs("--grep", "[.red]") == [] == logs("--tail", "0")
    assert logs("--grep", "line 42") == [f"[{rank}] rank {rank} line 42" for rank in range(4)]

    follow = workspace.start("logs", "--follow", "--node", "node0", "--tail", "1", "--grep", "[/red]")
    assert follow.stdout is not None
    first = [follow.stdout.readline() for _ in range(2)]
    (workspace.root / "go").touch()
    rest, _ = follow.communicate(timeout=60)
    assert first == ["[0] rank 0 line 90 [/red]\n", "[1] rank 1 line 90 [/red]\n"]
    assert sorted(rest.splitlines()) == ["[0] late [/red]", "[1] late [/red]"]
    assert workspace.wait(launch).code == 0
    assert logs("--ranks", "2", "--tail", "2") == ["[2] late [/red]", "[2] no newline"]

    for options, told in (
        (("--node", "node2"), "has no node node2\nhint: its nodes: node0, node1\n"),
        (("--node", "node1", "--ranks", "0"), "has none of these ranks on node1\nhint: its ranks on node1: 2-3\n"),
    ):
        result = workspace.dtrain("logs", *options)
        assert (result.code, result.out) == (66, "") and result.err.endswith(told), result.err


# The same of all ranks; then what a terminal would obey, and a line of 40 MB.
HOSTILE = """
import os, sys
print("the same [/red] of all")
print(f"only of {os.environ['RANK']}")
for hostile in (b"\\x1b]52;c;eA==\\x07A", b"\\x1b[2JB", b"\\x1b[>4;2mC", b"\\xc2\\x9b2JD", b"\\xff\\xfeE", b" 1%\\r99%F"):
    os.write(1, hostile + b"\\n")
if os.environ["RANK"] == "0":
    os.write(1, b"x" * 40_000_000 + b"\\n")
"""


def _on_a_terminal(workspace: Workspace, *args: str | Path) -> tuple[int, str]:
    """Exit code of `dtrain ARGS`, and all that it wrote there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        (sys.executable, "-m", "dtrain", *args),
        cwd=workspace.workdir, env={**workspace.env, "TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    parts = []
    with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    os.close(ours)
    return process.wait(timeout=60), b"".join(parts).decode()


def _ranks(labels: list[str]) -> list[int]:
    """Those that stand before lines: 3, or `3 ranks: 0-1,3`."""
    parts = [part.partition("-") for label in labels for part in label.rpartition(" ")[2].split(",")]
    return [rank for first, _, last in parts for rank in range(int(first), int(last or first) + 1)]


def test_a_terminal_gets_the_lines_and_nothing_else(workspace: Workspace) -> None:
    workspace.write("hostile.py", HOSTILE)
    code, shown = _on_a_terminal(workspace, "launch", workspace.job("name: hostile\nscript: hostile.py\n", gpus=2))
    assert code == 0, shown[-2000:]
    assert sorted(_ranks(re.findall(r"\[([^][]*)\] the same \[/red\] of all\r\n", shown))) == [0, 1, 2, 3]
    for rank in range(4):
        assert f"[{rank}] only of {rank}\r\n" in shown
    for hostile in ("\x1b]", "\x1b[2J", "\x1b[>", "\x9b"):
        assert hostile not in shown
    assert f"[0] {'x' * 40_000_000}\r\n" in shown
    copies = {path.name: path.read_bytes() for path in workspace.root.glob("state/dtrain/jobs/*/*/logs/rank*.log")}
    assert len(copies) == 4 and all(copy.startswith(b"the same [/red] of all\n") for copy in copies.values())
    for number in range(4):
        copy = copies[f"rank{number}.log"]
        assert b"\x1b]52;c;eA==\x07A\n\x1b[2JB\n\x1b[>4;2mC\n\xc2\x9b2JD\n\xff\xfeE\n 1%\r99%F\n" in copy
    told = workspace.dtrain("logs", "--ranks", "1")
    assert told.out.splitlines() == [
        f"[1] {line}" for line in ("the same [/red] of all", "only of 1", "A", "B", "C", "2JD", "\ufffd\ufffdE", "99%F")
    ]  # fmt: skip
    assert len(workspace.dtrain("logs", "--ranks", "0", "--tail", "1").out) == 40_000_005


def test_nothing_is_folded_where_no_person_reads(workspace: Workspace) -> None:
    workspace.write("same.py", "print('the same of all')\n")
    result = workspace.dtrain("launch", workspace.job("script: same.py\nlauncher: none\n"))
    assert (result.code, sorted(re.findall(r"\[.*the same of all", result.err))) == (0, ["[0] the same of all", "[1] the same of all"])


# Ten megabytes of numbered lines, in pieces; then it waits for a file `go`.
FLOOD = """
import os, time
for i in range(100):
    print("\\n".join(f"line {i} {k:03} " + "x" * 90 for k in range(1000)))
    time.sleep(0.02)
print("ready")
while not os.path.exists(os.environ["GO"]): time.sleep(0.05)
print("end")
"""


def test_a_full_disk_here_ends_no_job(lan: Lan, workspace: Workspace) -> None:
    """Its launch tells of it, and goes on showing it to its end; `stop` works; what is missing comes once there is room."""
    workspace.write("flood.py", FLOOD)
    job = workspace.write("job.yaml", "name: flood\nscript: flood.py\ncluster: lan.yaml\nenv: {GO: /tmp/go}\ngrace: 1\n")
    state = workspace.root / "state"
    state.mkdir()
    with small_disk(state, "1m"):
        launch = workspace.start("launch", job, log=workspace.root / "launch.txt")
        shown = (workspace.root / "launch.txt").read_text
        workspace.until(lambda: launch.poll() is not None or shown().count("ready") == 3, "the workers, seen here")
        assert shown().count("the job store cannot be written") == 1, shown()[-2000:]
        asked = workspace.dtrain("logs")
        assert asked.code == 73 and asked.err.startswith(f"error: {state}/dtrain: the job store cannot be written: "), asked.err
        attach = workspace.start("attach", log=workspace.root / "attach.txt")
        workspace.until((workspace.root / "attach.txt").read_text, "attach to follow")
        for node in lan.nodes:
            node.path("/tmp/go").touch()
        assert (launch.wait(timeout=60), attach.wait(timeout=60)) == (73, 73)
        assert re.search(r"SUCCEEDED.*\n.*the job store cannot be written.*\nwhat is missing here is on the nodes", shown()), shown()[
            -2000:
        ]
        assert shown().count("[2] line 99 999 x") == 1
        subprocess.run(("mount", "-o", "remount,size=100m", state), check=True)
        logs = workspace.dtrain("logs")
        assert (logs.code, logs.err) == (0, "")
        want = [f"line {i} {k:03} " + "x" * 90 for i in range(100) for k in range(1000)] + ["ready", "end"]
        want_of_all = "".join(f"[{rank}] {line}\n" for rank in range(3) for line in want)
        assert hashlib.sha256(logs.out.encode()).hexdigest() == hashlib.sha256(want_of_all.encode()).hexdigest()
        status = workspace.status("flood")
        assert (status["state"], status["exit_code"]) == ("SUCCEEDED", 0)
    for node in lan.nodes:
        node.path("/tmp/go").unlink()


@pytest.mark.parametrize("beside", [False, True])
def test_a_disk_here_that_has_room_again_lacks_nothing(lan: Lan, workspace: Workspace, beside: bool) -> None:
    """Who has followed the job to its end brings what was missing, and ends as if the disk had never been full."""
    workspace.write("flood.py", FLOOD)
    go = workspace.root / "go"
    job = workspace.job(f"name: flood\nscript: flood.py\nlauncher: none\nenv: {{GO: {go}}}\n", instances=1)
    state = workspace.root / "state"
    state.mkdir()
    with small_disk(state, "1m"):
        launch = workspace.start("launch", job, log=workspace.root / "launch.txt")
        shown = (workspace.root / "launch.txt").read_text
        workspace.until(lambda: "[0] ready" in shown(), "the worker, seen here")
        assert "the job store cannot be written" in shown()
        subprocess.run(("mount", "-o", "remount,size=100m", state), check=True)
        attach = workspace.start("attach", log=workspace.root / "attach.txt") if beside else None  # brings it meanwhile
        workspace.until(lambda: attach is None or "[0] ready" in (workspace.root / "attach.txt").read_text(), "attach to follow")
        go.touch()
        assert attach is None or attach.wait(timeout=60) == 0
        assert launch.wait(timeout=60) == 0, shown()[-2000:]
        assert shown().endswith("the job store can be used again, and what was missing here has come\n"), shown()[-2000:]
        (copy,) = state.glob("dtrain/jobs/*/node0/logs/rank0.log")
        (whole,) = workspace.nodes.glob("jobs/*/node0/logs/rank0.log")
        assert copy.read_bytes() == whole.read_bytes()
        assert workspace.status()["state"] == "SUCCEEDED"


@pytest.mark.parametrize("broken", ["without its tables", "not whole", "empty for a while"])
def test_a_store_that_breaks_ends_no_job(workspace: Workspace, broken: str) -> None:
    """It can be read no more: the launch says so once, shows the job to its end, and where that is cured lacks nothing."""
    launch = workspace.start("launch", workspace.waiting_job("waits"), log=workspace.root / "launch.txt")
    shown = (workspace.root / "launch.txt").read_text
    workspace.until(lambda: launch.poll() is not None or shown().count("] ready") == 2, "the workers")
    path = workspace.root / "state/dtrain/store.db"
    before = path.read_bytes()
    if broken == "without its tables":
        with contextlib.closing(sqlite3.connect(path, timeout=30.0)) as db:
            db.execute("DROP TABLE events")
    else:
        path.write_bytes(b"?" * len(before) if broken == "not whole" else b"")
    workspace.until(lambda: launch.poll() is not None or "the job store cannot be" in shown(), "the launch to notice")
    if broken == "empty for a while":
        path.write_bytes(before)
    (workspace.root / "go").touch()
    code = launch.wait(timeout=60)
    assert "Traceback" not in shown() and "SUCCEEDED" in shown(), shown()
    assert shown().count("; the job goes on, and its nodes keep what is missing here") == 1
    if broken != "not whole":  # a table that is not there is made, and the nodes fill it
        assert code == 0 and shown().endswith("and what was missing here has come\n"), shown()
        assert workspace.status()["state"] == "SUCCEEDED"
    else:
        assert code == 73 and "\nwhat is missing here is on the nodes: " in shown(), shown()
        asked = workspace.dtrain("status", "waits")
        assert asked.code == 73 and "Traceback" not in asked.err, asked.err


def test_a_full_disk_here_keeps_no_job_running(workspace: Workspace, lan: Lan) -> None:
    state = workspace.root / "state"
    state.mkdir()
    with small_disk(state, "1m"):
        launched = workspace.dtrain("launch", "--detach", workspace.waiting_job("waits"))
        assert launched.code == 0, launched.err
        job = launched.out.strip()
        _fill(state)
        stopped = workspace.dtrain("stop", job)
        assert stopped.code == 0 and "STOPPED" in stopped.err, stopped.err
        again = workspace.dtrain("launch", workspace.waiting_job("again"))
        assert again.code == 73 and "the job store cannot be written" in again.err and "Traceback" not in again.err, again.err


def test_a_log_that_takes_long_to_come_is_whole(lan: Lan, workspace: Workspace) -> None:
    """Nobody followed the job, and the log comes slowly: that is no silence of the node."""
    workspace.write("much.py", "print('x' * 1000 * 1000 * 10)\nprint('end')\n")
    job = workspace.write("job.yaml", "launcher: none\nscript: much.py\ncluster: lan.yaml\n")
    launched = workspace.dtrain("launch", "--nodes", "n1", "--detach", job)
    assert launched.code == 0, launched.err
    lan.slow(lan.nodes[0], "16mbit")
    logs = workspace.dtrain("logs", launched.out.strip())
    assert (logs.code, logs.err, len(logs.out)) == (0, "", 10_000_005 + len("[0] end\n"))


def test_the_end_of_a_long_log_comes_without_the_rest(lan: Lan, workspace: Workspace) -> None:
    """Nobody followed the job, so nothing of its logs is here, nor is after it: a copy has no gaps."""
    workspace.write(
        "flood.py", FLOOD.replace("import os, time\n", "import os, time\nwhile not os.path.exists('/tmp/begin'): time.sleep(0.05)\n")
    )
    env = "env: {GO: /tmp/go}\ngrace: 1\n"
    job = workspace.write("job.yaml", f"launcher: none\nname: flood\nscript: flood.py\ncluster: lan.yaml\n{env}")
    launched = workspace.dtrain("launch", "--nodes", "n1,n2", "--detach", job)
    assert launched.code == 0, launched.err
    n1, n2, _ = lan.nodes
    for node in (n1, n2):
        node.path("/tmp/begin").touch()
    there = [node.path(f"{DIR}/jobs/{launched.out.strip()}/{node.name}/logs/rank{rank}.log") for rank, node in enumerate((n1, n2))]
    workspace.until(lambda: all(log.read_bytes().endswith(b"ready\n") for log in there), "the logs")
    tail = workspace.dtrain("logs", "flood", "--tail", "2")
    grep = workspace.dtrain(
        "logs",
        "--cluster",
        "lan.yaml",
        "--ranks",
        "1",
        "--grep",
        "line 7 001",
        "--tail",
        "1",
        env={"XDG_STATE_HOME": str(workspace.root / "elsewhere")},
    )
    last = [f"[{rank}] {line}" for rank in range(2) for line in ("line 99 999 " + "x" * 90, "ready")]
    assert (tail.code, tail.err, tail.out.splitlines()) == (0, "", last)
    assert (grep.code, grep.err, grep.out) == (0, "", "[1] line 7 001 " + "x" * 90 + "\n")
    assert not list(workspace.root.glob("*/dtrain/jobs/*/*/logs/rank*.log"))
    with lan.cut(n2):
        part = workspace.dtrain("logs", "--tail", "1")
    assert (part.code, part.out) == (0, "[0] ready\n") and part.err.startswith("n2 was not asked: no answer within 3 s"), part
    for node in (n1, n2):
        node.path("/tmp/go").touch()
    workspace.until(lambda: workspace.dtrain("logs", "--tail", "1").out == "[0] end\n[1] end\n", "the end")
    whole = workspace.dtrain("logs")
    assert (whole.code, len(whole.out.splitlines())) == (0, 2 * (100 * 1000 + 2))
    for node in (n1, n2):
        node.path("/tmp/go").unlink()
        node.path("/tmp/begin").unlink()


def _fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 12, 1):
            while file.write(bytes(size)) == size:
                pass


def test_a_log_that_was_deleted_here_after_the_end_is_named(workspace: Workspace) -> None:
    job = workspace.job("command: echo kept\nlauncher: none\n")
    assert workspace.dtrain("launch", job).code == 0
    (copy,) = (workspace.root / "state/dtrain/jobs").glob("*/node1/logs/rank1.log")
    copy.unlink()
    logs = workspace.dtrain("logs")
    assert (logs.code, logs.out) == (0, "[0] kept\n")
    there = logs.err.removeprefix(f"{copy} is not there any more; on node1 it was ").removesuffix("\n")
    assert Path(there).read_text() == "kept\n"
