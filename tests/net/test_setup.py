"""`setup`: the job's own preparation of each node, before any worker."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import HOSTILE, PLACE, Workspace
from tests.lan import Lan

pytestmark = pytest.mark.net


def job(workspace: Workspace, setup: str, *, instances: int = 1, name: str = "prepared", script: str = "", **keys: object) -> Path:
    workspace.write(f"{name}.py", script)
    cluster = {"instances": instances, "gpus_per_instance": 1, "device": "cpu", "dir": str(workspace.nodes)}
    text = {"name": name, "script": f"{name}.py", "setup": setup, "cluster": cluster, **keys}
    return workspace.write(f"{name}.yaml", json.dumps(text))


def test_it_runs_in_the_tree_with_the_workers_variables(workspace: Workspace) -> None:
    """What it prints is seen at once and afterwards; it is one process at a time on one machine; a secret stays one."""
    secret, value = "s3cr3t-0f-th3-s3tup", "".join(HOSTILE)
    setup = f"""
        read line || echo no input
        mkdir {workspace.root}/only-one
        printf '%s' "$VALUE" > value
        echo "$NODE_RANK ${{#TOKEN}} $(command -v python)" | tee made
        rmdir {workspace.root}/only-one
        sleep 300 &
    """
    script = "import os\nprint(open('made').read().split(), open('value', newline='').read() == os.environ['VALUE'])\n"
    file = job(workspace, setup, instances=2, script=script, secrets=["TOKEN"], env={"VALUE": value})
    result = workspace.dtrain("launch", file, env={"TOKEN": secret})
    assert result.code == 0, result.err
    python = Path(sys.executable).parent / "python"
    logs = workspace.dtrain("logs").out
    for i in range(2):
        for line in (f"[node{i} setup] {i} {len(secret)} {python}", f"[node{i} setup] no input"):
            assert line in result.err and line in logs
        assert f"[{i}] ['{i}', '{len(secret)}', '{python}'] True" in logs
    assert "setup on 2 nodes" in result.err and workspace.dtrain("logs", "--ranks", "0").out.count("setup") == 0
    kept = [path for folder in ("state", "nodes") for path in (workspace.root / folder).rglob("*") if path.is_file()]
    assert [path for path in kept if secret.encode() in path.read_bytes()] == []
    assert workspace.leftovers() == {}


def test_start_up_files_of_a_person_stay_out_of_it(workspace: Workspace) -> None:
    """Where it finds the variables of an ssh login, bash reads ~/.bashrc for a line too."""
    (workspace.root / "home").mkdir(exist_ok=True)
    (workspace.root / "home/.bashrc").write_text("export VALUE=theirs\n")
    cluster = {"instances": 1, "gpus_per_instance": 1, "device": "cpu", "dir": str(workspace.nodes)}
    keys = {"command": "echo worker $VALUE", "setup": "echo setup $VALUE", "env": {"VALUE": "ours"}, "cluster": cluster}
    login = {"HOME": str(workspace.root / "home"), "SSH_CLIENT": "10.0.0.1 40000 22", "SHLVL": "0"}
    result = workspace.dtrain("launch", workspace.write("line.yaml", json.dumps(keys)), env=login)
    assert result.code == 0 and "setup ours" in result.err and "worker ours" in workspace.dtrain("logs").out, result.err


def test_two_launches_at_once_wait_for_each_other(workspace: Workspace) -> None:
    busy = workspace.root / "busy"
    setup = f"mkdir {busy}\nsleep 1\nrmdir {busy}\n"
    launches = [workspace.start("launch", job(workspace, setup, instances=2, name=name)) for name in ("one", "two")]
    results = [workspace.wait(launch) for launch in launches]
    assert [result.code for result in results] == [0, 0], [result.err for result in results]
    assert any("waiting for another setup on this machine" in result.err for result in results)


@pytest.mark.root
def test_a_failure_on_one_of_two_nodes_ends_it_on_both(workspace: Workspace, lan: Lan) -> None:
    workspace.write("train.py", "print('started')\n")
    setup = 'echo "here on $NODE_RANK"; if [ $NODE_RANK = 0 ]; then sleep 300; fi\necho "no such package"\nfalse\necho "never said"\n'
    text = {"name": "broken", "script": "train.py", "setup": setup, "cluster": "lan.yaml"}
    result = workspace.dtrain("launch", workspace.write("job.yaml", json.dumps(text)), "--nodes", "n1,n2", timeout_s=60.0)
    assert result.code == 78, result.err
    which = "  dtrain: line 3 of setup failed: false\n"
    assert f"error: n2: setup failed with exit code 1; its last lines:\n  here on 1\n  no such package\n{which}hint: " in result.err
    assert "] never said" not in result.err and "] started" not in result.err
    status = workspace.status("broken")
    failure = status["first_failure"]
    assert (status["state"], status["exit_code"], status["exit_source"]) == ("FAILED", 78, "dtrain")
    assert (failure["node"], failure["rank"], failure["reason"], failure["log"]) == ("n2", None, "setup-failed", "logs/setup.log")
    log = workspace.root / "state/dtrain/jobs" / status["job"] / "n2" / failure["log"]
    assert log.read_text() == f"here on 1\nno such package\n{which.lstrip()}" and str(log) in result.err
    assert "it was not started: n2: setup failed with exit code 1" in workspace.dtrain("status", "broken").out
    workspace.until(lambda: not lan.processes(), "the nodes to end what they run", timeout_s=20.0)


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("\n# first\nTOKEN=$TOKEN \\\n  false\n", "dtrain: line 3 of setup failed: TOKEN=$TOKEN false\n"),
        ("echo false > part.sh\nsource ./part.sh\n", "dtrain: line 1 of ./part.sh failed: false\n"),
        ("set +e\nfalse\nfalse || true\necho said\nexit 1\n", "said\n"),  # none of these failed by its own
    ],
)
def test_the_line_that_failed_is_told(workspace: Workspace, setup: str, told: str) -> None:
    """As it was written: without the value of a secret."""
    result = workspace.dtrain("launch", job(workspace, setup, secrets=["TOKEN"]), env={"TOKEN": "s3cr3t"})
    assert result.code == 78 and "s3cr3t" not in result.err, result.err
    (log,) = (workspace.root / "state/dtrain/jobs").glob("*/node0/logs/setup.log")
    assert log.read_text() == told


SLOW = "trap 'echo told to end > {0}/told; exit 1' TERM\ntouch {0}/here\nwhile true; do sleep 0.1; done\n"


@pytest.mark.parametrize("how", ["stop", "ctrl-c", "killed"])
def test_it_ends_with_the_launch(workspace: Workspace, how: str) -> None:
    """TERM, and whatever comes after the grace; nothing of it is left, and no worker ran."""
    launch = workspace.start("launch", job(workspace, SLOW.format(workspace.root), script="print('started')\n"))
    workspace.until((workspace.root / "here").exists, "the setup")
    if how == "stop":
        assert (stop := workspace.dtrain("stop")).code == 0, stop.err
    else:
        launch.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
    result = workspace.wait(launch, timeout_s=30)
    assert result.code == {"stop": 143, "ctrl-c": 130, "killed": -9}[how], result.err
    workspace.until(lambda: workspace.leftovers() == {}, "the setup to end", timeout_s=20.0)
    assert (workspace.root / "told").read_text() == "told to end\n"
    assert "started" not in workspace.dtrain("logs").out
    assert workspace.status()["state"] == ("FAILED" if how == "killed" else "STOPPED")
    if how == "stop":  # the lock went with it
        assert workspace.dtrain("launch", job(workspace, "true", name="next")).code == 0


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("kill -9 $PPID; sleep 60", "error: node0: dtrain's agent there ended before the setup did\nhint: see whether the setup"),
        ('rm -rf "$DTRAIN_JOB_FOLDER"; sleep 60', "error: node0: the job's folder was deleted there: "),
    ],
)
def test_one_that_ends_what_it_runs_in_is_told_of(workspace: Workspace, setup: str, told: str) -> None:
    result = workspace.dtrain("launch", job(workspace, setup))
    assert result.code == 78 and told in result.err and "hint: see whether the" in result.err, result.err
    workspace.until(lambda: workspace.leftovers() == {}, "the setup to end", timeout_s=20.0)


@pytest.mark.parametrize("by", ["command", "notebook"])
def test_the_port_of_the_rendezvous_is_nobodys_meanwhile(workspace: Workspace, by: str) -> None:
    """However long the setup takes. Who has the port before torchrun is there, in the moment when it is free, is left to keep it."""
    go = workspace.root / "go"
    file = job(workspace, f"until [ -e {go} ]; do sleep 0.05; done", instances=2, script=PLACE)
    notebook = f"import dtrain, sys; sys.exit(dtrain.launch({str(file)!r}).wait().exit_code)"
    launch = workspace.start("launch", file) if by == "command" else workspace.python(notebook)
    plans = workspace.root / "state/dtrain/jobs"
    workspace.until(lambda: list(plans.glob("*/plan.json")), "the plan")
    (plan,) = plans.glob("*/plan.json")
    (port,) = set(re.findall(r"--master-port=(\d+)", plan.read_text()))
    with pytest.raises(OSError, match="in use"):
        _take(int(port))
    go.touch()
    with _until_taken(int(port)):
        result = workspace.wait(launch)
    assert result.code == 0, result.err
    told = result.err.count(" took the port of the rendezvous before torchrun could; once more, with another port\n")
    assert told == (1 if by == "command" else 0), result.err
    jobs = json.loads(workspace.dtrain("status", "--json").out)["jobs"]
    assert [(one["state"], one["exit_code"]) for one in jobs] == [("SUCCEEDED", 0), ("FAILED", 78)]


def _take(port: int) -> socket.socket:
    """As torchrun would."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
    try:
        server.bind(("0.0.0.0", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def _until_taken(port: int) -> socket.socket:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return _take(port)
        time.sleep(0.002)
    raise AssertionError(f"port {port} was never free")
