"""What the nodes of a job do for each other while nobody looks after them (node/tripwire.py, node/remains.py).

tests/net/test_faults.py has the plain cases.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.cluster import Workspace
from tests.lan import DIR, Lan, Node

pytestmark = [pytest.mark.net, pytest.mark.root]

# Ready, and then there for ever: with a child in a session of its own, as a daemon would be. It ignores TERM, which an agent
# may still send in the instant between its guard's death and its own.
STAY = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "600"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("ready", flush=True)
time.sleep(600)
"""


def running(workspace: Workspace) -> subprocess.Popen[str]:
    workspace.write("stay.py", STAY)
    launch = workspace.start("launch", workspace.write("job.yaml", "name: stays\nscript: stay.py\ncluster: lan.yaml\ngrace: 2\n"))
    workspace.until(lambda: workspace.printed("ready") == 3, "the workers")
    return launch


def kill(node: Node, *parts: str) -> None:
    """KILL the processes whose command has one of these parts, all at once. One may end by itself meanwhile, as sessions do."""
    pids = [pid for pid, command in node.processes().items() if any(part in command for part in parts)]
    assert len(pids) >= len(parts), node.processes()
    subprocess.run(("nsenter", "--pid", "--mount", "--target", str(node.init), "kill", "-9", *map(str, pids)), capture_output=True)
    deadline = time.monotonic() + 10.0
    while left := node.processes().keys() & pids:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def orphan(launch: subprocess.Popen[str]) -> None:
    launch.kill()
    launch.communicate()


def all_stopped(lan: Lan, workspace: Workspace, timeout_s: float) -> None:
    workspace.until(lambda: lan.processes() == {}, f"the nodes to stop: {lan.processes()}", timeout_s=timeout_s)


def test_a_node_that_falls_silent_ends_the_job(lan: Lan, workspace: Workspace) -> None:
    """Its own agent notices too: nobody can reach it, and nothing is left on it either."""
    launch = running(workspace)
    began = time.monotonic()
    with lan.cut(lan.nodes[1]):
        workspace.until(lambda: not lan.nodes[0].processes() and not lan.nodes[2].processes(), "the others to stop", timeout_s=40)
        assert time.monotonic() - began < 30
        result = workspace.wait(launch, timeout_s=60)
        assert result.code == 69, result.err
        workspace.until(lambda: " guard " not in str(lan.nodes[1].processes()), "the silent node to stop", timeout_s=20)
        status = workspace.status()
        assert status["state"] == "LOST"
        assert [node["state"] for node in status["nodes"]] == ["STOPPED", "LOST", "STOPPED"]
        assert (status["first_failure"]["node"], status["first_failure"]["reason"]) == ("n2", "node-lost")
    workspace.until(lambda: workspace.status("stays")["state"] == "FAILED", "the last word of the node that is there again")
    status = workspace.status("stays")
    assert [node["state"] for node in status["nodes"]] == ["STOPPED"] * 3
    assert (status["state"], status["exit_code"], status["first_failure"]["reason"]) == ("FAILED", 69, "node-lost")


def test_the_next_contact_finds_what_a_killed_job_left(lan: Lan, workspace: Workspace) -> None:
    orphan(running(workspace))
    n2 = lan.nodes[1]
    workspace.until(lambda: not any(" -c " in command for command in n2.processes().values()), "the launcher's session to end")
    kill(n2, " guard ", "torch.distributed.run")
    workspace.until(lambda: not lan.nodes[0].processes(), "the others to stop", timeout_s=30)
    assert "sleep 600" in n2.processes().values()
    workspace.until(lambda: workspace.status("stays")["state"] == "LOST", "the next contact")
    assert workspace.status("stays")["exit_code"] == 69
    all_stopped(lan, workspace, timeout_s=5)


def test_a_restart_of_a_node_signals_nobody(lan: Lan, workspace: Workspace) -> None:
    """Whoever has the old ids now, even with the old variables, is not the job's."""
    orphan(running(workspace))
    n2 = lan.nodes[1]
    enter = ("nsenter", "--pid", "--mount", "--net", "--target", str(n2.init))
    kill(n2, "dtrain", "sleep 600", "stay.py")
    boot_id = n2.path("/run/etc/boot_id")
    boot_id.write_text("11111111-2222-3333-4444-555555555555\n")
    subprocess.run((*enter, "mount", "--bind", "/run/etc/boot_id", "/proc/sys/kernel/random/boot_id"), check=True)
    job = next(n2.path(f"{DIR}/jobs").iterdir()).name
    innocent = subprocess.Popen((*enter, "env", f"DTRAIN_JOB_FOLDER={DIR}/jobs/{job}/n2", "sleep", "601"))
    try:
        workspace.until(lambda: not lan.nodes[0].processes(), "the others to stop", timeout_s=30)
        workspace.until(lambda: workspace.status("stays")["state"] == "LOST", "the next contact")
        assert workspace.status("stays")["first_failure"]["reason"] == "rebooted"
        assert innocent.poll() is None
    finally:
        os.kill(innocent.pid, signal.SIGKILL)
        innocent.wait()
        kill(n2, "sleep 601")
        subprocess.run((*enter, "umount", "/proc/sys/kernel/random/boot_id"), check=True)
