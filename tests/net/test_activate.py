"""`activate` and `python`: the environment in which a job runs, on this machine and behind a login."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster import Workspace
from tests.ssh import Sshd

pytestmark = pytest.mark.net

TELL = """
import json, os, shutil, sys
names = ("CONDA_DEFAULT_ENV", "LINES_OF", "OUTER")
print(json.dumps([sys.executable, shutil.which("python"), {name: os.environ.get(name) for name in names}]))
"""


def venv(folder: Path) -> Path:
    """A virtual environment, with torch as this Python has it. Returns its python."""
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", str(folder)), check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"


def job(workspace: Workspace, cluster: dict[str, object], **keys: object) -> Path:
    workspace.write("tell.py", TELL)
    around = {"instances": 1, "gpus_per_instance": 1, "device": "cpu", "dir": str(workspace.nodes), **cluster}
    return workspace.write("job.yaml", json.dumps({"name": "told", "script": "tell.py", **keys, "cluster": around}))


def told(workspace: Workspace) -> list[list[object]]:
    """What each rank's worker said."""
    return [json.loads(line.partition("] ")[2]) for line in workspace.dtrain("logs").out.splitlines()]


def test_a_virtual_environment_of_each_node(workspace: Workspace) -> None:
    """The plan says which interpreter that is; what the lines print and export does not get in the way."""
    python = venv(workspace.root / "venv")
    lines = f"echo $'noise\\n'\nsource {python.parent}/activate\nexport LINES_OF=$'a = 1\\nb'; unset OUTER"
    file = job(workspace, {"instances": 2, "activate": lines})
    dry = workspace.dtrain("launch", file, "--dry-run").out
    assert "python python3, to be found by the probe" in dry and f"source {python.parent}/activate" in dry
    result = workspace.dtrain("launch", file, env={"OUTER": "still there"})
    assert result.code == 0, result.err
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert f"python {python}3 {version}, torch " in result.err
    assert told(workspace) == [[f"{python}3", str(python), {"CONDA_DEFAULT_ENV": None, "LINES_OF": "a = 1\nb", "OUTER": None}]] * 2
    stored = workspace.root / "state/dtrain/jobs" / workspace.status()["job"] / "plan.json"
    plan = json.loads(stored.read_text())
    assert [(node["python"], node["activate"]) for node in plan["plan"]["nodes"]] == [(f"{python}3", lines)] * 2
    assert plan["job"]["cluster"]["activate"] == lines


def test_python_comes_first_on_the_path_that_activate_leaves(workspace: Workspace) -> None:
    python = venv(workspace.root / "venv")
    (workspace.root / "other/bin").mkdir(parents=True)
    (workspace.root / "other/bin/python").symlink_to("/bin/false")
    file = job(workspace, {"activate": f"export PATH={workspace.root}/other/bin:$PATH", "python": str(python)})
    result = workspace.dtrain("launch", file)
    assert result.code == 0, result.err
    assert told(workspace)[0][:2] == [str(python), str(python)]


def test_conda_behind_a_start_up_file_that_returns_early(workspace: Workspace, sshd: Sshd) -> None:
    """What works for a person who logs in fails here, and the error says which line works."""
    base = sshd.home / "forge"
    python = venv(base / "envs/train")
    (base / "bin").mkdir()
    (base / "bin/conda").write_text("#!/bin/sh\necho \"CondaError: Run 'conda init' before 'conda activate'\" >&2\nexit 1\n")
    (base / "bin/conda").chmod(0o700)
    (base / "bin/activate").write_text(f'export CONDA_DEFAULT_ENV="$1"; PATH="{base}/envs/$1/bin:$PATH"\n')
    hook = f"__conda_setup=\"$('{base}/bin/conda' 'shell.bash' 'hook')\"\nconda() {{ . '{base}/bin/activate' \"$2\"; }}\n"
    (sshd.home / ".bashrc").write_text("case $- in *i*) ;; *) return;; esac\n" + hook)
    (sshd.home / ".profile").write_text('. "$HOME/.bashrc"\necho "welcome to this machine"\n')
    cluster: dict[str, object] = {"instances": ["box"], "activate": "conda activate train"}
    failed = workspace.dtrain("launch", job(workspace, cluster))
    assert failed.code == 78, failed.err
    assert "box: activate failed with exit code 127" in failed.err and "conda: command not found" in failed.err
    line = f"source {base}/bin/activate train"
    assert f"`activate: {line}`" in failed.err
    (sshd.home / ".profile").write_text(f'PATH="{base}/bin:$PATH"\n')
    failed = workspace.dtrain("launch", job(workspace, cluster))
    assert failed.code == 78 and "CondaError: Run 'conda init'" in failed.err and f"`activate: {line}`" in failed.err, failed.err
    result = workspace.dtrain("launch", job(workspace, {**cluster, "activate": line}))
    assert result.code == 0, result.err
    assert told(workspace) == [[f"{python}3", str(python), {"CONDA_DEFAULT_ENV": "train", "LINES_OF": None, "OUTER": None}]]


def test_a_python_that_cannot_run_the_workers_is_named_with_what_was_tried(workspace: Workspace) -> None:
    old = workspace.root / "old/bin/python3"
    old.parent.mkdir(parents=True)
    old.write_text('#!/bin/sh\nprintf "3.6.8\\t\\t\\t\\n"\n')
    old.chmod(0o700)
    result = workspace.dtrain("launch", job(workspace, {"activate": f"export PATH={old.parent}:/bin"}))
    assert result.code == 78 and f"node0: {old} is Python 3.6.8, and the workers need 3.9 or newer" in result.err, result.err
    old.write_text("#!/bin/sh\necho 'cannot open libpython' >&2\nexit 127\n")
    result = workspace.dtrain("launch", job(workspace, {"python": str(old)}))
    assert result.code == 78 and f"node0: {old} does not run as a Python: cannot open libpython" in result.err, result.err
    result = workspace.dtrain("launch", job(workspace, {"activate": "export PYTHONHOME=/nonexistent"}))
    assert result.code == 78 and " does not run as a Python: Fatal Python error: init" in result.err, result.err
    assert "hint: unset PYTHONHOME, in which it looks for its own library: /nonexistent\n" in result.err
    result = workspace.dtrain("launch", job(workspace, {"instances": 2, "activate": "export PATH=/nowhere:/else", "python": "python9"}))
    assert result.code == 78, result.err
    assert all(f"node{i}: there is no python9 on its PATH, /nowhere:/else" in result.err for i in range(2))
    assert "hint: set python: in the cluster file" in result.err and "Traceback" not in result.err


def test_ctrl_c_while_a_node_is_being_activated_leaves_nothing(workspace: Workspace) -> None:
    process = workspace.start("launch", job(workspace, {"activate": f"touch {workspace.root}/here; sleep 300"}))
    workspace.until((workspace.root / "here").exists, "the activation")
    process.send_signal(2)
    assert workspace.wait(process, timeout_s=30).code == 130
    workspace.until(lambda: workspace.leftovers() == {}, "the activation to end", timeout_s=20.0)
