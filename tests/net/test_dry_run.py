"""A dry run in a real terminal of 80 columns."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net

TRAINER = "trainer: {model: gpt, data: text, iterations: 60, batch: {global: 48, micro_batches: 8}, pipeline: {stages: 3}}"
JOBS = {
    "pipeline": TRAINER,
    "mpirun": f"launcher: mpirun\n{TRAINER}",
    "command": "launcher: none\ncommand: accelerate launch --num_machines $NNODES --machine_rank $NODE_RANK train.py --with a --long line",
}


def in_a_terminal(workspace: Workspace, *args: str, colour: bool) -> str:
    """What `dtrain ARGS` writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {name: value for name, value in workspace.env.items() if name not in ("NO_COLOR", "COLUMNS", "LINES", "TERM")}
    env |= {"TERM": "xterm-256color"} | ({} if colour else {"NO_COLOR": "1"})
    process = subprocess.Popen(
        (sys.executable, "-m", "dtrain", *args), cwd=workspace.workdir, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # Linux's way to say that nobody writes any more
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("name", JOBS)
def test_no_line_is_too_long_and_colour_is_only_colour(workspace: Workspace, name: str) -> None:
    instances = "cluster: {instances: [gpu1.lab, gpu2.lab, gpu3.lab], gpus_per_instance: 2, python: /opt/conda/bin/python}\n"
    workspace.write("job.yaml", f"{instances}{JOBS[name]}\n")
    plain = in_a_terminal(workspace, "launch", "--dry-run", colour=False)
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 80
    assert "\ngpu[2-3].lab run the same as gpu1.lab, but:\n" in plain
    coloured = in_a_terminal(workspace, "launch", "--dry-run", colour=True)
    assert "\x1b[33m<port>\x1b[0m" in coloured  # what is open stands out
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_an_option_of_nodes_that_is_repeated_adds_to_the_first(workspace: Workspace) -> None:
    (workspace.workdir / "train.py").touch()
    workspace.write("lab.yaml", "instances: [a1, b1, c1, d1]\ngpus_per_instance: 1\n")
    job = workspace.write("job.yaml", "script: train.py\ncluster: lab.yaml\n")
    for options, left in ((("--exclude", "a1", "--exclude", "c1"), ["b1", "d1"]), (("--nodes", "d1", "--nodes", "a1"), ["a1", "d1"])):
        plan = json.loads(workspace.dtrain("launch", job, "--dry-run", "--json", *options).out)
        assert [node["name"] for node in plan["plan"]["nodes"]] == left


def test_no_terminal_is_too_narrow(workspace: Workspace) -> None:
    (workspace.workdir / "train.py").touch()
    plan = workspace.dtrain("launch", workspace.job("script: train.py\n"), "--dry-run", env={"COLUMNS": "1"})
    assert plan.code == 0, plan.err
