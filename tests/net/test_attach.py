"""`dtrain attach`: a job is followed from another shell, after its launch or beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net

# Prints lines in two parts until there is a file `go` in the root, none while there is one `pause`, and then what an end looks like.
COUNT = """
import os, sys, time
root, i = os.environ["ROOT"], 0
while not os.path.exists(f"{root}/go"):
    if os.path.exists(f"{root}/pause"):
        time.sleep(0.02)
        continue
    for part in (f"line {i} ", "\\n"):
        sys.stdout.write(part)
        sys.stdout.flush()
        time.sleep(0.005)
    i += 1
sys.stdout.write("no newline")
sys.exit(int(os.environ["CODE"]))
"""


def counting_job(workspace: Workspace, *, code: int = 0, instances: int = 2) -> Path:
    workspace.write("count.py", COUNT)
    env = f"env: {{ROOT: {workspace.root}, CODE: '{code}'}}\n"
    return workspace.job(f"name: counts\nlauncher: none\nscript: count.py\n{env}", instances=instances)


class Shell:
    """A command beside the test, and what it has said so far."""

    def __init__(self, workspace: Workspace, number: int, *args: str | Path) -> None:
        self._workspace = workspace
        self._log = workspace.root / f"shell{number}.log"
        self.process: subprocess.Popen[str] = workspace.start(*args, log=self._log)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def lines(self, rank: int) -> list[str]:
        return [line for line in self.said().splitlines() if line.startswith(f"[{rank}] ")]

    def shows_more(self) -> None:
        """Wait until lines have come that were not there when this was called."""
        before = [len(self.lines(rank)) for rank in range(2)]
        self._workspace.until(lambda: all(len(self.lines(rank)) > before[rank] + 5 for rank in range(2)), f"lines: {self.said()[-2000:]}")

    def ended(self) -> int:
        self.process.wait(60)
        return self.process.returncode


def logs(root: Path) -> dict[str, bytes]:
    """By node and name, below a job's folder."""
    return {f"{path.parents[1].name}/{path.name}": path.read_bytes() for path in root.glob("*/logs/rank*.log")}


def is_all_here(workspace: Workspace) -> bool:
    """Whether all that the workers have printed is in the copies, and shown: nothing is on its way."""
    return logs(next(workspace.nodes.glob("jobs/*"))) == logs(next(workspace.root.glob("state/dtrain/jobs/*")))


def test_each_line_is_shown_once_from_a_killed_launch_to_the_end(workspace: Workspace) -> None:
    """The launch is killed, one attach is left by Ctrl-C, `status` is asked in between, and the next attach sees the end."""
    launch = Shell(workspace, 0, "launch", counting_job(workspace, code=3))
    launch.shows_more()
    (workspace.root / "pause").touch()  # a line that is stored and not yet shown would be lost with the launcher
    workspace.until(lambda: is_all_here(workspace), "the launch to show all")
    shown = launch.said()
    workspace.until(lambda: launch.said() == shown, "the launch to say nothing more")
    launch.process.kill()
    launch.process.wait()
    (workspace.root / "pause").unlink()
    job = workspace.status()
    assert (job["state"], job["name"]) == ("RUNNING", "counts")
    first = Shell(workspace, 1, "attach")
    first.shows_more()
    first.process.send_signal(signal.SIGINT)
    assert first.ended() == 130, first.said()
    assert f"left job counts {job['job']}, which goes on" in first.said()
    assert workspace.status()["state"] == "RUNNING"
    second = Shell(workspace, 2, "attach", "counts")
    second.shows_more()
    (workspace.root / "go").touch()
    assert second.ended() == 3, second.said()
    assert "failed with exit code 3" in second.said()
    copies = logs(workspace.root / f"state/dtrain/jobs/{job['job']}")
    assert copies == logs(workspace.nodes / f"jobs/{job['job']}") and len(copies) == 2
    for rank in range(2):
        wanted = [f"[{rank}] {line}" for line in copies[f"node{rank}/rank{rank}.log"].decode().splitlines()]
        assert [*launch.lines(rank), *first.lines(rank), *second.lines(rank)] == wanted
    after = workspace.dtrain("attach", job["job"])
    assert after.code == 3 and "failed with exit code 3" in after.err and "[0] line 0" not in after.err
    assert workspace.dtrain("attach", "nothing").code == 66


def test_two_attach_beside_a_launch_that_is_killed(workspace: Workspace) -> None:
    """All of them write the same bytes to the same places, so none waits for another, and none is missed."""
    launch = Shell(workspace, 0, "launch", counting_job(workspace))
    launch.shows_more()
    beside = [Shell(workspace, number, "attach") for number in (1, 2)]
    for shell in (launch, *beside):
        shell.shows_more()
    launch.process.kill()
    for shell in beside:
        shell.shows_more()
    (workspace.root / "go").touch()
    for shell in beside:
        assert shell.ended() == 0, shell.said()
        assert "SUCCEEDED" in shell.said()
    copies = logs(next(workspace.root.glob("state/dtrain/jobs/*")))
    assert copies == logs(next(workspace.nodes.glob("jobs/*"))) and len(copies) == 2
    for shell in beside:
        for rank in range(2):
            whole = [f"[{rank}] {line}" for line in copies[f"node{rank}/rank{rank}.log"].decode().splitlines()]
            shown = shell.lines(rank)
            assert shown == whole[len(whole) - len(shown) :]


def test_a_copy_of_a_log_that_is_deleted_comes_again(workspace: Workspace) -> None:
    """Whole, and nobody is shown a line twice."""
    launch = Shell(workspace, 0, "launch", counting_job(workspace))
    launch.shows_more()
    attach = Shell(workspace, 1, "attach")
    attach.shows_more()
    (folder,) = workspace.root.glob("state/dtrain/jobs/*")
    (folder / "node0/logs/rank0.log").unlink()
    for shell in (launch, attach):
        shell.shows_more()
    (workspace.root / "go").touch()
    for shell in (launch, attach):
        assert shell.ended() == 0, shell.said()
        assert "node0: logs/rank0.log came from byte " in shell.said() and "node0: connected again" in shell.said()
    copies = logs(folder)
    assert copies == logs(next(workspace.nodes.glob("jobs/*"))) and len(copies) == 2
    for rank in range(2):
        whole = [f"[{rank}] {line}" for line in copies[f"node{rank}/rank{rank}.log"].decode().splitlines()]
        assert launch.lines(rank) == whole
        assert attach.lines(rank) == whole[len(whole) - len(attach.lines(rank)) :]


def test_copies_that_are_deleted_together_come_again_together(workspace: Workspace) -> None:
    """Each for itself would cut the node off again and again, and a short lease with it."""
    text = counting_job(workspace).read_text().replace("launcher: none", "launcher: torchrun").replace("instances: 2", "instances: 1")
    job = workspace.write("job.yaml", text.replace("gpus_per_instance: 1", "gpus_per_instance: 2"))
    launch = Shell(workspace, 0, "launch", job)
    launch.shows_more()
    (folder,) = workspace.root.glob("state/dtrain/jobs/*")
    (folder / "node0").rename(workspace.root / "gone")  # at one instant
    launch.shows_more()
    (workspace.root / "go").touch()
    assert launch.ended() == 0, launch.said()
    assert launch.said().count(" came from byte ") == 1
    assert logs(folder) == logs(next(workspace.nodes.glob("jobs/*"))) and len(logs(folder)) == 2


def test_who_attaches_does_not_renew_the_lease(workspace: Workspace) -> None:
    launch = Shell(workspace, 0, "launch", counting_job(workspace), "--lease", "3")
    launch.shows_more()
    attach = Shell(workspace, 1, "attach")
    attach.shows_more()
    launch.process.kill()
    assert attach.ended() == 143, attach.said()
    assert "node0: stopping its workers (lease-over)" in attach.said() and "STOPPED" in attach.said()


def test_the_end_of_a_job_that_could_not_be_started(workspace: Workspace) -> None:
    job = workspace.job("name: unready\nlauncher: none\ncommand: 'true'\nsetup: echo no disk here; exit 3\n", instances=1)
    assert workspace.dtrain("launch", job).code == 78
    attach = workspace.dtrain("attach", "unready")
    assert (attach.code, attach.out) == (78, "")
    assert "it was not started: node0: setup failed with exit code 3" in attach.err and "no disk here" in attach.err


def test_who_attaches_while_the_job_is_set_up_sees_all_of_its_lines(workspace: Workspace) -> None:
    job = counting_job(workspace)
    job.write_text(job.read_text() + f"setup: echo sets up; while [ ! -e {workspace.root}/set-up ]; do sleep 0.05; done\n")
    launch = Shell(workspace, 0, "launch", job)
    workspace.until(lambda: launch.said().count("setup] sets up") == 1, "the setup")  # of one node at a time, as both are this machine
    attach = Shell(workspace, 1, "attach")
    workspace.until(lambda: "attached to" in attach.said(), "the attach")
    (workspace.root / "set-up").touch()
    attach.shows_more()
    (workspace.root / "go").touch()
    for shell in (launch, attach):
        assert shell.ended() == 0, shell.said()
        assert shell.lines(0)[:2] == ["[0] line 0 ", "[0] line 1 "] and shell.lines(0)[-1] == "[0] no newline"


def test_who_attaches_first_to_a_detached_job_sees_all_of_it(workspace: Workspace) -> None:
    """Its launch has shown no line, so it has taken none, even while the second node's worker was still to come."""
    python = workspace.root / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *" worker "*"/node1 none") sleep 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    launched = workspace.dtrain("launch", counting_job(workspace), "--detach", "--set", f"cluster.python={python}")
    assert launched.code == 0 and "] line" not in launched.err, launched.err
    attach = Shell(workspace, 0, "attach")
    attach.shows_more()
    (workspace.root / "go").touch()
    assert attach.ended() == 0
    for rank in range(2):
        *lines, last = attach.lines(rank)
        assert lines == [f"[{rank}] line {i} " for i in range(len(lines))] and last == f"[{rank}] no newline"


@pytest.mark.parametrize("killed", ["launcher", "agents too"])
def test_a_job_whose_start_was_killed(workspace: Workspace, killed: str) -> None:
    """Before any node was told to run it: whoever looks, then or later, sees its end, and why."""
    code, cause = {
        "launcher": (78, "its launcher was gone before it was told to start"),
        "agents too": (69, "dtrain's agent and guard on it were killed"),
    }[killed]
    job = counting_job(workspace)
    job.write_text(job.read_text() + f"setup: echo sets up; touch {workspace.root}/begun; sleep 600\n")
    launch = Shell(workspace, 0, "launch", job)
    workspace.until(lambda: (workspace.root / "begun").exists(), "the setup")
    beside = Shell(workspace, 1, "attach")
    workspace.until(lambda: "attached to" in beside.said(), "the attach")
    dtrains = [pid for pid, command in workspace.leftovers().items() if " guard " in command] if killed == "agents too" else []
    for pid in (launch.process.pid, *dtrains):
        os.kill(pid, signal.SIGKILL)
    assert beside.ended() == code, beside.said()
    assert cause in beside.said(), beside.said()
    after = workspace.dtrain("attach", "counts")
    assert after.code == code and cause in after.err, after.err
    status = workspace.status()
    assert (status["state"], status["exit_code"]) == ("LOST" if dtrains else "FAILED", code)
    logs = workspace.dtrain("logs")
    assert logs.code == 0 and "setup] sets up" in logs.out, logs
    workspace.until(lambda: workspace.leftovers() == {}, "the setup to end")
