"""Jobs looked after from a machine that did not launch them, and has only ssh and the cluster file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.store import JobRecord
from tests.cluster import Result, Workspace
from tests.lan import Lan

pytestmark = pytest.mark.net

SHORT = """
import os
rank = os.environ["NODE_RANK"]
print("hello of", rank, flush=True)
open(os.path.join(os.environ["DTRAIN_OUTPUT_DIR"], "result"), "w").write(rank)
"""


def at(workspace: Workspace) -> dict[str, str]:
    """As another user on another machine, whose store knows nothing."""
    return {"XDG_STATE_HOME": str(workspace.root / "elsewhere"), "LOGNAME": "eva"}


def elsewhere(workspace: Workspace, *args: str | Path, cwd: Path | None = None) -> Result:
    return workspace.dtrain(*args, env=at(workspace), cwd=cwd)


@pytest.mark.root
def test_the_nodes_know_their_jobs(lan: Lan, workspace: Workspace) -> None:
    on_lan = ("--cluster", "lan.yaml")
    nobody = elsewhere(workspace, "logs", *on_lan)
    assert nobody.code == 66 and "the nodes of lan.yaml know no job" in nobody.err
    workspace.write("short.py", SHORT)
    workspace.write("sleep.py", "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    short = workspace.write("short.yaml", "name: short\nlauncher: none\nscript: short.py\ncluster: lan.yaml\nsecrets: [TOKEN]\ngrace: 1\n")
    assert workspace.dtrain("launch", short, "--nodes", "n1,n2", env={"TOKEN": "s3cr3t"}).code == 0
    long = workspace.write("long.yaml", "name: long\nlauncher: none\nscript: sleep.py\ncluster: lan.yaml\ngrace: 1\n")
    launched = workspace.dtrain("launch", long, "--detach")
    assert launched.code == 0, launched.err
    job = launched.out.strip()
    kept = [path for node in lan.nodes for path in node.root.glob("var/tmp/dtrain-0/jobs/*/*/record")]
    assert len(kept) == 5 and not any(b"s3cr3t" in zlib.decompress(path.read_bytes()) for path in kept)

    listed = elsewhere(workspace, "status", *on_lan)
    rows = [line.split()[1:4] for line in listed.out.splitlines()]
    assert rows == [["name", "state", "size"], ["long", "RUNNING", "3"], ["short", "SUCCEEDED", "2"]], listed.out + listed.err
    assert "--nodes n1,n2" in listed.out and listed.out.count("@") == 2
    assert elsewhere(workspace, "status").err == "no job was launched from here yet\n"  # a look takes nothing up
    told = json.loads(elsewhere(workspace, "status", "short", *on_lan, "--json").out)["jobs"][0]
    ranks = [rank["exit_code"] for node in told["nodes"] for rank in node["ranks"]]
    assert (told["exit_code"], told["overrides"], ranks) == (0, ["--nodes n1,n2"], [0, 0])

    logs = elsewhere(workspace, "logs", "short", *on_lan)
    assert logs.out == "[0] hello of 0\n[1] hello of 1\n", logs.err
    assert elsewhere(workspace, "fetch", "short", *on_lan, "--to", "got").code == 0
    assert [(workspace.workdir / "got" / node / "result").read_text() for node in ("n1", "n2")] == ["0", "1"]
    here = workspace.root / "here"
    here.mkdir()
    by_itself = elsewhere(workspace, "fetch", "short", cwd=here)
    assert by_itself.code == 0 and "n1: 1 file in out/n1, 1 of them new" in by_itself.err, by_itself.err
    assert (here / "out/n2/result").read_text() == "1" and not (workspace.workdir / "out").exists()  # though that is a folder here too
    ended = elsewhere(workspace, "attach", "short", *on_lan)
    assert ended.code == 0 and "SUCCEEDED" in ended.err, ended.err
    log = workspace.root / "attach.log"
    attached = workspace.start("attach", "long", *on_lan, env=at(workspace), log=log)
    workspace.until(lambda: log.read_text().count("ready") == 3, "the lines of the running job")
    refused = elsewhere(workspace, "stop", *on_lan)
    assert refused.code == 2 and "was launched by " in refused.err and "--force" in refused.err
    stopped = elsewhere(workspace, "stop", *on_lan, "--force")
    assert stopped.code == 0 and f"job long {job} STOPPED" in stopped.err, stopped.err
    assert attached.wait(timeout=30) == 143
    assert workspace.status("long")["state"] == "STOPPED"
    idle = elsewhere(workspace, "stop", *on_lan)
    assert idle.code == 66 and "no job is running on the nodes of lan.yaml" in idle.err

    with lan.cut(lan.nodes[2]):
        rest = elsewhere(workspace, "status", *on_lan)
    assert rest.code == 0 and "n3: " in rest.err and "short" in rest.out
    part = elsewhere(workspace, "status", "--cluster", workspace.write("two.yaml", lan.cluster("n1, n2")))
    assert f"job {job} is left out: it has nodes that the cluster file does not name: n3" in part.err
    assert [line.split()[1] for line in part.out.splitlines()] == ["name", "short"]


@pytest.mark.root
def test_a_node_that_does_not_answer(lan: Lan, workspace: Workspace) -> None:
    """It is named, and nothing is claimed of it; what the others have is there as soon as it was given up on."""
    workspace.write("stay.py", SHORT + "import time\ntime.sleep(600)\n")
    workspace.write("job.yaml", "name: stays\nlauncher: none\nscript: stay.py\ncluster: lan.yaml\ngrace: 1\n")
    launched = workspace.dtrain("launch", "--detach")
    assert launched.code == 0, launched.err
    lan.hide(lan.nodes[2])
    stores = {name: {"XDG_STATE_HOME": str(workspace.root / name), "LOGNAME": "eva"} for name in ("one", "two", "three", "four", "five")}
    asked = [("status",), ("status", "stays"), ("status", "--json"), ("logs",), ("fetch", "--to", "got")]
    begun = [workspace.start(*args, "--cluster", "lan.yaml", env=env) for args, env in zip(asked, stores.values(), strict=True)]
    log = workspace.root / "attach.log"
    attach = workspace.start("attach", "--cluster", "lan.yaml", env=at(workspace), log=log)
    listed, one, data, logs, fetched = (workspace.wait(process) for process in begun)
    for result in (listed, one, data, logs, fetched):
        assert result.err.count("n3: no answer from ") + result.out.count("n3 was not asked: ") >= 1, result
    assert (listed.code, listed.out.splitlines()[1].split()[1:4]) == (0, ["stays", "RUNNING", "3"]), listed.out
    assert "n3    UNKNOWN  2" in one.out and "not seen from here yet" in one.out, one.out
    told = json.loads(data.out)["jobs"][0]
    assert (told["state"], [node["state"] for node in told["nodes"]]) == ("RUNNING", ["RUNNING", "RUNNING", "UNKNOWN"])
    assert told["nodes"][2]["last_seen_at"] is None and told["nodes"][2]["ranks"][0]["state"] == "UNKNOWN"
    assert (logs.code, logs.out) == (0, "[0] hello of 0\n[1] hello of 1\n") and logs.err.count("n3") == 1, logs
    assert fetched.code == 69 and "n2: 1 file in got/n2, 1 of them new" in fetched.err, fetched.err
    workspace.until(lambda: log.read_text().count("hello of") == 2, "the lines of the others")
    assert "n3: no answer from " in log.read_text()
    attach.send_signal(signal.SIGINT)
    assert attach.wait(timeout=30) == 130
    lan.heal()
    assert workspace.dtrain("stop").code == 0


def test_who_follows_from_elsewhere_is_not_the_launcher(workspace: Workspace) -> None:
    """A lease ends though somebody looks on."""
    job = workspace.waiting_job("leased")
    cluster = here(workspace)
    launch = workspace.start("launch", job, "--lease", "5")
    workspace.until(lambda: workspace.printed("ready") == 2, "the workers to run")
    launch.send_signal(signal.SIGKILL)
    launch.communicate()
    followed = elsewhere(workspace, "logs", "--cluster", cluster, "--follow")
    assert followed.code == 0 and sorted(followed.out.splitlines()) == ["[0] ready", "[1] ready"], followed.err
    assert "STOPPED" in followed.err
    assert workspace.leftovers() == {}


def here(workspace: Workspace, instances: int = 2) -> Path:
    return workspace.write("here.yaml", f"instances: {instances}\ngpus_per_instance: 1\ndevice: cpu\ndir: {workspace.nodes}\n")


def test_a_damaged_job_harms_no_other(workspace: Workspace) -> None:
    """It is left out with a line, and where another job is meant without one."""
    workspace.write("short.py", SHORT)
    job = workspace.job("name: short\nlauncher: none\nscript: short.py\n", instances=1)
    assert workspace.dtrain("launch", job).code == 0
    jobs = workspace.nodes / "jobs"
    (good,) = os.listdir(jobs)
    copies = {name: jobs / name / "node0" for name in ("another", "bomb", "fifo", "folder", "gone", "pipe", "text")}
    record = JobRecord.imported((jobs / good / "node0/record").read_bytes())
    for name, copy in copies.items():
        shutil.copytree(jobs / good, copy.parent, ignore=shutil.ignore_patterns("sock"))
        (copy / "record").write_bytes(replace(record, job=good if name == "another" else name).exported())
    (copies["bomb"] / "record").write_bytes(zlib.compress(bytes(65 << 20)))
    (copies["text"] / "record").write_bytes(zlib.compress(b'{"created_at": "now"}'))
    for path, make in (
        (copies["fifo"] / "record", os.mkfifo),
        (copies["pipe"] / "events.jsonl", os.mkfifo),
        (copies["folder"] / "events.jsonl", os.mkdir),
    ):
        path.unlink()
        make(path)
    (workspace.nodes / "unsettled").mkdir(exist_ok=True)
    (workspace.nodes / "unsettled/pipe.node0").touch()  # a session looks what became of it
    two_nodes = record.plan_json.replace(
        '"nodes":[', '"nodes":[' + json.dumps(json.loads(record.plan_json)["nodes"][0]).replace("node0", "node1") + ","
    )
    (copies["gone"] / "record").write_bytes(replace(record, job="gone", name="older", plan_json=two_nodes, created_at=1.0).exported())
    events = jobs / good / "node0/events.jsonl"
    damaged = ('{"type": "NodeLost", "at": 1.0, "node": "zzz", "text": ""}', '{"type": "LeaseLifted", "at": "now"}', "[" * 100_000)
    events.write_text("\n".join((*damaged, events.read_text())))
    on_here = ("--cluster", here(workspace))
    listed = elsewhere(workspace, "status", *on_here)
    assert (listed.code, [line.split()[:3] for line in listed.out.splitlines()[1:]]) == (0, [[good, "short", "SUCCEEDED"]]), listed
    left_out = dict(line.removeprefix("job ").split(" is left out: ") for line in listed.err.splitlines())
    whys = {
        "another": f"node0: its record there is that of job {good}",
        "bomb": "node0: its record there is damaged, or another version of dtrain launched it (it is cut off, or larger than any)",
        "fifo": f"node0: Not a file: {copies['fifo']}/record",
        "folder": f"node0: Is a directory: {copies['folder']}/events.jsonl; node1: Is a directory: {copies['folder']}/events.jsonl",
        "gone": "it is over, and node1 has removed what it kept of it",
        "pipe": f"node0: Not a file: {copies['pipe']}/events.jsonl; node1: Not a file: {copies['pipe']}/events.jsonl",
    }
    assert left_out.pop("text").startswith(
        "node0: its record there is damaged, or another version of dtrain launched it (job: Field required"
    )
    assert left_out == whys

    logs = elsewhere(workspace, "logs", "short", *on_here)
    assert (logs.code, logs.out, logs.err) == (0, "[0] hello of 0\n", "")
    older = elsewhere(workspace, "logs", "older", *on_here)
    assert older.code == 66 and f"job gone is left out: {whys['gone']}\n" in older.err and older.err.count("left out") == 1, older.err
    nosuch = elsewhere(workspace, "stop", "nosuch", *on_here)
    assert nosuch.code == 66 and nosuch.err.splitlines() == [
        "error: no job has the id or name nosuch",
        f"hint: dtrain status --cluster {on_here[1]} lists them",
    ]


def test_a_record_that_lies_has_nothing_written_elsewhere(workspace: Workspace) -> None:
    """By the names in it the outputs would replace what is in V/bin."""
    workspace.write("short.py", SHORT)
    job = workspace.job("name: short\nlauncher: none\nscript: short.py\n", instances=1)
    assert workspace.dtrain("launch", job).code == 0
    venv, below = workspace.root / "venv", workspace.root / "below"
    for folder in (venv / "x", venv / "bin", below):
        folder.mkdir(parents=True)
    (at_launch,) = (workspace.nodes / "jobs").glob("*/node0")
    lying = at_launch.rename(at_launch.parent / "bin")
    (workspace.nodes / "outputs/short/node0").rename(workspace.nodes / "outputs/short/bin")
    record = JobRecord.imported((lying / "record").read_bytes())
    lie = replace(record, workdir=venv / "x", outputs="..", plan_json=record.plan_json.replace("node0", "bin"))
    (lying / "record").write_bytes(lie.exported())
    fetched = elsewhere(workspace, "fetch", "short", "--cluster", here(workspace, 1), cwd=below)
    assert fetched.code == 0 and "bin: 1 file in out/bin, 1 of them new" in fetched.err, fetched.err
    assert (below / "out/bin/result").read_text() == "0" and not [*venv.glob("*/*")]
