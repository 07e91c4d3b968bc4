"""Looking at a job, and ending it, where a node cannot be reached."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster import Workspace
from tests.lan import Lan

pytestmark = [pytest.mark.net, pytest.mark.root]


def run_detached(workspace: Workspace) -> str:
    workspace.write("sleep.py", "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    job = workspace.write("job.yaml", "name: detached\nlauncher: none\nscript: sleep.py\ncluster: lan.yaml\ngrace: 1\n")
    launch = workspace.dtrain("launch", job, "--detach")
    assert launch.code == 0, launch.err
    return launch.out.strip()


def test_status_does_not_wait_for_a_node_whose_cable_is_out(lan: Lan, workspace: Workspace) -> None:
    run_detached(workspace)
    with lan.cut(lan.nodes[1]):

        def tells_of_n2_alone() -> bool:  # a machine with much else to do may take 3 s for the others too
            began = time.monotonic()
            told = workspace.dtrain("status", "detached")
            assert time.monotonic() - began < 10  # 3 s for all nodes together
            assert told.code == 0 and "RUNNING" in told.out
            assert "n2 was not asked: no answer within 3 s; last seen " in told.out
            return "n1 was" not in told.out

        workspace.until(tells_of_n2_alone, "an answer of the others")
    assert workspace.dtrain("stop").code == 0
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)


def test_ctrl_c_in_a_look_at_a_job_leaves_it_alone(lan: Lan, workspace: Workspace) -> None:
    job = run_detached(workspace)
    lan.hide(lan.nodes[1])
    for command in (["status", job], ["logs", job], ["fetch", job, "--to", "fetched"], ["logs", job, "--follow"]):
        look = workspace.start(*command)
        workspace.until(lambda look=look: len(os.listdir(f"/proc/{look.pid}/task")) > 1, "it to ask the nodes")  # type: ignore[misc]
        look.send_signal(signal.SIGINT)
        result = workspace.wait(look, timeout_s=20)
        assert result.code == 130, (command, result.err)
        assert "left by Ctrl-C; a job that runs goes on" in result.err and "Traceback" not in result.err, result.err
    lan.heal()
    follow = workspace.start("logs", job, "--follow")
    assert follow.stdout is not None
    assert sorted(follow.stdout.readline() for _ in lan.nodes) == ["[0] ready\n", "[1] ready\n", "[2] ready\n"]
    follow.send_signal(signal.SIGINT)
    result = workspace.wait(follow, timeout_s=20)
    assert result.code == 130 and "goes on" in result.err, result.err
    assert workspace.status(job)["state"] == "RUNNING"
    assert workspace.dtrain("stop").code == 0


def test_a_stop_reaches_a_node_through_the_others_and_names_it(lan: Lan, workspace: Workspace) -> None:
    job = run_detached(workspace)
    lan.hide(lan.nodes[1])
    before = time.time()
    stop = workspace.dtrain("stop", timeout_s=60)
    assert stop.code == 69, stop.err
    assert "n2: " in stop.err and "the other nodes have told it to stop too" in stop.err
    assert not any(job in command for node in lan.nodes for command in node.processes().values())
    told = workspace.status(job)
    seen = {node["node"]: node["last_seen_at"] for node in told["nodes"]}
    assert seen["n2"] < before < min(seen["n1"], seen["n3"])
    assert [node["state"] for node in told["nodes"]] == ["STOPPED", "RUNNING", "STOPPED"]
    lan.heal()
    workspace.until(lambda: workspace.status(job)["exit_code"] == 143, "the last word of the node that is there again")
    workspace.until(lambda: lan.processes() == {}, "the last node to end", timeout_s=5.0)


def test_ctrl_c_in_a_stop_names_the_node_that_was_not_told(lan: Lan, workspace: Workspace) -> None:
    job = run_detached(workspace)
    lan.hide(lan.nodes[1])
    stop = workspace.start("stop")
    workspace.until(lambda: not any(job in command for command in lan.nodes[0].processes().values()), "the others to end")
    stop.send_signal(signal.SIGINT)
    result = workspace.wait(stop, timeout_s=20)
    assert result.code == 130, result.err
    assert "not reached from here; the other nodes tell it to stop: n2" in result.err
    lan.heal()
    workspace.until(lambda: workspace.status(job)["state"] == "STOPPED", "the last word of the node that is there again")


def test_a_frozen_agent_does_not_hold_a_stop_for_ever(lan: Lan, workspace: Workspace) -> None:
    """Its session is there and takes the order, which nobody carries out."""
    job = run_detached(workspace)
    frozen = lan.nodes[1].pids("\0guard\0")
    assert len(frozen) == 2, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in frozen]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        stop = workspace.dtrain("stop", "--grace", "0", timeout_s=100)
        assert stop.code == 69, stop.err
        assert "n2: it was told, and has not said that it ended" in stop.err
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    workspace.until(lambda: lan.processes() == {}, "it to do as it was told", timeout_s=10.0)
    workspace.until(lambda: workspace.status(job)["state"] == "STOPPED", "the nodes to be asked")
