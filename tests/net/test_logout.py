"""What a job outlives on a machine of systemd's: the log-out of its user, whose processes logind then ends, or whose files in /dev/shm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import systemd
from tests.cluster import Workspace, num_ranks
from tests.lan import SSH_PORT, Lan, Node
from tests.ssh import Host, write_user_files
from tests.systemd import UID, USER

pytestmark = [
    pytest.mark.net,
    pytest.mark.root,
    pytest.mark.skipif(systemd.why_not() is not None, reason=str(systemd.why_not())),
]

KILLS, SPARES = "KillUserProcesses=yes\n", "KillUserProcesses=no\n"
SHARED = "/dev/shm/of-the-job"
JOB = f"""
name: far
launcher: none
command: [sh, -c, "echo kept > {SHARED}; echo ready; while sleep 1; do :; done"]
grace: 1
cluster: lan.yaml
"""


@contextmanager
def machine(workspace: Workspace, logind: str) -> Iterator[Lan]:
    with systemd.machine(workspace.root / "machine", logind) as lan:
        node = lan.nodes[0]
        write_user_files(workspace.root / "home", lan.user_key, [Host("n1", node.address, SSH_PORT, USER, node.public_key)])
        workspace.write("lan.yaml", lan.cluster())
        workspace.write("job.yaml", JOB)
        yield lan


def await_logout(workspace: Workspace, node: Node) -> None:
    """Nobody has a session any more, and logind has done what it does then."""

    def state() -> str:
        return node.within(
            "sh", "-c", f"loginctl show-user {USER} --property=State --property=Sessions 2>&1; systemctl is-active user@{UID}"
        )

    workspace.until(lambda: "State=active" not in state() and "State=online" not in state() and "activating" not in state(), "the log-out")


def log_in(workspace: Workspace, command: str) -> str:
    """What one says who logs in as the user would, by hand."""
    config = workspace.root / "home/.ssh/config"
    done = subprocess.run(("ssh", "-F", str(config), "n1", command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def launch_and_leave(workspace: Workspace, node: Node) -> str:
    """The job, which runs once all have logged out."""
    launched = workspace.dtrain("launch", workspace.workdir / "job.yaml", "--detach")
    assert launched.code == 0, launched.err
    await_logout(workspace, node)
    job = workspace.status()
    assert job["state"] == "RUNNING", job
    await_logout(workspace, node)
    assert workspace.status()["state"] == "RUNNING"
    assert node.path(SHARED).read_text() == "kept\n"
    return str(job["job"])


def stop(workspace: Workspace, node: Node) -> None:
    stopped = workspace.dtrain("stop")
    assert stopped.code == 0, stopped.err
    workspace.until(lambda: not node.pids("dtrain"), f"its processes to end: {node.processes()}")
    assert workspace.status()["state"] == "STOPPED"


@pytest.mark.parametrize("lingers", [False, True])
def test_where_processes_are_spared(workspace: Workspace, lingers: bool) -> None:
    """What stays has a session of its own: without lingering a scope would end with the user's manager."""
    with machine(workspace, SPARES) as lan:
        (node,) = lan.nodes
        if lingers:
            log_in(workspace, "loginctl enable-linger")
        launch_and_leave(workspace, node)
        assert "/session-" in unit(node)
        stop(workspace, node)


def test_where_they_are_ended_a_detached_job_is_refused_with_what_cures_it(workspace: Workspace) -> None:
    with machine(workspace, KILLS) as lan:
        (node,) = lan.nodes
        refused = workspace.dtrain("launch", workspace.workdir / "job.yaml", "--detach")
        assert refused.code == 78, refused.err
        assert "n1: systemd there ends what a user leaves running" in refused.err and "loginctl enable-linger" in refused.err
        assert not node.path(SHARED).exists() and not node.pids("\0guard\0")
        log_in(workspace, "loginctl enable-linger")
        launch_and_leave(workspace, node)
        assert f"user@{UID}.service" in unit(node)
        stop(workspace, node)
        assert "dtrain" not in log_in(workspace, "systemctl --user --all list-units")


def test_a_foreground_job_there_is_not_left(workspace: Workspace) -> None:
    """It needs the connection, so its launch goes on without the terminal."""
    with machine(workspace, KILLS) as lan:
        (node,) = lan.nodes
        launch = workspace.on_terminal("launch", workspace.workdir / "job.yaml")
        workspace.until(lambda: num_ranks("ready", launch.said()) == 1, "the worker")
        _, warned, after = launch.said().partition("systemd there ends what a user leaves running")
        assert warned and "detaches" not in after
        launch.type(b"\x1c")
        workspace.until(lambda: "cannot detach: n1 would end the job with the connection" in launch.said(), "the launch to say so")
        launch.hang_up()
        with pytest.raises(subprocess.TimeoutExpired):
            launch.process.wait(2)
        assert workspace.status()["state"] == "RUNNING"
        stop(workspace, node)
        assert launch.process.wait(30) == 143


def unit(node: Node) -> str:
    """What systemd counts the job's guard and agent to."""
    guard, _ = node.pids("\0guard\0")
    return Path(f"/proc/{guard}/cgroup").read_text()


def test_a_manager_that_gives_no_scope(workspace: Workspace) -> None:
    with machine(workspace, KILLS) as lan:
        (node,) = lan.nodes
        log_in(workspace, "loginctl enable-linger")
        node.path("/run/broken").write_text("#!/bin/sh\necho no scope for you >&2\nexit 1\n")
        node.path("/run/broken").chmod(0o755)
        with node.in_place_of("/usr/bin/systemd-run", "/run/broken"):
            launched = workspace.dtrain("launch", workspace.workdir / "job.yaml", "--detach")
        assert launched.code == 78 and "n1: the agent did not start: no scope for you" in launched.err, launched.err
        assert not node.pids("\0guard\0") and os.listdir(node.path(f"/var/tmp/dtrain-{UID}/jobs")) == []
