"""Which GPUs a job gets, and what it is told where others have them. Only nvidia-smi is played (tests/nvidia.py)."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.errors import PreflightFailed
from dtrain.link import Link, Target
from dtrain.node import procs, wire
from dtrain.spec import Instance
from tests.cluster import Workspace, needs_mpirun
from tests.nvidia import Gpus

pytestmark = pytest.mark.net

# Says which GPUs it was given, and stays until a file is there.
HOLD = """
import os, time
print("given", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
while not os.path.exists(os.environ["GO"]): time.sleep(0.05)
"""


@pytest.fixture
def foreigner() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with dtrain."""
    process = subprocess.Popen(("sleep", "600"))
    yield process
    process.kill()
    process.wait()


def _job(workspace: Workspace, name: str, gpus: str, *, go: Path | str = "/", instances: int = 1, launcher: str = "none") -> Path:
    workspace.write("hold.py", HOLD)
    cluster = f"{{instances: {instances}, gpus_per_instance: {gpus}, device: cuda, dir: {workspace.nodes}}}"
    return workspace.write(
        f"{name}.yaml", f"name: {name}\nlauncher: {launcher}\nscript: hold.py\nenv: {{GO: {go}}}\ngrace: 1\ncluster: {cluster}\n"
    )


def _until_given(workspace: Workspace, name: str, gpus: str) -> None:
    workspace.until(lambda: workspace.printed(f"given {gpus}\n"), f"{name} to have GPU {gpus}")


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpirun), "none"])
def test_a_number_takes_the_lowest_free_gpus(workspace: Workspace, foreigner: subprocess.Popen[bytes], launcher: str) -> None:
    """Each worker sees all of its node's, and its local rank says which is its own."""
    Gpus(workspace, 5).compute(1, foreigner.pid)
    result = workspace.dtrain("launch", _job(workspace, "takes", "2", instances=2, launcher=launcher))
    assert result.code == 0, result.err
    seen = sorted(workspace.dtrain("logs").out.splitlines())
    assert [line[4:] for line in seen] == (["given 0,2", "given 3,4"] if launcher == "none" else ["given 0,2"] * 2 + ["given 3,4"] * 2)


def test_gpus_that_a_process_holds_are_refused_with_who_it_is(workspace: Workspace, foreigner: subprocess.Popen[bytes]) -> None:
    Gpus(workspace, 2).compute(1, foreigner.pid, 2048)
    for wanted, told in (("[1]", "GPU 1 wanted, 0 free"), ("auto", "GPU 0, 1 wanted, 1 free"), ("2", "2 GPUs wanted, 1 free")):
        result = workspace.dtrain("launch", _job(workspace, "refused", wanted))
        assert result.code == 75, result.err
        held = f"  GPU 1 is held by pid {foreigner.pid} of {getpass.getuser()}, 2.0 GiB, sleep 600"
        assert f"error: node0: {told}\n{held}\nhint: dtrain launch --wait waits" in result.err
    free = workspace.dtrain("launch", _job(workspace, "free", "[0]"))
    assert free.code == 0 and "given 0\n" in free.err
    never = workspace.dtrain("launch", _job(workspace, "never", "3"), "--wait", timeout_s=30)
    assert never.code == 75 and "error: node0: 3 GPUs wanted, 2 of 2 left\nhint: ask for fewer" in never.err
    assert sorted(path.name for path in workspace.nodes.glob("jobs/*")) == [workspace.status()["job"]]  # the others left nothing


def test_gpus_of_a_running_job_are_its_own_until_it_has_ended(workspace: Workspace) -> None:
    """Also before it computes: here nvidia-smi never names a process of it."""
    Gpus(workspace, 2)
    go = workspace.root / "go"
    first = workspace.start("launch", _job(workspace, "first", "1", go=go, launcher="torchrun"))
    _until_given(workspace, "first", "0")
    holders = [command for pid, command in workspace.leftovers().items() if any("/gpus/0.lock" in path for path in _open_files(pid))]
    assert len(holders) == 2 and all(" guard " in command for command in holders)  # guard and agent alone, no torchrun or worker
    second = workspace.dtrain("launch", _job(workspace, "second", "1"))
    assert second.code == 0 and "given 1\n" in second.err
    refused = workspace.dtrain("launch", _job(workspace, "third", "[0]"))
    assert refused.code == 75
    assert f"  GPU 0 is held by job first {workspace.status('first')['job']}\n" in refused.err
    guard = _guard(workspace)
    os.kill(guard, signal.SIGSTOP)  # the slowest of machines: only the agent has come to its end when the end is told
    try:
        go.touch()
        assert workspace.wait(first).code == 0
        assert workspace.dtrain("launch", _job(workspace, "third", "[0]")).code == 0
    finally:
        os.kill(guard, signal.SIGCONT)


def _guard(workspace: Workspace) -> int:
    """The one process of dtrain's on the node whose parent is none: the agent is its fork."""
    pids = [pid for pid, command in workspace.leftovers().items() if " guard " in command]
    (guard,) = (pid for pid in pids if (found := procs.look(pid)) is not None and found.ppid not in pids)
    return guard


def _open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # ended meanwhile
        return []


def test_of_two_launches_at_one_moment_one_has_the_gpu(workspace: Workspace) -> None:
    """Both see it free before either has it."""
    gpus = Gpus(workspace, 1)
    gpus.let_meet(2)
    go = workspace.root / "go"
    launches = [workspace.start("launch", _job(workspace, name, "1", go=go)) for name in ("left", "right")]
    workspace.until(lambda: any(launch.poll() is not None for launch in launches), "one of them to be refused")
    go.touch()
    results = sorted((workspace.wait(launch) for launch in launches), key=lambda result: result.code)
    assert [result.code for result in results] == [0, 75], [result.err for result in results]
    winner = next(name for name in ("left", "right") if workspace.status(name)["state"] == "SUCCEEDED")
    assert f"node0: GPU 0 was just taken by job {winner} {workspace.status(winner)['job']}\nhint: dtrain launch --wait" in results[1].err
    assert workspace.leftovers() == {}


def test_wait_goes_on_when_the_gpu_is_free(workspace: Workspace) -> None:
    gpus = Gpus(workspace, 1)
    go = workspace.root / "go"
    first = workspace.start("launch", _job(workspace, "first", "1", go=go))
    _until_given(workspace, "first", "0")
    second = workspace.start("launch", _job(workspace, "second", "auto"), "--wait")
    before = gpus.num_asked
    workspace.until(lambda: gpus.num_asked >= before + 2, "a second look")
    job = workspace.status("first")["job"]
    go.touch()
    assert workspace.wait(first).code == 0
    result = workspace.wait(second)
    assert result.code == 0, result.err
    assert result.err.count(f"waiting for GPUs: node0: GPU 0 wanted, 0 free\n  GPU 0 is held by job first {job}\n") == 1
    assert "given 0\n" in result.err


def test_two_that_wait_have_the_gpu_one_after_the_other(workspace: Workspace) -> None:
    """Where both saw it free at one moment, the one that came too late waits on."""
    gpus = Gpus(workspace, 1)
    gpus.let_meet(2)
    go = workspace.root / "go"
    launches = [workspace.start("launch", _job(workspace, name, "1", go=go), "--wait") for name in ("left", "right")]
    workspace.until(lambda: gpus.num_asked > 2, "the late one to look again")
    go.touch()
    assert [workspace.wait(launch).code for launch in launches] == [0, 0]


def test_ctrl_c_ends_the_waiting_and_leaves_nothing(workspace: Workspace, foreigner: subprocess.Popen[bytes]) -> None:
    gpus = Gpus(workspace, 1)
    gpus.compute(0, foreigner.pid)
    launch = workspace.start("launch", _job(workspace, "waits", "1"), "--wait")
    workspace.until(lambda: gpus.num_asked >= 1, "the first look")
    assert launch.stderr is not None
    lines = [launch.stderr.readline(), launch.stderr.readline()]
    assert lines[0] == "waiting for GPUs: node0: 1 GPU wanted, 0 free\n" and f"pid {foreigner.pid} of " in lines[1]
    launch.send_signal(signal.SIGINT)
    result = workspace.wait(launch, timeout_s=20)
    assert result.code == 130 and "stopped by Ctrl-C" in result.err
    assert workspace.leftovers() == {}
    assert not list(workspace.nodes.glob("jobs/*")) and workspace.dtrain("status").err == "no job was launched from here yet\n"


def test_a_terminal_that_closes_does_not_end_the_waiting(workspace: Workspace, foreigner: subprocess.Popen[bytes]) -> None:
    """The job has its turn all the same, as a person expects who asked for it and went home."""
    gpus = Gpus(workspace, 1)
    gpus.compute(0, foreigner.pid)
    go = workspace.root / "go"
    launch = workspace.on_terminal("launch", _job(workspace, "turn", "1", go=go), "--wait")
    workspace.until(lambda: "waiting for GPUs" in launch.said(), "the first look")
    launch.hang_up()
    before = gpus.num_asked
    workspace.until(lambda: gpus.num_asked > before, "another look")
    gpus.idle()
    assert launch.process.wait(60) == 0
    assert (job := workspace.status())["state"] == "RUNNING", job
    go.touch()
    assert workspace.dtrain("attach", "turn").code == 0


def test_killed_agents_hold_no_gpu(workspace: Workspace) -> None:
    Gpus(workspace, 1)
    launch = workspace.start("launch", _job(workspace, "killed", "1", go="never"))
    _until_given(workspace, "killed", "0")
    victims = [pid for pid, command in workspace.leftovers().items() if " guard " in command]
    assert len(victims) == 2
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert workspace.wait(launch, timeout_s=60).code == 69
    result = workspace.dtrain("launch", _job(workspace, "next", "[0]"))
    assert result.code == 0, result.err


def test_an_nvidia_smi_that_does_not_tell_all(workspace: Workspace) -> None:
    gpus = Gpus(workspace, 2)
    gpus.tell_no_memory()
    gpus.compute(0, 4194305, "[N/A]")  # of another container: no pid here is above 2^22
    result = workspace.dtrain("launch", _job(workspace, "fits", "1"))
    assert result.code == 0 and "given 1\n" in result.err
    refused = workspace.dtrain("launch", _job(workspace, "refused", "2"))
    assert refused.code == 75 and "  GPU 0 is held by pid 4194305 that is not seen there\n" in refused.err
    gpus.fail("Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error")
    broken = workspace.dtrain("launch", _job(workspace, "refused", "1"))
    assert broken.code == 78
    assert "nvidia-smi does not say who holds the GPUs: Unable to determine the device handle" in broken.err


def _prepare(workspace: Workspace, node: str, gpus: tuple[int, ...]) -> Link:
    """A job that is prepared on a node, by a session of its own."""
    link = Link.open(Target(Instance(node, host=None), str(workspace.nodes), "tw1ce", "twice"))
    try:
        link.ask(
            wire.Prepare(
                launcher_argv=("true",),
                launcher_env={},
                worker_argv=("true",),
                worker_env={},
                secrets={},
                num_workers=1,
                gpus=gpus,
                tree=None,
                workdir=str(workspace.workdir),
                outputs="out",
                grace_s=1.0,
                lease_s=None,
                mpi=None,
                watch=None,
            )
        )
    except PreflightFailed:
        link.close()
        raise
    return link


def test_a_job_starts_once_on_a_node(workspace: Workspace) -> None:
    links = [_prepare(workspace, "node0", ()), _prepare(workspace, "node1", (0,))]
    for node, gpus in (("node0", ()), ("node1", (0,))):
        with pytest.raises(PreflightFailed, match=rf"^{node}: job tw1ce runs there already\nhint: dtrain status tw1ce shows it$"):
            _prepare(workspace, node, gpus)
    for link in links:
        link.tell(wire.Stop("stop", 0.0))
        link.close()
    workspace.until(lambda: workspace.leftovers() == {}, "the job to end")


def test_a_machine_that_stands_twice_in_a_cluster_is_told_so(workspace: Workspace) -> None:
    """Under two names; each of its nodes would be given the same GPUs, and no waiting would free them."""
    link = _prepare(workspace, "gpu1.lab", (0,))
    with pytest.raises(
        PreflightFailed, match=r"^10\.0\.0\.1: GPU 0 is gpu1\.lab's already: both are one machine\nhint: name each machine once"
    ):
        _prepare(workspace, "10.0.0.1", (0,))
    link.tell(wire.Stop("stop", 0.0))
    link.close()
    workspace.until(lambda: workspace.leftovers() == {}, "the job to end")
