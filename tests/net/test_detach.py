"""`launch --detach`: a job that no launcher follows."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net


def test_a_detached_job_goes_on_without_its_launcher(workspace: Workspace) -> None:
    """What a script gets is the id alone."""
    launch = workspace.dtrain("launch", workspace.waiting_job("alone", instances=1, gpus=2, launcher="torchrun"), "--detach")
    assert launch.code == 0, launch.err
    job = launch.out.removesuffix("\n")
    assert workspace.status()["job"] == job
    for told in ("detached: no lease", f"dtrain status {job}", f"dtrain logs {job} --follow", f"dtrain stop {job}"):
        assert told in launch.err
    follow = workspace.start("logs", job, "--follow")
    (workspace.root / "go").touch()
    assert workspace.wait(follow, timeout_s=40).out.count("ready") == 2
    assert workspace.status(job)["state"] == "SUCCEEDED"
    workspace.until(lambda: workspace.leftovers() == {}, "the agents to end")


def test_a_detached_job_that_ends_before_all_workers_run(workspace: Workspace) -> None:
    quick = workspace.dtrain("launch", workspace.job("command: 'true'\n", instances=1), "--detach")
    assert quick.code == 0 and quick.out == workspace.status()["job"] + "\n"


def test_a_detached_job_that_fails_before_all_workers_run(workspace: Workspace) -> None:
    """It is followed to its end, also when the second node's part is over before the first one's."""
    job = workspace.job("command: trap '' TERM; sleep 600 & exit 9\nlauncher: none\ngrace: 1\n")
    result = workspace.dtrain("launch", job, "--detach", *slow_on_node1(workspace))
    assert (result.code, result.out) == (9, ""), result.err
    assert "rank 0 on node0 failed with exit code 9" in result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["AgentStarted", "LauncherStarted"])
def test_a_detached_start_can_be_given_up(workspace: Workspace, moment: str, number: signal.Signals) -> None:
    job = workspace.job("name: half\ncommand: sleep 600\nlauncher: none\n")
    launch = workspace.start("launch", job, "--detach", *slow_on_node1(workspace))
    workspace.until(lambda: moment in events(workspace, "node0"), "the first node")
    launch.send_signal(number)
    result = workspace.wait(launch)
    assert (result.code, result.out) == (128 + number, ""), result.err
    assert workspace.status("half")["state"] == "STOPPED"
    workspace.until(lambda: workspace.leftovers() == {}, "both nodes to end", timeout_s=10)


def slow_on_node1(workspace: Workspace) -> tuple[str, str]:
    """A Python that takes its time to start on the second node, as from a slow disk: a worker there runs once it is told to end."""
    python = workspace.root / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *" worker "*"/node1 none") sleep 600;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return "--set", f"cluster.python={python}"


def events(workspace: Workspace, node: str) -> str:
    return "".join(path.read_text() for path in workspace.nodes.glob(f"jobs/*/{node}/events.jsonl"))


def test_a_lease_and_detach_exclude_each_other(workspace: Workspace) -> None:
    job = workspace.waiting_job("plans")
    both = workspace.dtrain("launch", job, "--detach", "--lease", "9")
    assert both.code == 2 and "a detached job has no lease" in both.err
    plan = workspace.dtrain("launch", job, "--detach", "--dry-run")
    assert plan.code == 0 and "detached: no lease" in plan.out
    assert json.loads(workspace.dtrain("launch", job, "--detach", "--dry-run", "--json").out)["plan"]["lease_s"] is None
