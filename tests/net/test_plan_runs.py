"""The plan that is stored is what the nodes got, the one that was shown before but for what only they knew, and runs again."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import HOSTILE, Workspace, needs_mpirun
from tests.lan import Lan

pytestmark = pytest.mark.net

LAUNCHERS = ["torchrun", pytest.param("mpirun", marks=needs_mpirun), "none"]

# What a worker is: its own command and variables, and those of what started it.
SEEN = """
import json, os
def look(pid):
    with open(f"/proc/{pid}/cmdline") as argv, open(f"/proc/{pid}/environ") as env, open(f"/proc/{pid}/stat") as stat:
        parent = int(stat.read().rpartition(")")[2].split()[1])
        return parent, argv.read().split("\\0")[:-1], dict(each.partition("=")[::2] for each in env.read().split("\\0") if each)
parent, argv, env = look("self")
above = []
while parent > 1 and len(above) < 3:  # worker.py, the launcher, dtrain's agent
    parent, theirs, variables = look(parent)
    above.append([theirs, variables])
print(json.dumps({"argv": argv, "env": env, "above": above}), flush=True)
"""


def job_text(launcher: str) -> str:
    args = json.dumps([text for text in HOSTILE if text.isprintable()])
    env = "env: {LR: 1e-4, OCTAL: 08, QUOTED: 'a \"b\" $c', INHERITED: }"
    return f"name: seen\nlauncher: {launcher}\nscript: seen.py\nargs: {args}\n{env}\nsecrets: [TOKEN]\n"


ENVIRON = {"TOKEN": "s3cr3t", "INHERITED": "from here"}


def stored(workspace: Workspace) -> tuple[Path, dict[str, Any]]:
    """The newest job's folder and plan."""
    folder = max((workspace.root / "state/dtrain/jobs").iterdir(), key=lambda path: (path / "plan.json").stat().st_mtime_ns)
    text = (folder / "plan.json").read_text()
    assert "s3cr3t" not in text and {(folder / name).stat().st_mode & 0o777 for name in ("plan.json", "job.yaml")} == {0o600}
    return folder, json.loads(text)


def check_what_the_nodes_got(workspace: Workspace, launcher: str) -> None:
    folder, whole = stored(workspace)
    plan, commands = whole["plan"], {command["node"]: command for command in whole["commands"]}
    num_seen = 0  # workers
    for node in plan["nodes"]:
        command = commands[node["name"]]
        for worker in node["workers"]:
            log = (folder / node["name"] / f"logs/rank{worker['rank']}.log").read_text()
            seen = json.loads(log)
            assert seen["argv"] == command["worker_argv"]
            assert {**seen["env"], "TOKEN": "***"} == {**seen["env"], **command["worker_env"]}
            assert seen["env"]["TOKEN"] == "s3cr3t"
            if launcher != "none":
                numbers = {"RANK": worker["rank"], "LOCAL_RANK": worker["local_rank"], "WORLD_SIZE": plan["cluster_size"]}
                assert {name: int(seen["env"][name]) for name in numbers} == numbers
            if command["argv"]:
                of_launcher = [env for argv, env in seen["above"] if argv == command["argv"]]
                assert len(of_launcher) == 1, f"{command['argv']}\nis none of {[argv for argv, _ in seen['above']]}"
            else:  # mpirun's daemon
                of_launcher = [env for argv, env in seen["above"] if argv[0] == node["mpi_daemon"]]
            assert {**of_launcher[0], **command["env"]} == of_launcher[0]
            num_seen += 1
    assert num_seen == len(plan["nodes"]) * (1 if launcher == "none" else 2)


def agrees(shown: Any, later: Any) -> bool:
    """Whether nothing was shown otherwise; what was open then may be anything."""
    if isinstance(shown, dict):
        return shown.keys() == later.keys() and all(agrees(shown[key], later[key]) for key in shown)
    if isinstance(shown, list):
        return len(shown) == len(later) and all(map(agrees, shown, later))
    if isinstance(shown, str) and re.search(r"<[\w ]+>", shown):
        return re.fullmatch(".*".join(map(re.escape, re.split(r"<[\w ]+>", shown))), later) is not None
    return shown is None or bool(shown == later)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_nodes_get_what_is_stored(workspace: Workspace, launcher: str) -> None:
    workspace.write("seen.py", SEEN)
    job = workspace.job(job_text(launcher), gpus=2)
    result = workspace.dtrain("launch", job, env=ENVIRON)
    assert result.code == 0, result.err[-500:]
    check_what_the_nodes_got(workspace, launcher)
    shown = json.loads(workspace.dtrain("launch", job, "--dry-run", "--json", env=ENVIRON).out)
    _, later = stored(workspace)
    assert agrees(shown, later)
    assert (shown["job"], shown["plan"]["master_port"]) == (later["job"], None)
    assert isinstance(later["plan"]["master_port"], int)
    assert not re.search(r"<[\w ]+>", json.dumps({**later, "job": None}))  # nothing is open any more


@pytest.mark.root
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpirun)])
def test_three_machines_get_what_is_stored(lan: Lan, workspace: Workspace, launcher: str) -> None:
    workspace.write("seen.py", SEEN)
    workspace.write("lan.yaml", lan.cluster(gpus_per_instance="2"))
    result = workspace.dtrain("launch", workspace.write("job.yaml", f"{job_text(launcher)}cluster: lan.yaml\n"), env=ENVIRON)
    assert result.code == 0, result.err[-500:]
    check_what_the_nodes_got(workspace, launcher)
    _, whole = stored(workspace)
    assert {node["interface"] for node in whole["plan"]["nodes"]} == {"eth0"}


def test_an_old_job_runs_again_without_the_files_that_it_came_from(workspace: Workspace) -> None:
    """From anywhere: its cluster is in it, and its paths are absolute. Variables are those of then, secrets those of now."""
    workspace.write("seen.py", SEEN)
    cluster = workspace.write(
        "two.yaml", f"instances: 2\ngpus_per_instance: 1\ndevice: cpu\npython: {sys.executable}\ndir: {workspace.nodes}\n"
    )
    job = workspace.write("job.yaml", f"{job_text('none')}cluster: two.yaml\n")
    assert workspace.dtrain("launch", job, "--", "--lr", "2", env=ENVIRON).code == 0
    folder, first = stored(workspace)
    job.unlink()
    cluster.unlink()
    told = workspace.dtrain("status", "seen").out
    assert f"\nworkdir {workspace.workdir}\noverrides: -- --lr 2\n" in told
    again = re.search(r"^again: dtrain (launch .*/job\.yaml)$", told, re.MULTILINE)
    assert again is not None, told
    result = workspace.dtrain(*shlex.split(again[1]), env={"TOKEN": "t0ken", "INHERITED": "otherwise"})
    assert result.code == 0, result.err[-500:]
    newer, second = stored(workspace)
    assert newer != folder and second["job"] == first["job"]
    for old, new in zip(first["commands"], second["commands"], strict=True):
        assert old["worker_argv"] == new["worker_argv"] and new["worker_argv"][-2:] == ["--lr", "2"]
        assert new["worker_env"]["INHERITED"] == "from here"
    assert json.loads((newer / "node1/logs/rank1.log").read_text())["env"]["TOKEN"] == "t0ken"
    assert workspace.status()["overrides"] == ["-- --lr 2"]
    third = workspace.dtrain("launch", newer / "job.yaml", "--set", "grace=3", env={"TOKEN": "t0ken"})
    assert third.code == 0 and workspace.status()["overrides"] == ["-- --lr 2", "--set grace=3"], third.err[-500:]
    unset = workspace.dtrain("launch", folder / "job.yaml")
    assert unset.code == 65 and "the secret TOKEN is not set here" in unset.err
