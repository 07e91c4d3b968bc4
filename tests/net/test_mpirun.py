"""`launcher: mpirun`, on instances of this machine and on three nodes that cannot log in to each other."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dtrain.launchers import node_commands
from dtrain.link import Link, Target
from dtrain.node import wire
from dtrain.plan import Rendezvous, make_plan
from dtrain.spec import load_job
from tests.cluster import PLACE, Workspace, needs_mpirun
from tests.lan import DIR, Lan, Node

pytestmark = [pytest.mark.net, needs_mpirun]

EXAMPLES = Path(__file__).resolve().parents[2] / "cluster-examples"

WAIT = """
import os, time
print("ready", flush=True)
while not os.path.exists(os.environ["GO"]): time.sleep(0.05)
"""


# ---- on instances of this machine ----


def test_the_example_trains(workspace: Workspace) -> None:
    shutil.copy(EXAMPLES / "mpirun.yaml", workspace.workdir)
    cluster = workspace.write("two.yaml", f"instances: 2\ngpus_per_instance: 2\ndevice: cpu\ndir: {workspace.nodes}\n")
    result = workspace.dtrain("launch", "mpirun.yaml", "--cluster", cluster)
    assert result.code == 0, result.err
    accuracy = re.search(r"^test accuracy ([0-9.]+)%$", result.err, re.MULTILINE)
    assert accuracy is not None and float(accuracy[1]) >= 95, result.err
    status = workspace.status("digits-mpirun")
    assert (status["launcher"], status["cluster_size"], status["exit_source"]) == ("mpirun", 4, "worker")


def test_one_node_alone(workspace: Workspace) -> None:
    workspace.write("place.py", PLACE)
    result = workspace.dtrain("launch", workspace.job("launcher: mpirun\nscript: place.py\n", instances=1, gpus=2))
    assert result.code == 0, result.err
    assert [json.loads(line[4:])[1:7] for line in workspace.dtrain("logs").out.splitlines()] == [
        [1.0, "0", "2", "0", "2", "0"],
        [1.0, "1", "2", "1", "2", "0"],
    ]


def test_nothing_of_the_users_passes_through_mpi(workspace: Workspace) -> None:
    """Neither arguments nor secrets are in the commands and environments of mpirun and its daemons, nor in anyone's argv."""
    workspace.write("wait.py", WAIT)
    go = workspace.root / "go"
    secret, argument = "s3cr3t-0f-th3-t3st", "a  'b' $c"
    text = {"name": "quiet", "launcher": "mpirun", "script": "wait.py", "args": [argument], "secrets": ["TOKEN"], "env": {"GO": str(go)}}
    job = workspace.job("\n".join(f"{key}: {json.dumps(value)}" for key, value in text.items()))
    leaking = {"TOKEN": secret, "OMPI_MCA_plm": "slurm", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "elsewhere"}
    launch = workspace.start("launch", job, env=leaking)
    workspace.until(lambda: workspace.printed("ready") == 2, "both workers")
    runtimes = {pid: command for pid, command in workspace.leftovers().items() if re.search(r"/mpirun |/orted | worker ", command)}
    kinds = [next(kind for kind in ("/orted ", "/mpirun ", " worker ") if kind in command) for command in runtimes.values()]
    assert sorted(set(kinds)) == [" worker ", "/mpirun ", "/orted "], runtimes
    commands = subprocess.run(("ps", "-eww", "-o", "args"), capture_output=True, check=True).stdout
    assert secret.encode() not in commands
    for pid in runtimes:
        told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert argument.encode() not in told and b"SLURM" not in told, runtimes[pid]
    go.touch()
    result = workspace.wait(launch)
    assert result.code == 0, result.err


def test_the_others_keep_their_grace_when_a_worker_fails(workspace: Workspace) -> None:
    """By itself mpirun kills all workers within 2 s of the first that fails, in the midst of a checkpoint."""
    workspace.write(
        "save.py",
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(5)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(f'{os.environ[\"READY\"]}{os.environ[\"RANK\"]}', 'w')\n"
        "while os.environ['RANK'] != '1' or not os.path.exists(os.environ['READY'] + '0'): time.sleep(0.05)\n"
        "os._exit(3)\n",
    )
    job = workspace.job(f"launcher: mpirun\nscript: save.py\nenv: {{READY: {workspace.root}/ready}}\ngrace: 30\n")
    began = time.monotonic()
    result = workspace.dtrain("launch", job, timeout_s=60)
    assert result.code == 3, result.err
    assert "[0] saved" in result.err
    assert "rank 1 on node1 failed with exit code 3" in result.err
    assert time.monotonic() - began < 30  # nobody waited for the end of the grace


def test_ctrl_c_ends_all(workspace: Workspace) -> None:
    workspace.write("wait.py", WAIT)
    launch = workspace.start("launch", workspace.job("name: c\nlauncher: mpirun\nscript: wait.py\nenv: {GO: never}\ngrace: 90\n", gpus=2))
    workspace.until(lambda: workspace.printed("ready") == 4, "the workers")
    launch.send_signal(signal.SIGINT)
    result = workspace.wait(launch, timeout_s=30)
    assert result.code == 130, result.err
    assert workspace.leftovers() == {}
    assert workspace.status("c")["state"] == "STOPPED"


def test_a_killed_worker_py_is_the_cause_and_nobody_waits_for_mpirun(workspace: Workspace) -> None:
    """mpirun, told to abort nobody, waits for ever once a signal has ended one of its processes."""
    workspace.write("wait.py", WAIT)
    launch = workspace.start("launch", workspace.job("launcher: mpirun\nscript: wait.py\nenv: {GO: never}\ngrace: 90\n"))
    workspace.until(lambda: workspace.printed("ready") == 2, "both workers")
    pid = next(
        pid for pid, command in workspace.leftovers().items() if re.search(r" worker \S+/node1 mpirun $", command) and ":" not in command
    )
    os.kill(pid, signal.SIGKILL)
    result = workspace.wait(launch, timeout_s=40)
    assert result.code == 137, result.err
    assert "rank 1 on node1 failed with SIGKILL" in result.err
    assert workspace.leftovers() == {}


def test_a_job_goes_on_without_the_launching_side(workspace: Workspace) -> None:
    workspace.write("wait.py", WAIT)
    go = workspace.root / "go"
    launch = workspace.start("launch", workspace.job(f"name: alone\nlauncher: mpirun\nscript: wait.py\nenv: {{GO: {go}}}\n"))
    workspace.until(lambda: workspace.printed("ready") == 2, "both workers")
    launch.kill()
    launch.communicate()
    go.touch()
    workspace.until(lambda: workspace.leftovers() == {}, "the job to end")
    workspace.until(lambda: workspace.status("alone")["state"] == "SUCCEEDED", "the node to be asked")


def test_a_node_that_mpirun_never_calls_hangs_nobody(workspace: Workspace) -> None:
    """node0 never hears that it is to start mpirun, so node1 waits for its daemon in vain."""
    workspace.write("wait.py", WAIT)
    spec = load_job(workspace.job("launcher: mpirun\nscript: wait.py\nenv: {GO: never}\ngrace: 1\n"), environ={})
    targets = [Target(instance, spec.cluster.dir, "cut0ff", "cut-off") for instance in spec.cluster.instances]
    links = {target.node: Link.open(target) for target in targets}
    facts = {node: link.ask(wire.Probe("python3", mpi=True)) for node, link in links.items()}
    loopback = wire.Address("lo", "127.0.0.1", 8, 0)
    plan = make_plan(spec, facts, Rendezvous(dict.fromkeys(links, loopback), 29500))  # type: ignore[arg-type]
    ports = []
    for command in node_commands(spec, plan, "cut0ff"):
        assert command.mpi is not None
        prepared = links[command.node].ask(
            wire.Prepare(
                launcher_argv=command.argv,
                launcher_env=command.env,
                worker_argv=command.worker_argv,
                worker_env=command.worker_env,
                secrets={},
                num_workers=1,
                gpus=(),
                tree=None,
                workdir=str(workspace.workdir),
                outputs="out",
                grace_s=1.0,
                lease_s=None,
                mpi=dataclasses.replace(command.mpi, start_timeout_s=3.0),
                watch=wire.Watch("t0k3n", command.node, "node0", "127.0.0.1", wire.Ports(0, 0), ("node0", "node1")),
            )
        )
        assert isinstance(prepared, wire.Prepared)
        ports.append(prepared.watch_port)
    links["node1"].ask(wire.Join(ports[0]))
    links["node1"].ask(wire.Commit())
    workspace.until(lambda: not [command for command in workspace.leftovers().values() if " guard " in command], "the agents to give up")
    for link in links.values():
        link.close()
    ended = [wire.from_json((workspace.nodes / f"jobs/cut0ff/{node}/events.jsonl").read_text().splitlines()[-1]) for node in links]
    assert [(each.outcome, each.reason) for each in ended if isinstance(each, wire.NodeEnded)] == [
        ("stopped", "failure"),
        ("failed", "start-timeout"),
    ]
    assert isinstance(ended[1], wire.NodeEnded)
    assert ended[1].detail.splitlines()[-1] == "dtrain: waited 3 s to be told to start mpirun's daemon; 0 of 1 workers started"


def test_a_machine_without_mpirun_is_told_so(workspace: Workspace) -> None:
    workspace.write("wait.py", WAIT)
    (workspace.root / "empty").mkdir()
    result = workspace.dtrain("launch", workspace.job("launcher: mpirun\nscript: wait.py\n"), env={"PATH": str(workspace.root / "empty")})
    assert result.code == 78
    assert "node0: mpirun is not installed" in result.err and "node1: mpirun is not installed" in result.err
    assert "hint: apt-get install openmpi-bin" in result.err


# ---- on nodes that share nothing but a cable ----


@pytest.mark.root
def test_unequal_nodes_without_a_way_to_log_in_to_each_other(lan: Lan, workspace: Workspace) -> None:
    """1 + 2 + 1 workers. Names mean 127.0.1.1 here, and of three interfaces only the last leads anywhere."""
    n1, n2, _ = lan.nodes
    ssh = n1.inside("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", f"root@{n2.address}", "true")
    refused = subprocess.run(ssh, env={**os.environ, "HOME": str(workspace.root)}, capture_output=True, text=True, check=False)
    assert refused.returncode == 255 and "Permission denied" in refused.stderr
    workspace.write("place.py", PLACE)
    workspace.write("uneven.yaml", lan.cluster("n1, {host: n2, gpus: 2}, n3"))
    result = workspace.dtrain("launch", workspace.write("job.yaml", "launcher: mpirun\nscript: place.py\ncluster: uneven.yaml\n"))
    assert result.code == 0, result.err
    seen = {int(line[1]): json.loads(line[4:]) for line in workspace.dtrain("logs").out.splitlines() if line[4:6] == '["'}
    assert seen == {
        0: ["n1", 6.0, "0", "4", "0", "1", "0", n1.address, "eth0", "=eth0"],
        1: ["n2", 6.0, "1", "4", "0", "2", "1", n1.address, "eth0", "=eth0"],
        2: ["n2", 6.0, "2", "4", "1", "2", "1", n1.address, "eth0", "=eth0"],
        3: ["n3", 6.0, "3", "4", "0", "1", "2", n1.address, "eth0", "=eth0"],
    }


MPI = """
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
named = lambda name: ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_" + name))
assert mpi.MPI_Init(None, None) == 0
rank, size = ctypes.c_int(), 1 << 20
mpi.MPI_Comm_rank(named("comm_world"), ctypes.byref(rank))
mine, total = (ctypes.c_double * size)(*([rank.value] * size)), (ctypes.c_double * size)()
assert mpi.MPI_Allreduce(mine, total, size, named("double"), named("op_sum"), named("comm_world")) == 0
print("MPI says", rank.value, total[0], total[size - 1], flush=True)
mpi.MPI_Finalize()
"""


@pytest.mark.root
def test_a_script_may_use_mpi_itself(lan: Lan, workspace: Workspace) -> None:
    """8 MiB between all ranks: it would hang in docker0 or dead0, which every node has."""
    workspace.write("use_mpi.py", MPI)
    result = workspace.dtrain("launch", workspace.write("job.yaml", "launcher: mpirun\nscript: use_mpi.py\ncluster: lan.yaml\n"))
    assert result.code == 0, result.err
    assert [f"[{rank}] MPI says {rank} 3.0 3.0" in result.err for rank in range(3)] == [True] * 3


@pytest.mark.root
def test_a_pipeline_across_three_machines(lan: Lan, workspace: Workspace) -> None:
    """One stage on each, started by mpirun."""
    text = (EXAMPLES / "pipeline.yaml").read_text()
    for old, new in (
        ("stages: 4", "stages: 3"),
        ("iterations: 60", "iterations: 20"),
        ("cluster: local.yaml", "launcher: mpirun\ncluster: lan.yaml"),
    ):
        assert old in text
        text = text.replace(old, new)
    result = workspace.dtrain("launch", workspace.write("job.yaml", text))
    assert result.code == 0, result.err
    losses = [float(loss) for loss in re.findall(r"iteration \d+/20 .*loss ([0-9.]+)", result.err)]
    assert losses and losses[-1] < 5, result.err


@pytest.mark.root
def test_a_dying_rank_gives_its_code_and_stops_the_other_machines(lan: Lan, workspace: Workspace) -> None:
    workspace.write(
        "die.py",
        "import os, subprocess, time\n"
        "subprocess.Popen(['setsid', 'sleep', '600'])\n"
        "if os.environ['RANK'] == '1': os._exit(3)\n"
        "time.sleep(600)\n",
    )
    job = workspace.write("job.yaml", "name: dies\nlauncher: mpirun\nscript: die.py\ncluster: lan.yaml\ngrace: 90\n")
    result = workspace.dtrain("launch", job, timeout_s=60)  # nobody waits for the end of the grace
    assert result.code == 3, result.err
    assert "rank 1 on n2 failed with exit code 3" in result.err
    workspace.until(lambda: lan.processes() == {}, "the other nodes to stop", timeout_s=5.0)
    assert workspace.status("dies")["first_failure"]["rank"] == 1


@pytest.mark.root
@pytest.mark.parametrize(("node", "victim"), [(0, "mpirun"), (1, "orted")])
def test_a_killed_part_of_mpi_fails_the_job_and_leaves_nothing(lan: Lan, workspace: Workspace, node: int, victim: str) -> None:
    workspace.write("wait.py", WAIT)
    job = workspace.write("job.yaml", "name: hit\nlauncher: mpirun\nscript: wait.py\ncluster: lan.yaml\nenv: {GO: never}\ngrace: 5\n")
    launch = workspace.start("launch", job)
    workspace.until(lambda: workspace.printed("ready") == 3, "the workers")
    kill(lan.nodes[node], f"/usr/bin/{victim} ")
    result = workspace.wait(launch, timeout_s=60)
    assert result.code == 78, result.err
    assert f"n{node + 1} failed: torchrun or mpirun on it ended before the workers did" in result.err
    assert "dtrain: it was ended by signal 9" in result.err
    workspace.until(lambda: lan.processes() == {}, "all nodes to stop", timeout_s=5.0)
    status = workspace.status("hit")
    assert (status["state"], status["exit_source"], status["first_failure"]["reason"]) == ("FAILED", "dtrain", "launcher-failed")


@pytest.mark.root
def test_a_node_without_mpirun_is_named_before_anything_starts(lan: Lan, workspace: Workspace) -> None:
    workspace.write("wait.py", WAIT)
    job = workspace.write("job.yaml", "launcher: mpirun\nscript: wait.py\ncluster: lan.yaml\n")
    with lan.nodes[1].in_place_of("/usr/bin/mpirun", "/dev/null"):
        result = workspace.dtrain("launch", job)
        assert result.code == 78, result.err
        assert "n2: mpirun is not installed" in result.err and "n1:" not in result.err and "n3:" not in result.err
        assert "hint: apt-get install openmpi-bin" in result.err
    assert_untouched(lan, workspace)


@pytest.mark.root
def test_different_major_versions_are_refused(lan: Lan, workspace: Workspace) -> None:
    workspace.write("wait.py", WAIT)
    newer = workspace.root / "mpirun5"
    newer.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.3'\n")
    newer.chmod(0o755)
    job = workspace.write("job.yaml", "launcher: mpirun\nscript: wait.py\ncluster: lan.yaml\n")
    shutil.copy(newer, lan.nodes[2].path("/run/etc/mpirun5"))
    with lan.nodes[2].in_place_of("/usr/bin/mpirun", "/run/etc/mpirun5"):
        result = workspace.dtrain("launch", job)
    assert result.code == 78, result.err
    assert re.search(r"different Open MPI: 4\.\d+\.\d+ on n1, n2; 5\.0\.3 on n3", result.err), result.err
    assert_untouched(lan, workspace)


def kill(node: Node, command: str) -> None:
    """KILL the process whose command begins so; the node's own number of it, hence from within."""
    pid = next(pid for pid, running in node.processes().items() if running.startswith(command))
    node.within("kill", "-9", str(pid))


def assert_untouched(lan: Lan, workspace: Workspace) -> None:
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)
    jobs = [path for node in lan.nodes if node.path(f"{DIR}/jobs").exists() for path in node.path(f"{DIR}/jobs").iterdir()]
    assert jobs == []
