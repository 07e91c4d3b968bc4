"""`launch --detach`: a job that no launcher follows."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest

from tests.cluster import Terminal, Workspace, num_ranks
from tests.lan import DIR, Lan

pytestmark = pytest.mark.net


def test_a_detached_job_goes_on_without_its_launcher(workspace: Workspace) -> None:
    """What a script gets is the id alone."""
    launch = workspace.dtrain("launch", workspace.waiting_job("alone", instances=1, gpus=2, launcher="torchrun"), "--detach")
    assert launch.code == 0, launch.err
    job = launch.out.removesuffix("\n")
    assert workspace.status()["job"] == job
    for told in ("detached: no lease", f"dtrain attach {job}", f"dtrain logs {job}", f"dtrain stop {job}"):
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


KEY = b"\x1c"  # Ctrl-\


@pytest.mark.parametrize("how", ["key", "hang-up"])
def test_a_launch_is_left_and_its_job_needs_it_no_more(workspace: Workspace, how: str) -> None:
    launch = workspace.on_terminal("launch", workspace.waiting_job("left"), "--lease", "2")
    workspace.until(lambda: num_ranks("ready", launch.said()) == 2 and "(Ctrl-\\ detaches)" in launch.said(), "the workers")
    job = workspace.status()["job"]
    if how == "key":
        launch.type(KEY)
        assert launch.ended() == 0, launch.said()
        for told in (f"job left {job} RUNNING, detached", f"dtrain attach {job}", f"dtrain logs {job}", f"dtrain stop {job}"):
            assert told in launch.said()
        launch.hang_up()
    else:
        launch.hang_up()
        assert launch.process.wait(30) == 0
    left_s = time.monotonic()
    workspace.until(lambda: time.monotonic() > left_s + 3, "the time of a lease")
    assert [node["state"] for node in workspace.status(job)["nodes"]] == ["RUNNING", "RUNNING"]
    attach = workspace.start("attach", job)
    (workspace.root / "go").touch()
    result = workspace.wait(attach)
    assert (result.code, result.out) == (0, "") and "lease" not in result.err, result.err


def launched(workspace: Workspace, name: str, lease_s: int) -> Terminal:
    launch = workspace.on_terminal("launch", workspace.waiting_job(name), "--lease", str(lease_s))
    workspace.until(lambda: num_ranks("ready", launch.said()) == 2, "the workers")
    return launch


def test_a_job_whose_launch_was_killed_is_saved_by_who_attaches(workspace: Workspace) -> None:
    launch = launched(workspace, "saved", 8)
    job = workspace.status()["job"]
    launch.process.kill()
    launch.ended()
    launch.hang_up()
    killed_s = time.monotonic()
    told = f"its launcher is gone, so it stops when its lease of 8 s is over; Ctrl-\\ in dtrain attach {job} lets it go on"
    assert told in workspace.dtrain("status", "saved").out
    attach = workspace.on_terminal("attach")
    workspace.until(lambda: "(Ctrl-\\ detaches)" in attach.said(), "the attach")
    attach.type(KEY)
    assert attach.ended() == 0 and f"job saved {job} RUNNING, detached" in attach.said(), attach.said()
    attach.hang_up()
    workspace.until(lambda: time.monotonic() > killed_s + 10, "the time of the lease")
    status = workspace.dtrain("status", "saved").out
    assert "RUNNING" in status and "launcher is gone" not in status
    (workspace.root / "go").touch()
    assert workspace.wait(workspace.start("attach", job)).code == 0


def test_who_ended_a_job_that_stopped(workspace: Workspace) -> None:
    launch = launched(workspace, "late", 1)
    launch.process.kill()
    launch.ended()
    launch.hang_up()
    workspace.until(lambda: workspace.status()["state"] == "STOPPED", "the end of the lease")
    assert workspace.status()["stopped_by"] == "lease-over"
    for command in ("status", "attach"):
        result = workspace.dtrain(command, "late")
        assert "it stopped because its launcher was silent for longer than the lease" in result.out + result.err, result
    assert workspace.dtrain("launch", workspace.waiting_job("told"), "--detach").code == 0
    assert workspace.dtrain("stop").code == 0 and workspace.status()["stopped_by"] == "stop"


def test_a_terminal_that_closes_before_the_job_runs(workspace: Workspace) -> None:
    """The start goes on, as a person expects who has seen it begin."""
    job = workspace.waiting_job("early")
    job.write_text(job.read_text() + f"setup: touch {workspace.root}/begun; while [ ! -e {workspace.root}/set-up ]; do sleep 0.05; done\n")
    launch = workspace.on_terminal("launch", job)
    workspace.until(lambda: (workspace.root / "begun").exists(), f"the setup: {launch.said()}")
    launch.hang_up()
    (workspace.root / "set-up").touch()
    assert launch.process.wait(60) == 0
    attach = workspace.start("attach")
    (workspace.root / "go").touch()
    assert workspace.wait(attach).code == 0
    assert workspace.status()["state"] == "SUCCEEDED"


def test_a_terminal_that_closes_during_a_detached_start(workspace: Workspace) -> None:
    job = workspace.waiting_job("early", instances=1)
    job.write_text(job.read_text() + f"setup: touch {workspace.root}/begun; while [ ! -e {workspace.root}/set-up ]; do sleep 0.05; done\n")
    launch = workspace.on_terminal("launch", job, "--detach")
    workspace.until(lambda: (workspace.root / "begun").exists(), f"the setup: {launch.said()}")
    launch.hang_up()
    (workspace.root / "set-up").touch()
    assert launch.process.wait(60) == 73  # there is nobody to take the id
    assert workspace.status()["state"] == "RUNNING"
    (workspace.root / "go").touch()
    workspace.until(lambda: workspace.status()["state"] == "SUCCEEDED", "the job to end")


def test_ctrl_c_on_a_terminal_stops_the_job(workspace: Workspace) -> None:
    launch = workspace.on_terminal("launch", workspace.waiting_job("stopped"))
    workspace.until(lambda: num_ranks("ready", launch.said()) == 2, "the workers")
    launch.type(b"\x03")
    assert launch.ended() == 130, launch.said()
    launch.hang_up()
    assert workspace.status()["state"] == "STOPPED"


def run_on_lan(lan: Lan, workspace: Workspace, lease_s: int) -> Terminal:
    workspace.write("sleep.py", "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    text = "name: far\nlauncher: none\nscript: sleep.py\ncluster: lan.yaml\ngrace: 1\n"
    launch = workspace.on_terminal("launch", workspace.write("job.yaml", text), "--lease", str(lease_s))
    workspace.until(lambda: num_ranks("ready", launch.said()) == 3, "the workers")
    return launch


@pytest.mark.root
def test_one_node_that_hears_of_it_tells_the_others(lan: Lan, workspace: Workspace) -> None:
    """The first node is one of those that do not."""
    launch = run_on_lan(lan, workspace, 3)
    for node in lan.nodes[:2]:
        lan.deafen(node)
    launch.type(KEY)
    assert launch.ended() == 0, launch.said()
    launch.hang_up()
    left_s = time.monotonic()
    workspace.until(lambda: time.monotonic() > left_s + 5, "the time of a lease")
    lan.heal()
    assert workspace.status()["state"] == "RUNNING"
    assert workspace.dtrain("stop").code == 0


@pytest.mark.root
def test_where_no_node_can_be_told(lan: Lan, workspace: Workspace) -> None:
    """It waits for one; who leaves without is told what will happen, and so is who attaches."""
    launch = run_on_lan(lan, workspace, 5)
    job = workspace.status()["job"]
    for node in lan.nodes:
        lan.deafen(node)
    launch.type(KEY)
    workspace.until(lambda: "no node has heard of it yet" in launch.said(), "the launch to say that it waits")
    launch.type(KEY)
    assert launch.ended() == 69, launch.said()
    assert "not detached: no node has answered" in launch.said() and "until its lease of 5 s is over" in launch.said()
    launch.hang_up()
    workspace.until(
        lambda: "NodeEnded" in lan.nodes[0].path(DIR).joinpath(f"jobs/{job}/n1/events.jsonl").read_text(), "the end of the lease"
    )
    lan.heal()
    attach = workspace.dtrain("attach")
    assert attach.code == 143 and "its launcher is gone, so it stops when its lease of 5 s is over" in attach.err, attach.err


def test_a_lease_and_detach_exclude_each_other(workspace: Workspace) -> None:
    job = workspace.waiting_job("plans")
    both = workspace.dtrain("launch", job, "--detach", "--lease", "9")
    assert both.code == 2 and "a detached job has no lease" in both.err
    plan = workspace.dtrain("launch", job, "--detach", "--dry-run")
    assert plan.code == 0 and "detached: no lease" in plan.out
    assert json.loads(workspace.dtrain("launch", job, "--detach", "--dry-run", "--json").out)["plan"]["lease_s"] is None
