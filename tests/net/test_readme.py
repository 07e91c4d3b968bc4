"""The README's commands, typed one after the other by somebody who has just cloned the project."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def _commands() -> list[str]:
    block = re.search(r"```sh\n(.*?)```", README, re.S)
    assert block is not None
    return block[1].splitlines()


def test_every_command_of_the_readme_works(workspace: Workspace) -> None:
    commands = _commands()
    assert len(commands) >= 7
    shutil.copytree(ROOT / "cluster-examples", workspace.workdir / "cluster-examples")
    local = workspace.workdir / "cluster-examples/local.yaml"
    local.write_text(local.read_text() + f"dir: {workspace.nodes}\n")  # else it would use the node folder of whoever runs this
    said = {}
    for command in commands:
        words, _, file = command.partition(" > ")
        result = workspace.dtrain(*shlex.split(words)[1:])
        assert result.code == 0, f"{command}\n{result.err}"
        if file:
            workspace.write(file, result.out)
        said[command] = result
    trained = said["dtrain launch cluster-examples/digits.yaml --cluster cluster-examples/local.yaml"].err
    accuracy = re.search(r"^test accuracy ([0-9.]+)%$", trained, re.M)
    assert accuracy is not None, trained
    assert float(accuracy[1]) >= 95
    assert "cluster size 4 = 2 instances x 2 GPUs per instance" in trained
    assert "global batch 48 = 4 replicas x per-replica batch 12" in trained
    assert re.search(r"iteration \d+/435 .* loss .* samples/s", trained)
    assert "\x1b" not in trained
    rows = [line for line in said[commands[-1]].err.splitlines() if re.match(r" +[0-9.]+ [KM]iB ", line)]
    assert len(rows) >= 8 and all(row.split()[-1] == "0" for row in rows), said[commands[-1]].err


def test_the_job_file_of_the_first_page_is_a_job_file(workspace: Workspace) -> None:
    text = re.search(r"```yaml\n# job.yaml\n(.*?)```", README, re.S)
    assert text is not None
    workspace.write("train.py", "print('trained')\n")
    on_cpus = f"gpus_per_instance: 1, device: cpu, dir: {workspace.nodes}}}"
    assert "gpus_per_instance: 2}" in text[1]
    workspace.write("job.yaml", text[1].replace("gpus_per_instance: 2}", on_cpus))
    assert workspace.dtrain("launch", "job.yaml").code == 0


def test_every_key_of_the_readme_is_known(workspace: Workspace) -> None:
    """The annotated job and cluster files, checked as they stand."""
    job, trainer, cluster = re.findall(r"```yaml\n((?:name|trainer|instances):.*?)```", README, re.S)
    workspace.write("train.py", "")
    workspace.write("lab.yaml", cluster)
    _own_key(workspace)
    env = {"HF_HOME": "x", "WANDB_API_KEY": "x"}
    for name, text in (("script.yaml", job), ("trainer.yaml", trainer + "cluster: lab.yaml\n")):
        result = workspace.dtrain("launch", workspace.write(name, text), "--dry-run", env=env)
        assert result.code == 0, result.err


def _own_key(workspace: Workspace) -> None:
    """The identity file that the examples name; nothing reads it but to see that it is there."""
    path = workspace.root / "home/.ssh/id_ed25519"
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)


def test_every_example_cluster_can_be_planned(workspace: Workspace) -> None:
    """Nothing is connected to: the plan says how many workers each machine has, and what only it can know is marked."""
    shutil.copytree(ROOT / "cluster-examples", workspace.workdir / "cluster-examples")
    _own_key(workspace)
    wanted = {
        "local": "2 instances x 2",
        "ssh": "24 = 3 instances x 8",
        "bastion": "24 = 3 instances x 8",
        "mixed-gpus": "16 = 8 + 4 + 4 GPUs",
    }
    jobs = {"script", "digits", "pipeline", "hybrid", "mpirun", "own-launcher"}
    assert {path.stem for path in (ROOT / "cluster-examples").glob("*.yaml")} == {*wanted, *jobs}
    assert {*re.findall(r"^\| \[(.*)\.yaml\]", README, re.M)} == {*wanted, *jobs}  # the README's tables of them
    for name, size in wanted.items():
        result = workspace.dtrain("launch", "cluster-examples/digits.yaml", "--dry-run", "--cluster", f"cluster-examples/{name}.yaml")
        assert (result.code, size in result.out) == (0, True), result.out + result.err
    my_cluster = re.search(r"```yaml\n# my-cluster.yaml\n(.*?)```", README, re.S)
    assert my_cluster is not None
    workspace.write("my-cluster.yaml", my_cluster[1])
    result = workspace.dtrain("launch", "cluster-examples/digits.yaml", "--dry-run", "--cluster", "my-cluster.yaml")
    assert "16 = 2 instances x 8" in result.out, result.err
