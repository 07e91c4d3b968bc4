"""`kill -9` of a launcher at every point of its way: `status` tells what is true of the job, and `stop` ends what there is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster import Result, Workspace
from tests.lan import DIR, Lan, Node

pytestmark = [pytest.mark.net, pytest.mark.root]


def launch(workspace: Workspace) -> subprocess.Popen[str]:
    workspace.write("sleep.py", "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    text = "name: killed\nlauncher: none\nscript: sleep.py\ncluster: lan.yaml\ngrace: 1\n"
    return workspace.start("launch", workspace.write("job.yaml", text))


def kill(launcher: subprocess.Popen[str]) -> None:
    launcher.kill()
    launcher.communicate()


def events(node: Node) -> str:
    return "".join(path.read_text() for path in node.path(f"{DIR}/jobs").glob(f"*/{node.name}/events.jsonl"))


def node_states(workspace: Workspace) -> list[str]:
    return [node["state"] for node in workspace.status("killed")["nodes"]]


def stop_ends_it(lan: Lan, workspace: Workspace) -> Result:
    stop = workspace.dtrain("stop", "killed")
    assert stop.code == 0, stop.err
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)
    ended = workspace.status("killed")
    assert (ended["state"], ended["exit_code"]) == ("STOPPED", 143)
    return stop


def start_with_n2_waiting(lan: Lan, workspace: Workspace) -> tuple[subprocess.Popen[str], int]:
    """A launcher that waits for n2 to say that it is prepared, and n2's session, which stands still."""
    n1, n2, _ = lan.nodes
    for _ in range(5):
        launcher = launch(workspace)
        deadline = time.monotonic() + 60
        while not (guards := n2.pids("\0guard\0")):  # no pause: the session says it as soon as the guard has its agent
            assert time.monotonic() < deadline and launcher.poll() is None
        session = int(Path(f"/proc/{guards[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(session, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not all("AgentStarted" in events(node) for node in lan.nodes):
            time.sleep(0.05)
        if "AgentStarted" in events(n2) and session in n2.pids("python") and "LauncherStarted" not in events(n1):
            return launcher, session
        os.kill(session, signal.SIGCONT)  # it was quicker, or has not told the guard what it is for
        kill(launcher)
        assert workspace.dtrain("stop", "killed", "--grace", "0").code == 0
        for node in lan.nodes:
            node.wipe()
    raise AssertionError("n2 was not met in time five times")


def test_while_it_connects(lan: Lan, workspace: Workspace) -> None:
    """There is no job yet."""
    lan.hide(lan.nodes[2])
    launcher = launch(workspace)
    workspace.until(lambda: lan.nodes[0].processes(), "the session on the first node")
    kill(launcher)
    assert workspace.dtrain("status").err == "no job was launched from here yet\n"
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)


def nothing_is_left(lan: Lan, workspace: Workspace) -> None:
    workspace.until(lambda: lan.processes() == {}, "the agents to end", timeout_s=30.0)
    workspace.until(lambda: workspace.status("killed")["state"] == "FAILED", "the nodes to be asked")
    assert workspace.status("killed")["exit_source"] == "dtrain"


def test_between_prepare_and_commit(lan: Lan, workspace: Workspace) -> None:
    """Agents wait to be told to start, which nobody will do: they end with the sessions that prepared them."""
    launcher, session = start_with_n2_waiting(lan, workspace)
    kill(launcher)
    os.kill(session, signal.SIGCONT)
    nothing_is_left(lan, workspace)
    assert workspace.status("killed")["first_failure"]["reason"] == "never-committed"
    assert not any("LauncherStarted" in events(node) for node in lan.nodes)


def test_between_two_commits(lan: Lan, workspace: Workspace) -> None:
    """n1 and n3 were told to start and n2 was not: it ends with its session, and the others with it."""
    n1, n2, n3 = lan.nodes
    launcher, session = start_with_n2_waiting(lan, workspace)
    agent = max(n3.pids("\0guard\0"))  # the guard's child
    os.kill(agent, signal.SIGSTOP)  # so that n3 joins later than n2
    os.kill(session, signal.SIGCONT)
    workspace.until(lambda: "ClockOffset" in events(n2), "n2 to join")
    os.kill(session, signal.SIGSTOP)
    os.kill(agent, signal.SIGCONT)
    workspace.until(lambda: all("LauncherStarted" in events(node) for node in (n1, n3)), "the others to start")
    kill(launcher)
    os.kill(session, signal.SIGKILL)  # it has not read what it was told
    nothing_is_left(lan, workspace)
    assert "LauncherStarted" not in events(n2)


def test_while_the_job_runs(lan: Lan, workspace: Workspace) -> None:
    launcher = launch(workspace)
    workspace.until(lambda: workspace.printed("ready") == 3, "the workers")
    kill(launcher)
    running = workspace.status("killed")
    assert (running["state"], [node["state"] for node in running["nodes"]]) == ("RUNNING", ["RUNNING"] * 3)
    assert abs(min(node["last_seen_at"] for node in running["nodes"]) - time.time()) < 10
    stop_ends_it(lan, workspace)


# A launch with a bug in it: the view's, as soon as a worker has printed something.
BUG = """
from pathlib import Path
from dtrain.cli.launch import follow_to_end
from dtrain.render import console
from dtrain.render.live import LiveView
from dtrain.spec import load_job

class Faulty(LiveView):
    def printed(self, node, stream, data):
        raise ZeroDivisionError

follow_to_end(load_job(Path("waits.yaml")), 600.0, Faulty(console.person()))
"""


def test_a_bug_of_the_launcher_ends_no_job(workspace: Workspace) -> None:
    workspace.waiting_job("waits")
    launch = workspace.wait(workspace.python(BUG))
    assert launch.code == 1 and "ZeroDivisionError" in launch.err, launch.err
    job = workspace.status("waits")
    assert job["state"] == "RUNNING"
    told = f"job waits {job['job']} is followed no more, and goes on on its nodes until its lease of 600 s is over\n"
    assert f"{told}  dtrain attach {job['job']}\n" in launch.err, launch.err
    attach = workspace.start("attach")
    (workspace.root / "go").touch()
    assert workspace.wait(attach).code == 0


def test_before_a_node_has_the_job(lan: Lan, workspace: Workspace) -> None:
    """The files are still on their way to n2, whose sshd stands still; n1 and n3 wait to be told to start."""
    n1, n2, n3 = lan.nodes
    workspace.write("large", "x" * (64 << 20))
    launcher = launch(workspace)
    workspace.until(lambda: list((workspace.root / "state/dtrain/jobs").glob("*/plan.json")), "the job to be planned")
    servers = n2.pids("sshd-session") + n2.pids("sshd: root")
    for pid in servers:
        os.kill(pid, signal.SIGSTOP)
    try:
        workspace.until(lambda: all("AgentStarted" in events(node) for node in (n1, n3)), "the others")
        kill(launcher)
    finally:
        for pid in servers:
            os.kill(pid, signal.SIGCONT)
    nothing_is_left(lan, workspace)
    assert node_states(workspace) == ["FAILED", "PENDING", "FAILED"]
    assert "before all nodes had it" in workspace.dtrain("status", "killed").out
    assert "LauncherStarted" not in events(n1) + events(n2) + events(n3)
