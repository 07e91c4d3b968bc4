"""An sshd that is started anew, or killed with all of its sessions, while a job runs. systemd is process 1 of the node."""

from __future__ import annotations

import hashlib
import os
import re
import signal

import pytest

from tests import systemd
from tests.cluster import Workspace
from tests.lan import SSH_PORT, Node
from tests.ssh import Host, write_user_files
from tests.systemd import UID, USER

pytestmark = [
    pytest.mark.net,
    pytest.mark.root,
    pytest.mark.skipif(systemd.why_not() is not None, reason=str(systemd.why_not())),
]

COUNT = """
import itertools, os, time
for number in itertools.count():
    print(f"line {number}", flush=True)
    if os.path.exists("/tmp/go"): break
    time.sleep(0.01)
"""


@pytest.mark.parametrize("mode", ["foreground", "detached"])
def test_sshd_comes_and_goes_and_the_job_goes_on(workspace: Workspace, mode: str) -> None:
    """Where it runs detached, somebody has attached to it in the launcher's place."""
    with systemd.machine(workspace.root / "machine", "KillUserProcesses=no\n") as lan:
        (node,) = lan.nodes
        write_user_files(workspace.root / "home", lan.user_key, [Host("n1", node.address, SSH_PORT, USER, node.public_key)])
        workspace.write("lan.yaml", lan.cluster())
        workspace.write("count.py", COUNT)
        job = workspace.write("job.yaml", "name: counts\nlauncher: none\nscript: count.py\ncluster: lan.yaml\n")
        shown = workspace.root / "shown.txt"
        if mode == "foreground":
            follower = workspace.start("launch", job, log=shown)
        else:
            launched = workspace.dtrain("launch", job, "--detach")
            assert launched.code == 0, launched.err
            follower = workspace.start("attach", log=shown)
        workspace.until(lambda: "[0] line 9\n" in shown.read_text(), "the first lines")

        sessions = set(node.pids(f"sshd: {USER}"))
        node.within("systemctl", "restart", "test-sshd")
        before = len(shown.read_text())
        workspace.until(lambda: len(shown.read_text()) > before + 100, "more lines")
        assert workspace.status()["state"] == "RUNNING"
        assert sessions and sessions <= set(node.pids(f"sshd: {USER}"))

        for pid in node.pids("sshd"):
            os.kill(pid, signal.SIGKILL)
        workspace.until(lambda: "; the job goes on there, connecting again\n" in shown.read_text(), "it to tell of the cut")
        told = workspace.dtrain("status")
        status = workspace.dtrain("status", "counts")
        assert "RUNNING" in told.out and "n1 did not answer" in told.out + told.err, told
        assert "RUNNING" in status.out and re.search(r"n1 was not asked: .*refused.*; last seen [\d.]+ s ago\n", status.out), status.out
        assert workspace.status()["nodes"][0]["state"] == "RUNNING"

        node.within("systemctl", "start", "test-sshd")
        workspace.until(lambda: "n1: connected again\n" in shown.read_text(), "it to connect again")
        node.path("/tmp/go").touch()
        assert follower.wait(60) == 0, shown.read_text()[-2000:]
        written = _log_on(node)
        assert written == "".join(f"line {number}\n" for number in range(written.count("\n")))
        lines = [line for line in shown.read_text().splitlines(keepends=True) if line.startswith("[0] ")]
        logs = workspace.dtrain("logs").out
        assert _hash("".join(lines)) == _hash(logs) == _hash("".join(f"[0] {line}" for line in written.splitlines(keepends=True)))
        assert workspace.status()["state"] == "SUCCEEDED"


def _log_on(node: Node) -> str:
    (log,) = node.path(f"/var/tmp/dtrain-{UID}/jobs").glob("*/n1/logs/rank0.log")
    return log.read_text()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
