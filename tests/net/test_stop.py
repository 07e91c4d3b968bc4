"""`dtrain stop`: a job ends because somebody at another shell wants it to."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("told to end", flush=True))
print("ready", flush=True)
while True: time.sleep(0.1)
"""


def said(workspace: Workspace, word: str, num_workers: int) -> None:
    def logs() -> str:
        return "".join(log.read_text() for log in workspace.nodes.glob("jobs/*/*/logs/rank*.log"))

    workspace.until(lambda: logs().count(word) == num_workers, f"{word!r} of {num_workers} workers")


def test_a_stop_from_another_shell_ends_the_job_of_a_launch(workspace: Workspace) -> None:
    launch = workspace.start("launch", workspace.waiting_job("waits", launcher="torchrun"))
    said(workspace, "ready", 2)
    stop = workspace.dtrain("stop")
    assert stop.code == 0, stop.err
    assert "on node0, node1 (grace 30 s)" in stop.err and "STOPPED" in stop.err
    assert workspace.leftovers().keys() <= {launch.pid}
    result = workspace.wait(launch)
    assert result.code == 143, result.err
    assert "`dtrain stop` by " in result.err and "from elsewhere" in result.err and "failed" not in result.err
    ended = workspace.status("waits")
    assert (ended["state"], ended["exit_code"], ended["exit_source"]) == ("STOPPED", 143, "dtrain")
    again = workspace.dtrain("stop", "waits")
    assert (again.code, again.err) == (0, f"job waits {ended['job']} is over: STOPPED\n")


def test_a_second_stop_shortens_the_wait_of_the_first(workspace: Workspace) -> None:
    workspace.write("stubborn.py", STUBBORN)
    launched = workspace.dtrain("launch", workspace.job("name: stubborn\nscript: stubborn.py\ngrace: 300\n"), "--detach")
    assert launched.code == 0, launched.err
    first = workspace.start("stop", "stubborn")
    said(workspace, "told to end", 2)
    assert first.poll() is None
    assert workspace.dtrain("stop", "stubborn", "--grace", "0").code == 0
    assert workspace.wait(first, timeout_s=30).code == 0
    assert workspace.leftovers() == {}
    assert workspace.status("stubborn")["exit_code"] == 143


def test_ctrl_c_leaves_a_stop_that_takes_its_course(workspace: Workspace) -> None:
    workspace.write("stubborn.py", STUBBORN)
    job = workspace.job("name: stubborn\nlauncher: none\nscript: stubborn.py\ngrace: 2\n")
    assert workspace.dtrain("launch", job, "--detach").code == 0
    stop = workspace.start("stop", "--grace", "3")
    said(workspace, "told to end", 2)
    stop.send_signal(signal.SIGINT)
    result = workspace.wait(stop, timeout_s=30)
    assert result.code == 130, result.err
    assert "the order has been given, and the nodes go on stopping: node0, node1" in result.err
    workspace.until(lambda: workspace.leftovers() == {}, "the grace to end")
    workspace.until(lambda: workspace.status("stubborn")["state"] == "STOPPED", "the nodes to be asked")


def test_which_job_is_meant_and_the_other_goes_on(workspace: Workspace) -> None:
    """The same script, the same nodes."""
    assert (nothing := workspace.dtrain("stop")).code == 66
    assert "error: no job is running" in nothing.err
    jobs = [workspace.dtrain("launch", workspace.waiting_job(name), "--detach").out.strip() for name in ("one", "two")]
    several = workspace.dtrain("stop")
    assert several.code == 66
    assert all(f"{name} {job}" in several.err for name, job in zip(("one", "two"), jobs, strict=True)) and "hint: " in several.err
    jobs.append(workspace.dtrain("launch", workspace.waiting_job("two", instances=1), "--detach").out.strip())
    namesakes = workspace.dtrain("stop", "two")
    assert namesakes.code == 66 and all(f"two {job}" in namesakes.err for job in jobs[1:]), namesakes.err
    assert workspace.dtrain("stop", jobs[2]).code == 0
    assert workspace.dtrain("stop", jobs[0][:6]).code == 0
    left = workspace.leftovers()
    assert any(jobs[1] in command for command in left.values()) and not any(jobs[0] in command for command in left.values())
    running = workspace.status("two")
    assert [rank["state"] for node in running["nodes"] for rank in node["ranks"]] == ["RUNNING", "RUNNING"]
    assert workspace.dtrain("stop").code == 0
    assert workspace.leftovers() == {}


def test_the_job_of_somebody_else_needs_force(workspace: Workspace) -> None:
    assert workspace.dtrain("launch", workspace.waiting_job("anas"), "--detach", env={"LOGNAME": "ana"}).code == 0
    refused = workspace.dtrain("stop", "anas")
    assert refused.code == 2
    assert "was launched by ana@" in refused.err and "--force" in refused.err
    assert workspace.status("anas")["state"] == "RUNNING"
    assert workspace.dtrain("stop", "anas", "--force").code == 0
    assert workspace.leftovers() == {}


@pytest.mark.root
def test_nodes_that_another_machine_plays_are_left_alone(workspace: Workspace) -> None:
    """Two machines that share a home: nothing of the job is here, which says nothing about it."""

    def on_the_other(*args: str | Path) -> int:
        shell = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh")
        argv = (*shell, sys.executable, "-m", "dtrain", *map(str, args))
        return subprocess.run(argv, cwd=workspace.workdir, env=workspace.env, stdout=subprocess.DEVNULL, timeout=60).returncode

    assert on_the_other("launch", workspace.waiting_job("shared"), "--detach") == 0
    status = workspace.dtrain("status", "shared")
    assert "RUNNING" in status.out and "are played by elsewhere" in status.err + status.out
    stop = workspace.dtrain("stop", "shared", "--force")
    assert stop.code == 69 and "hint: run this command on elsewhere" in stop.err
    assert workspace.status("shared")["state"] == "RUNNING"
    assert on_the_other("stop", "shared") == 0
    assert workspace.leftovers() == {}


def test_a_stop_while_the_job_is_being_started(workspace: Workspace) -> None:
    """Some nodes have no agent yet that could be told."""
    with (workspace.workdir / "large").open("wb") as large:
        large.truncate(450 << 20)
    launch = workspace.start("launch", workspace.waiting_job("large"))
    workspace.until(lambda: list((workspace.root / "state/dtrain/jobs").glob("*/plan.json")), "the job to be planned")
    stop = workspace.dtrain("stop", timeout_s=40)
    assert stop.code == 0, stop.err
    result = workspace.wait(launch, timeout_s=40)
    assert result.code == 143, result.err
    assert "error: `dtrain stop` came from another shell before the job ran" in result.err
    ended = workspace.status("large")
    assert (ended["state"], ended["exit_code"]) == ("STOPPED", 143)


@pytest.fixture
def frozen(workspace: Workspace) -> Iterator[Path]:
    """A folder in which whoever writes hangs, whatever signal comes."""
    image, folder = workspace.root / "image", workspace.root / "frozen"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    folder.mkdir()
    subprocess.run(("mkfs.ext4", "-q", image), check=True)
    subprocess.run(("mount", "-o", "loop", image, folder), check=True)
    try:
        subprocess.run(("fsfreeze", "-f", folder), check=True)
        try:
            yield folder
        finally:
            subprocess.run(("fsfreeze", "-u", folder), check=True)
            workspace.until(lambda: workspace.leftovers() == {}, "the pending KILL to arrive")
    finally:
        subprocess.run(("umount", folder), check=True)


@pytest.mark.root
def test_what_survives_a_kill_is_named(workspace: Workspace, frozen: Path) -> None:
    workspace.write(
        "hang.py",
        "import os, sys, time\nprint('ready', flush=True)\n"
        "if os.environ['RANK'] == '1': open(os.environ['FROZEN'] + '/file', 'w')\ntime.sleep(600)\n",
    )
    job = workspace.job(f"name: hangs\nscript: hang.py\nenv: {{FROZEN: {frozen}}}\n")
    launch = workspace.start("launch", job)
    said(workspace, "ready", 2)
    stop = workspace.dtrain("stop", "--grace", "1")
    assert stop.code == 1, stop.err
    [survivor] = [pid for pid, command in workspace.leftovers().items() if "hang.py" in command and " guard " not in command]
    assert f"node1: process {survivor} (D) is still there: " in stop.err and "hang.py" in stop.err
    result = workspace.wait(launch)
    assert result.code == 143 and f"node1: process {survivor} (D)" in result.err, result.err
    over = workspace.dtrain("stop", "hangs")
    assert over.code == 1 and f"node1: process {survivor} (D)" in over.err
