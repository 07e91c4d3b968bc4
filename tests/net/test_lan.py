"""Jobs on machines with a network between them: three nodes that share nothing but a cable (tests/lan.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster import HOSTILE, PLACE, Result, Workspace
from tests.lan import DIR, Lan

pytestmark = [pytest.mark.net, pytest.mark.root]

EXAMPLES = Path(__file__).resolve().parents[2] / "cluster-examples"
GO = f"{DIR}/go"
WAIT = f"""
import os, time
print("ready", flush=True)
while not os.path.exists("{GO}"): time.sleep(0.05)
"""


def go(lan: Lan) -> None:
    for node in lan.nodes:
        node.path(DIR).mkdir(exist_ok=True)
        node.path(GO).touch()


def ready(workspace: Workspace, num_workers: int) -> None:
    workspace.until(lambda: workspace.printed("ready") == num_workers, f"{num_workers} workers")


def test_the_nodes_are_machines_of_their_own(lan: Lan, workspace: Workspace) -> None:
    """What the other tests rely on, seen through the ssh that everybody has."""
    config = str(workspace.root / "home/.ssh/config")

    def ssh(name: str, command: str) -> str:
        argv = ("ssh", "-F", config, "-o", "ConnectTimeout=3", "-o", "BatchMode=yes", name, command)
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout

    n1, n2, _ = lan.nodes
    assert ssh("n1", "hostname; hostname -i; echo $HOME; ls -A ~ /tmp /var/tmp").split()[:3] == ["n1", "127.0.1.1", "/run/root"]
    names = re.findall(r"^\d+: (\w+)", ssh("n2", "ip -o link"), re.MULTILINE)
    assert names.index("docker0") < names.index("dead0") < names.index("eth0")
    with lan.cut(n1):
        assert ssh("n1", "echo here") == "" and ssh("n2", "echo here") == "here\n"
    assert ssh("n1", "echo here") == "here\n"
    lan.firewall(n2)
    listening = subprocess.Popen(n2.inside("python3", "-m", "http.server", "80"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        reach = f"timeout 1 bash -c 'until (: </dev/tcp/{n2.address}/80); do sleep 0.05; done' 2>/dev/null && echo open"
        assert ssh("n1", reach) == "" and ssh("n2", "echo here") == "here\n"
        lan.heal()
        assert ssh("n1", reach) == "open\n"
    finally:
        listening.kill()
        listening.wait()
    lan.hide(n2)
    assert ssh("n2", "echo here") == ""
    lan.heal()
    ssh("n2", "touch /tmp/forgotten; setsid sleep 600 >/dev/null 2>&1 &")
    workspace.until(lambda: "sleep 600" in n2.processes().values(), "the process that this test forgets")
    assert n2.files() == {"/tmp/forgotten"}
    n2.wipe()
    assert n2.files() == set()
    workspace.until(lambda: "sleep 600" not in n2.processes().values(), "its end")


def test_digits_train_on_three_machines(lan: Lan, workspace: Workspace) -> None:
    shutil.copy(EXAMPLES / "digits.yaml", workspace.workdir)
    result = workspace.dtrain("launch", "digits.yaml", "--cluster", "lan.yaml")
    assert result.code == 0, result.err
    accuracy = re.search(r"^test accuracy ([0-9.]+)%$", result.err, re.MULTILINE)
    assert accuracy is not None and float(accuracy[1]) >= 95, result.err
    assert "cluster size 3 = 3 instances x 1 GPU per instance" in result.err
    status = workspace.status("digits")
    assert [(node["node"], [rank["rank"] for rank in node["ranks"]]) for node in status["nodes"]] == [("n1", [0]), ("n2", [1]), ("n3", [2])]
    for rank, node in enumerate(lan.nodes):
        assert f"rank{rank}.log" in os.listdir(node.path(f"{DIR}/jobs/{status['job']}/{node.name}/logs"))


def test_every_rank_knows_its_place_on_its_machine(lan: Lan, workspace: Workspace) -> None:
    """1 + 3 workers. Names mean 127.0.1.1 here, and of three interfaces only the last leads anywhere."""
    workspace.write("place.py", PLACE)
    cluster = lan.cluster("{host: n1, gpus: 1}, {host: n2, gpus: 3}")
    workspace.write("uneven.yaml", cluster)
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: place.py\ncluster: uneven.yaml\n"))
    assert result.code == 0, result.err
    seen = {int(line[1]): json.loads(line[4:]) for line in workspace.dtrain("logs").out.splitlines() if line[4:6] == '["'}
    first = lan.nodes[0].address
    assert seen == {
        0: ["n1", 6.0, "0", "4", "0", "1", "0", first, "eth0", "=eth0"],
        1: ["n2", 6.0, "1", "4", "0", "3", "1", first, "eth0", "=eth0"],
        2: ["n2", 6.0, "2", "4", "1", "3", "1", first, "eth0", "=eth0"],
        3: ["n2", 6.0, "3", "4", "2", "3", "1", first, "eth0", "=eth0"],
    }


def test_a_dying_worker_stops_the_other_machines(lan: Lan, workspace: Workspace) -> None:
    """Instances may also be addresses."""
    workspace.write(
        "die.py",
        "import os, subprocess, time\n"
        "subprocess.Popen(['setsid', 'sleep', '600'])\n"
        "if os.environ['RANK'] == '1': os._exit(3)\n"
        "time.sleep(600)\n",
    )
    workspace.write("addresses.yaml", lan.cluster(", ".join(node.address for node in lan.nodes)))
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: die.py\ncluster: addresses.yaml\ngrace: 5\n"))
    assert result.code == 3, result.err
    assert f"rank 1 on {lan.nodes[1].address} failed with exit code 3" in result.err
    workspace.until(lambda: lan.processes() == {}, "the other nodes to stop", timeout_s=5.0)


def test_hosts_that_cannot_be_reached_are_named_and_nothing_starts(lan: Lan, workspace: Workspace) -> None:
    """One refuses, one is a black hole; the third is well, and remains untouched."""
    workspace.write("train.py", "print('started')\n")
    lan.hide(lan.nodes[2])
    workspace.write("partly.yaml", lan.cluster("n1, {host: n2, ssh: {port: 2222}}, n3"))
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: train.py\ncluster: partly.yaml\n"))
    assert result.code == 69, result.err
    assert re.search(rf"n2.*{re.escape(lan.nodes[1].address)}.*2222.*refused", result.err, re.IGNORECASE), result.err
    assert re.search(rf"n3.*{re.escape(lan.nodes[2].address)}", result.err), result.err
    assert "hint: " in result.err and "Traceback" not in result.err
    assert "started" not in result.err
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)
    assert not lan.nodes[0].path(f"{DIR}/jobs").exists() or not list(lan.nodes[0].path(f"{DIR}/jobs").iterdir())


def test_ctrl_c_does_not_wait_for_a_node_that_does_not_answer(lan: Lan, workspace: Workspace) -> None:
    lan.hide(lan.nodes[2])
    workspace.write("train.py", "print('started')\n")
    launch = workspace.start("launch", workspace.write("job.yaml", "script: train.py\ncluster: lan.yaml\n"))
    workspace.until(lambda: lan.nodes[0].processes(), "the session on the first node")
    launch.send_signal(signal.SIGINT)
    began = time.monotonic()
    result = workspace.wait(launch)
    assert result.code == 130 and "Traceback" not in result.err, result.err
    assert time.monotonic() - began < 5  # the node would hold it up for 10
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)


def test_a_node_without_room_for_dtrain_itself(lan: Lan, workspace: Workspace) -> None:
    full = lan.nodes[1]
    full.path("/var/tmp/full").mkdir()
    with full.small_disk("/var/tmp/full", "64k"):
        workspace.write("train.py", "print('started')\n")
        workspace.write("full.yaml", lan.cluster(dir="/var/tmp/full/dtrain"))
        result = workspace.dtrain("launch", workspace.write("job.yaml", "script: train.py\ncluster: full.yaml\n"))
        assert result.code == 73, result.err
        assert "n2: No space left on device" in result.err and "hint: make room there" in result.err
        assert not list(full.path("/var/tmp/full/dtrain/bundles").iterdir())
    for node in lan.nodes:
        shutil.rmtree(node.path("/var/tmp/full"))


def test_a_firewall_between_the_nodes_is_found_before_anything_starts(lan: Lan, workspace: Workspace) -> None:
    workspace.write("train.py", "print('started')\n")
    for node in lan.nodes:
        lan.firewall(node)
    began = time.monotonic()
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: train.py\ncluster: lan.yaml\n"))
    assert result.code == 78, result.err
    assert "n2" in result.err and lan.nodes[0].address in result.err and "hint: " in result.err and "Traceback" not in result.err
    assert "started" not in result.err
    assert time.monotonic() - began < 40
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)


def test_a_path_that_loses_larger_packets_is_found_before_anything_starts(lan: Lan, workspace: Workspace) -> None:
    """Logins and handshakes go through there; the first tensors would not."""
    lan.lose_large_packets(lan.nodes[1])
    workspace.write("train.py", "print('started')\n")
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: train.py\ncluster: lan.yaml\n"))
    assert result.code == 78 and "started" not in result.err, result.err
    assert re.search(r"n2: .*larger packets are lost \(MTU\)", result.err), result.err


def test_a_node_behind_a_bastion(lan: Lan, workspace: Workspace) -> None:
    workspace.write("place.py", PLACE)
    lan.hide(lan.nodes[2])
    workspace.write("inner.yaml", lan.cluster("n2, {host: n3, ssh: {proxy_jump: n1}}"))
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: place.py\ncluster: inner.yaml\n"))
    assert result.code == 0, result.err
    assert '[1] ["n3", 1.0, "1", "2"' in result.err
    assert not lan.nodes[0].path(DIR).exists()


def test_values_arrive_byte_for_byte_past_noisy_shells(lan: Lan, workspace: Workspace) -> None:
    """Nothing of the user's passes through the login shell, whatever its start-up file prints or does."""
    lan.greet(lan.nodes[0], "echo 'Welcome to n1!'; echo warning: old kernel >&2; printf '\\0\\1DTRAIN'\n")
    lan.greet(lan.nodes[1], "yes | head -c 20000; cd /; alias python3=false; set -f\n")
    workspace.write(
        "tell.py", "import json, os, sys\njson.dump([sys.argv[1:], os.environ['VALUE'], os.environ['TYPED']], open('out/told.json', 'w'))\n"
    )
    value = "".join(HOSTILE)
    job = json.dumps({"script": "tell.py", "cluster": "lan.yaml", "args": HOSTILE, "env": {"VALUE": value, "TYPED": "?"}})
    result = workspace.dtrain("launch", workspace.write("job.yaml", job.replace('"?"', "1e-4")), "--", "--lr", "a  b")
    assert result.code == 0, result.err
    assert workspace.dtrain("fetch", "--to", workspace.root / "fetched").code == 0
    for node in lan.nodes:
        told = json.loads((workspace.root / f"fetched/{node.name}/told.json").read_text())
        assert told == [[*HOSTILE, "--lr", "a  b"], value, "1e-4"]


def test_two_jobs_at_once_and_a_look_from_another_shell(lan: Lan, workspace: Workspace) -> None:
    workspace.write("wait.py", WAIT)
    long = workspace.start("launch", workspace.write("long.yaml", "name: long\nscript: wait.py\ncluster: lan.yaml\n"))
    ready(workspace, 3)
    running = workspace.status("long")
    assert (running["state"], running["exit_code"]) == ("RUNNING", None)
    assert [(node["node"], rank["state"]) for node in running["nodes"] for rank in node["ranks"]] == [
        ("n1", "RUNNING"),
        ("n2", "RUNNING"),
        ("n3", "RUNNING"),
    ]
    workspace.write("fail.py", "import os\nos._exit(4 * (os.environ['RANK'] == '2'))\n")
    assert workspace.dtrain("launch", workspace.write("short.yaml", "name: short\nscript: fail.py\ncluster: lan.yaml\n")).code == 4
    assert workspace.dtrain("logs", "long", "--ranks", "2").out == "[2] ready\n"
    go(lan)
    assert workspace.wait(long).code == 0
    assert workspace.status("long")["state"] == "SUCCEEDED"


def test_a_killed_launcher_leaves_nothing_once_the_lease_is_over(lan: Lan, workspace: Workspace) -> None:
    """And a job whose launcher lives may take longer than its lease."""
    workspace.write("wait.py", WAIT)
    workspace.write("two.yaml", lan.cluster("n1, n2"))
    text = "launcher: none\nscript: wait.py\ncluster: two.yaml\ngrace: 1\n"
    kept = workspace.start("launch", workspace.write("kept.yaml", f"name: kept\n{text}"), "--lease", "3")
    ready(workspace, 2)
    leased = workspace.start("launch", workspace.write("leased.yaml", f"name: leased\n{text}"), "--lease", "5")
    ready(workspace, 2 + 2)
    job = workspace.status("leased")["job"]
    leased.send_signal(signal.SIGKILL)
    leased.communicate()

    def left() -> bool:
        return any(job in command for found in lan.processes().values() for command in found.values())

    assert left()
    workspace.until(lambda: not left(), "the lease to end the job", timeout_s=30)
    workspace.until(lambda: workspace.status("leased")["state"] == "STOPPED", "the nodes to be asked")
    assert workspace.status("kept")["state"] == "RUNNING"
    go(lan)
    assert workspace.wait(kept).code == 0


def test_the_working_directory_goes_once_and_outputs_come_home(lan: Lan, workspace: Workspace) -> None:
    workspace.write("data.bin", "x" * (1 << 20))
    workspace.write("build/big.bin", "ignored")
    workspace.write(".gitignore", "build/\n")
    workspace.write(
        "keep.py",
        "import os\n"
        "print(os.path.getsize('data.bin'), os.path.exists('build'))\n"
        "open(f'out/rank{os.environ[\"NODE_RANK\"]}.txt', 'a').write('x')\n",
    )
    job = workspace.write("job.yaml", "name: keeps\nlauncher: none\nscript: keep.py\ncluster: lan.yaml\n")

    def blobs() -> set[tuple[str, int, int]]:
        paths = [path for node in lan.nodes for path in node.path(f"{DIR}/blobs").rglob("*") if path.is_file()]
        return {(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}

    assert workspace.dtrain("launch", job).code == 0
    first = blobs()
    assert len(first) >= 3 * 3
    result = workspace.dtrain("launch", job)
    assert result.code == 0, result.err
    assert blobs() == first
    assert [f"[{rank}] {1 << 20} False" in result.err for rank in range(3)] == [True] * 3
    assert workspace.dtrain("fetch", "keeps").code == 0
    assert [(workspace.workdir / f"out/n{rank + 1}/rank{rank}.txt").read_text() for rank in range(3)] == ["xx"] * 3


def test_a_folder_that_all_nodes_share_is_not_sent(lan: Lan, workspace: Workspace) -> None:
    for node in lan.nodes:
        shared = node.path(f"{DIR}/shared")
        shared.mkdir(parents=True)
        (shared / "show.py").write_text("import os\nprint('in', os.getcwd())\n")
    text = f"launcher: none\nscript: show.py\ncluster: lan.yaml\nsync: false\nworkdir: {DIR}/shared\n"
    result = workspace.dtrain("launch", workspace.write("job.yaml", text))
    assert result.code == 0, result.err
    assert [f"[{rank}] in {DIR}/shared" in result.err for rank in range(3)] == [True] * 3
    assert not any(node.path(f"{DIR}/blobs").exists() and list(node.path(f"{DIR}/blobs").iterdir()) for node in lan.nodes)


def test_the_benchmark_across_three_machines(lan: Lan, workspace: Workspace) -> None:
    result = workspace.dtrain("benchmark-allreduce", "lan.yaml")
    assert result.code == 0, result.err
    assert rows(result) and all(row.split()[-1] == "0" for row in rows(result)), result.err


def rows(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if re.match(r" +[0-9.]+ [KMG]iB ", line)]


def test_a_pipeline_of_four_machines(lan: Lan, workspace: Workspace) -> None:
    """One stage on each, of the example as it stands: the loss falls, and stands on rank 0's line, though the last stage has it."""
    four = Lan(workspace.root / "four", num_nodes=4)
    try:
        four.admit(workspace.root / "home")
        workspace.write("four.yaml", four.cluster())
        for name in ("pipeline.yaml", "local.yaml"):
            shutil.copy(EXAMPLES / name, workspace.workdir)
        result = workspace.dtrain("launch", "pipeline.yaml", "--cluster", "four.yaml", timeout_s=170)
        assert result.code == 0, result.err
        losses = [float(loss) for loss in re.findall(r"iteration \d+/60 .*loss ([0-9.]+)", result.err)]
        assert len(losses) >= 2 and losses[-1] < losses[0] - 1, result.err
        assert [rank["rank"] for node in workspace.status("pipeline")["nodes"] for rank in node["ranks"]] == [0, 1, 2, 3]
        workspace.until(lambda: four.processes() == {}, "the machines to be idle", timeout_s=5.0)
    finally:
        four.close()
    assert four.remains() == []


def test_a_workdir_that_did_not_fit_is_not_in_the_way_of_one_that_does(lan: Lan, workspace: Workspace) -> None:
    small = lan.nodes[1]
    small.path("/var/tmp/small").mkdir()
    with small.small_disk("/var/tmp/small", "12m"):
        workspace.write("train.py", "print('started')\n")
        workspace.write("small.yaml", lan.cluster(dir="/var/tmp/small/dtrain"))
        job = workspace.write("job.yaml", "launcher: none\nscript: train.py\ncluster: small.yaml\n")
        for size in (7_000_000, 14_000_000):  # its contents fit, and its tree does not; or not even they
            workspace.write("large", os.urandom(size // 2).hex())
            result = workspace.dtrain("launch", job)
            assert result.code == 73, result.err
            assert "n2: No space left on device: /var/tmp/small/dtrain" in result.err
            assert not [path for path in small.path("/var/tmp/small/dtrain/blobs").rglob("*") if path.is_file()]
            assert not any(small.path("/var/tmp/small/dtrain/jobs").glob("*"))
        workspace.write("large", os.urandom(2_000_000).hex())
        result = workspace.dtrain("launch", job)
        assert result.code == 0, result.err
    for node in lan.nodes:
        shutil.rmtree(node.path("/var/tmp/small"))
