"""`dtrain init`: what a newcomer gets, as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from dtrain.spec import load_cluster
from dtrain.spec.json_schema import json_schema
from tests.cluster import Workspace

pytestmark = pytest.mark.net


def in_this_workspace(workspace: Workspace) -> None:
    """As the file says it, but not in the node folder of whoever runs this."""
    job = workspace.workdir / "job.yaml"
    text = job.read_text()
    assert "# cluster: cluster.yaml " in text
    job.write_text(re.sub("^# cluster: .*$", f"cluster: {{instances: 1, device: cpu, dir: {workspace.nodes}}}", text, flags=re.MULTILINE))


def test_what_it_writes_trains_at_once(workspace: Workspace) -> None:
    result = workspace.dtrain("init")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("wrote job.yaml; next:\n  dtrain launch --dry-run   shows")
    shown = workspace.dtrain("launch", "--dry-run")
    assert shown.code == 0 and "trainer gpt on text" in shown.out, shown.err
    in_this_workspace(workspace)
    launched = workspace.dtrain("launch")
    assert launched.code == 0, launched.err
    assert "cluster size 2 = 1 instance x 2 GPUs per instance" in launched.err and "iteration 20/20" in launched.err


def test_where_there_is_a_script_that_is_what_runs(workspace: Workspace) -> None:
    workspace.write("train.py", "import os\nprint('rank', os.environ['RANK'])\n")
    assert workspace.dtrain("init").code == 0
    in_this_workspace(workspace)
    launched = workspace.dtrain("launch")
    assert launched.code == 0 and "[1] rank 1" in launched.err, launched.err


def test_hosts_become_a_cluster_file(workspace: Workspace) -> None:
    result = workspace.dtrain("init", "gpu1.lab", "trn[01-02].lab", "10.0.0.5")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("wrote job.yaml and cluster.yaml; next:\n  ssh gpu1.lab true ")
    shown = workspace.dtrain("launch", "--dry-run")
    assert shown.code == 0, shown.err
    assert [line.split()[0] for line in shown.out.splitlines() if "<address>    <ranks>" in line] == [
        "gpu1.lab", "trn01.lab", "trn02.lab", "10.0.0.5",
    ]  # fmt: skip


@pytest.mark.parametrize("hosts", [(), ("a", "b[1-3]")])
def test_every_key_that_it_mentions_is_one(workspace: Workspace, hosts: tuple[str, ...]) -> None:
    """Also those that stand in comments, once their mark is taken away."""
    assert workspace.dtrain("init", *hosts).code == 0
    for path in workspace.workdir.glob("*.yaml"):
        text = path.read_text()
        assert text.startswith("# yaml-language-server: $schema=dtrain.schema.json\n")
        assert max(map(len, text.splitlines())) <= 125
        all_keys = yaml.safe_load(re.sub(r"^# (?=\w+: )", "", text, flags=re.MULTILINE))
        assert len(all_keys) >= 6 and [*jsonschema.Draft202012Validator(json_schema()).iter_errors(all_keys)] == []


def test_nothing_is_written_over(workspace: Workspace) -> None:
    job = workspace.write("job.yaml", "script: mine.py\n")
    result = workspace.dtrain("init")
    assert result.code == 2 and "job.yaml is here already, and nothing was written; dtrain init HOST... writes" in result.err
    assert (job.read_text(), [*workspace.workdir.iterdir()]) == ("script: mine.py\n", [job])
    link = workspace.workdir / "cluster.yaml"
    link.symlink_to("elsewhere.yaml")
    result = workspace.dtrain("init", "gpu1.lab")
    assert result.code == 2 and "job.yaml and cluster.yaml are here already, and nothing was written" in result.err
    job.unlink()
    result = workspace.dtrain("init", "gpu1.lab")
    assert result.code == 0 and result.err.startswith("wrote job.yaml; next:\n  write the hosts under `instances:` in cluster.yaml  ")
    assert link.is_symlink() and not Path(workspace.workdir / "elsewhere.yaml").exists()


def test_machines_come_to_a_job_file_that_is_there(workspace: Workspace) -> None:
    assert workspace.dtrain("init").code == 0
    job = workspace.workdir / "job.yaml"
    before = job.read_text()
    result = workspace.dtrain("init", "gpu1.lab", "gpu2.lab")
    assert (result.code, job.read_text()) == (0, before)
    assert result.err.startswith("wrote cluster.yaml; next:\n  let job.yaml say `cluster: cluster.yaml`   it is here already, and left")
    job.write_text(f"{before}cluster: cluster.yaml\n")
    assert "gpu2.lab" in workspace.dtrain("launch", "--dry-run").out
    job.unlink()
    assert workspace.dtrain("init").code == 0  # finds the machines
    assert "gpu2.lab" in workspace.dtrain("launch", "--dry-run").out


def test_a_login_of_another_name_or_port_goes_with_its_host(workspace: Workspace) -> None:
    result = workspace.dtrain("init", "eva@gpu[1-2].lab:2222", "gpu3.lab", "10.0.0.4:22", "ada@gpu5.lab")
    assert result.code == 0 and "\n  ssh -p 2222 eva@gpu1.lab true " in result.err
    cluster = load_cluster(workspace.workdir / "cluster.yaml")
    assert [(instance.name, instance.ssh.user, instance.ssh.port) for instance in cluster.instances] == [
        ("gpu1.lab", "eva", 2222), ("gpu2.lab", "eva", 2222), ("gpu3.lab", None, None), ("10.0.0.4", None, 22), ("gpu5.lab", "ada", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("gpu2:99999", "ssh.port must be from 1 to 65535, not 99999"),
        ("gpu2,gpu3", "'gpu2,gpu3' is no host name: separate hosts by spaces: gpu2 gpu3"),
        ("@gpu2", "ssh.user is empty"),
        ("http://gpu2", "'http://gpu2' is a URL: give the host's name or address alone"),
        ("trn[9-1]", "counts down (write 1-9)"),
        ("", "'' is no host name"),
        ("a\nscript: b", "is no host name"),
        ("gpu1", "stands here a second time"),
        ("\udcff", "surrogate"),
    ],
)
def test_what_is_no_host_is_answered(workspace: Workspace, host: str, told: str) -> None:
    result = workspace.dtrain("init", "gpu1", host)
    assert result.code == 2 and told in result.err.replace("\n", " "), result.err
    assert [*workspace.workdir.iterdir()] == []
