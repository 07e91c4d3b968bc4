"""What a person types wrongly: one message, the right exit code, no traceback, and nothing started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net


@pytest.mark.parametrize(
    ("job", "where", "message"),
    [
        (None, "job.yaml", "there is no such file"),
        ("", "job.yaml:1:1", "the file is empty"),
        ("script: [", "job.yaml:1:10", "not YAML"),
        ("adress: x\nscript: train.py\n", "job.yaml:1:1", "unknown key 'adress'"),
        ("script: trian.py\n", "job.yaml:1:9", "script 'trian.py' is not there"),
        ("script: train.py\ncluster: lab.yaml\n", "job.yaml:2:10", "'lab.yaml' is not there"),
    ],
)
def test_a_wrong_job_file(workspace: Workspace, job: str | None, where: str, message: str) -> None:
    workspace.write("train.py", "")
    if job is not None:
        workspace.write("job.yaml", job)
    result = workspace.dtrain("launch")
    assert result.code == 65
    assert result.err.startswith(f"error: {where}")
    assert message in result.err and "hint: " in result.err
    assert "Traceback" not in result.err and result.out == ""
    assert not (workspace.root / "state/dtrain/jobs").exists()


def test_a_batch_that_does_not_fit_what_the_nodes_have(workspace: Workspace) -> None:
    """How many workers `auto` means is known once the node was asked; nothing has started by then."""
    trainer = "trainer: {model: digits_cnn, data: digits, epochs: 1, batch: {global: 63}}\n"
    workspace.write("job.yaml", f"{trainer}cluster: {{instances: 1, dir: {workspace.nodes}}}\n")
    result = workspace.dtrain("launch")
    assert result.code == 65
    assert "error: job.yaml:1:71" in result.err and "63" in result.err and "hint: " in result.err
    assert "Traceback" not in result.err and result.out == ""
    assert not (workspace.root / "state/dtrain/jobs").exists()


def test_a_wrong_command_line(workspace: Workspace) -> None:
    for args in (["lanch"], ["launch", "--clustr", "x"], ["launch", "--json"], ["logs", "--ranks", "a"]):
        result = workspace.dtrain(*args)
        assert result.code == 2, args
        assert "Error: " in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            "launch job.yaml --epochs 3 --detach --lr=3 -- a",
            "No such option '--epochs'. What is for the script goes behind --: dtrain launch job.yaml --detach -- --epochs 3 --lr=3 a",
        ),
        ("launch --clustr x", "No such option '--clustr'. Did you mean '--cluster'? What is for the script"),
        ("launch --hosts a,b", "No such option '--hosts'. Did you mean '--nodes'?"),
        ("check --hosts a,b", "No such option '--hosts'. Did you mean '--nodes'?"),
        ("benchmark-allreduce --hosts a,b", "No such option '--hosts'. Did you mean '--nodes'?"),
        ("launch job.yaml --nodes a b", "Got unexpected extra argument (b): names of nodes are separated by commas"),
    ],
)
def test_what_is_meant_by_an_option_that_is_none(workspace: Workspace, args: str, told: str) -> None:
    result = workspace.dtrain(*args.split())
    assert result.code == 2 and told in result.err, result.err


def test_a_node_behind_a_blank_is_no_job_file(workspace: Workspace) -> None:
    result = workspace.dtrain("launch", "--nodes", "gpu1.lab", "gpu2.lab")
    assert (result.code, result.err) == (
        65,
        "error: gpu2.lab: there is no such file\nhint: names of nodes are separated by commas, such as --nodes A,B\n",
    )


def test_no_such_job(workspace: Workspace) -> None:
    for command in ("status", "logs", "stop", "fetch"):
        result = workspace.dtrain(command, "nothing")
        assert (result.code, result.out) == (66, "")
        assert "no job has the id or name nothing" in result.err and "hint: " in result.err


def test_torch_missing_in_the_nodes_python(workspace: Workspace) -> None:
    """A Python of its own without torch: found before anything starts."""
    bare = workspace.root / "bare"
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", str(bare)), check=True)
    workspace.write("train.py", "")
    job = workspace.write("job.yaml", f"script: train.py\ncluster: {{instances: 2, dir: {workspace.nodes}, python: {bare}/bin/python}}\n")
    result = workspace.dtrain("launch", job)
    assert result.code == 78
    assert f"node0, node1: torch is not installed for {bare}/bin/python" in result.err
    assert "-m pip install torch" in result.err and "Traceback" not in result.err
    job.write_text(job.read_text().replace("bare/bin/python", "nowhere/python"))
    result = workspace.dtrain("launch", job)
    assert result.code == 78
    assert "there is no Python at" in result.err
    for folder in ("bare", "bare/bin/"):
        job.write_text(re.sub("python: .*}", f"python: {workspace.root}/{folder}}}", job.read_text()))
        result = workspace.dtrain("launch", job)
        assert result.code == 78 and f"{workspace.root}/{folder} is a folder, and no Python" in result.err
        assert f"hint: write python: {bare}/bin/python\n" in result.err
    assert workspace.dtrain("status").err == "no job was launched from here yet\n"


def test_a_model_that_only_the_nodes_can_look_for(workspace: Workspace) -> None:
    """What is not in workdir may be installed there: where it is not, the end says what was looked for, and where."""
    trainer = "trainer: {model: 'my_models:build', data: digits, epochs: 1}\n"
    result = workspace.dtrain("launch", workspace.job(trainer, instances=1))
    assert result.code == 1 and "hint: no exception and no signal ended it: its last lines may say why" in result.err
    assert "  error: model: 'my_models:build' names a module that does not exist: my_models\n" in result.err
    assert "  hint: it is looked for as my_models.py in the job's workdir, and among what " in result.err


def test_gpus_that_are_not_there(workspace: Workspace) -> None:
    workspace.write("train.py", "")
    cluster = f"cluster: {{instances: 1, gpus_per_instance: 2, device: cuda, dir: {workspace.nodes}}}\n"
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: train.py\n" + cluster), env={"PATH": "/usr/bin:/bin"})
    assert result.code in (75, 78)
    assert "node0: " in result.err and "hint: " in result.err


def test_a_node_folder_that_cannot_be_made(workspace: Workspace) -> None:
    workspace.write("train.py", "")
    workspace.write("file", "")
    cluster = f"cluster: {{instances: 1, dir: {workspace.workdir / 'file' / 'below'}}}\n"
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: train.py\n" + cluster))
    assert result.code == 78
    assert "node0: " in result.err and "Not a directory" in result.err and "Traceback" not in result.err


def test_a_dry_run_touches_nothing(workspace: Workspace) -> None:
    workspace.write("train.py", "")
    job = workspace.job("script: train.py\nargs: --lr 1e-4\nsecrets: [TOKEN]\n", gpus=2)
    result = workspace.dtrain("launch", job, "--dry-run", env={"TOKEN": "s3cr3t"})
    assert result.code == 0, result.err
    assert "cluster size 4 = 2 instances x 2 GPUs per instance" in result.out
    assert "--node-rank=1" in result.out and "train.py --lr 1e-4" in result.out and "TOKEN=***" in result.out
    assert "s3cr3t" not in result.out + result.err
    assert max(map(len, result.out.splitlines()[:6])) <= 80
    plan = json.loads(workspace.dtrain("launch", job, "--dry-run", "--json", env={"TOKEN": "x"}).out)
    assert [command["node"] for command in plan["commands"]] == ["node0", "node1"]
    assert not workspace.nodes.exists() and not (workspace.root / "state").exists()


def test_every_command_shows_an_example(workspace: Workspace) -> None:
    for command in ("", "launch", "status", "logs", "stop", "fetch", "benchmark-allreduce", "init", "schema"):
        result = workspace.dtrain(*command.split(), "-h")
        assert result.code == 0
        assert f"Example: dtrain {command}".rstrip() in result.out


def test_names_and_numbers_at_the_edge(workspace: Workspace) -> None:
    workspace.write("train.py", "")
    job = workspace.job("script: train.py\n")
    for value in ("inf", "nan", "0", "1e12"):
        assert workspace.dtrain("launch", job, "--lease", value).code == 2
    for value in ("5-2", "0-99999999999", "-1", ""):
        assert workspace.dtrain("logs", "--ranks", value).code == 2
    for grace in ("-1", "nan", "86401"):
        assert workspace.dtrain("stop", "--grace", grace).code == 2
    for command in ("status", "logs", "stop", "fetch"):
        assert workspace.dtrain(command, "\udcff").code == 66
    for outputs in ("train.py", "train.py/below"):
        result = workspace.dtrain("launch", workspace.job(f"script: train.py\noutputs: {outputs}\n"))
        assert result.code == 65 and "job.yaml:3:10: outputs" in result.err


def test_fetch_into_a_place_that_does_not_take_it(workspace: Workspace) -> None:
    workspace.write("keep.py", "open('out/kept', 'w').write('x')\n")
    assert workspace.dtrain("launch", workspace.job("script: keep.py\n", instances=1)).code == 0
    (workspace.root / "taken").mkdir()
    (workspace.root / "taken/node0").touch()
    for place in (workspace.root / "taken", "/proc/nowhere"):
        result = workspace.dtrain("fetch", "--to", place)
        assert result.code == 78
        assert "the outputs cannot be written" in result.err and "hint: " in result.err and "Traceback" not in result.err


def test_mistakes_are_data_for_scripts(workspace: Workspace) -> None:
    """On stdout as JSON, and for the person on stderr; of many mistakes the first 20 and their number."""
    keys = "".join(f"key{number}: x\n" for number in range(30))
    job = workspace.write("job.yaml", f"script: trian.py\n{keys}")
    workspace.write("train.py", "")
    result = workspace.dtrain("launch", job.name, "--dry-run", "--json", "--set", "grace=soon")
    assert result.code == 65 and "Traceback" not in result.err
    told = json.loads(result.out)
    assert (told["schema_version"], told["num_mistakes"], len(told["mistakes"])) == (1, 32, 20)
    assert told["mistakes"][0] == {
        "where": {"file": "job.yaml", "line": 1, "column": 9},
        "message": "script 'trian.py' is not there",
        "hint": "did you mean 'train.py'?",
    }
    assert result.err.count("unknown key") == 19 and result.err.endswith("and 12 more mistakes\n")
    job.write_text("script: train.py\n")
    result = workspace.dtrain("launch", "--dry-run", "--json", "--set", "grace=soon", "--nodes", "n1")
    assert result.code == 65
    assert [mistake["where"] for mistake in json.loads(result.out)["mistakes"]] == [{"option": "--set grace"}, {"option": "--nodes"}]
    result = workspace.dtrain("benchmark-allreduce", "none.yaml", "--json")
    assert result.code == 65
    assert json.loads(result.out)["mistakes"][0]["where"] == {"file": "none.yaml", "line": None, "column": None}
    batch = "trainer: {model: digits_cnn, data: digits, epochs: 1, batch: {global: 63}}\ncluster: {instances: 2, gpus_per_instance: 1}\n"
    result = workspace.dtrain("launch", workspace.write("batch.yaml", batch), "--dry-run", "--json")
    assert result.code == 65 and json.loads(result.out)["mistakes"][0]["where"]["column"] == 71


def test_any_other_error_is_data_too(workspace: Workspace) -> None:
    """Only where --json is dtrain's and not the job's."""
    workspace.write("job.yaml", "command: [echo]\n")
    for code, args, told in (
        (2, ("launch", "--dry-run", "--json", "--lease", "0"), "Invalid value for '--lease': 0 is not in the range 1<=x<=10000000."),
        (66, ("status", "none", "--json"), "no job has the id or name none"),
    ):
        result = workspace.dtrain(*args)
        error = json.loads(result.out)["error"]
        assert (result.code, error["message"], error["exit_code"]) == (code, told, code)
        assert error["hint"] == ("dtrain status lists them" if code == 66 else None) and told in result.err
    assert workspace.dtrain("launch", "--lease", "0", "--", "--json").out == ""


def test_the_next_step_where_there_is_no_job_file(workspace: Workspace) -> None:
    def told(*args: str) -> str:
        result = workspace.dtrain("launch", *args)
        assert result.code == 65, result.err
        return result.err

    assert told() == "error: job.yaml: there is no such file\nhint: `dtrain init` writes one\n"
    workspace.write("train.py", "import os\nif os.name:\n    print(f'on: {os.name}')\n")
    assert told().endswith("hint: `dtrain init` writes one that runs train.py\n")
    assert told("train.py").startswith("error: train.py: this is a Python script; a job file is wanted\nhint: write `script: train.py`")
    workspace.write("lab.yaml", "instances: [n1]\n")
    workspace.write("other.yaml", "a: [\n")
    assert told().endswith("; to run it on the machines of lab.yaml: `dtrain launch --cluster lab.yaml`\n")
    assert "hint: `dtrain launch job.yaml --cluster lab.yaml` runs a job on it, and `dtrain init` writes" in told("lab.yaml")
    workspace.write("my train.yaml", "script: train.py\n")
    assert told().endswith("hint: did you mean `dtrain launch 'my train.yaml'`?\n")


def test_what_a_launch_overrode_stands_in_its_status(workspace: Workspace) -> None:
    """The plan is that of the options, and the job's record says how it came to be."""
    workspace.write("show.py", "import os, sys\nprint(os.environ['A'], *sys.argv[1:])\n")
    job = workspace.job("script: show.py\nenv: {A: file}\nargs: [a]\n", instances=3)
    result = workspace.dtrain("launch", job.name, "--set", "env.A=08", "--exclude", "node[1-2]", "--", "b c")
    assert result.code == 0, result.err
    assert workspace.dtrain("logs").out == "[0] 08 a b c\n"
    status = workspace.status()
    assert status["overrides"] == ["--exclude 'node[1-2]'", "--set env.A=08", "-- 'b c'"]
    assert [node["node"] for node in status["nodes"]] == ["node0"]


def test_a_pipe_that_nobody_writes_to_is_answered_at_once(workspace: Workspace) -> None:
    os.mkfifo(workspace.workdir / "pipe")
    result = workspace.dtrain("launch", "pipe", timeout_s=30)
    assert result.code == 65
    assert result.err.startswith("error: pipe: is no ordinary file") and "hint: " in result.err
