"""One root cause over nodes whose clocks are minutes apart, and which lose the worker that failed within milliseconds."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Workspace
from tests.lan import DIR, Lan

pytestmark = [pytest.mark.net, pytest.mark.root]

CLOCKS_S = list(itertools.permutations((-180, 0, 180)))
# Plain processes, one a node: torchrun would add its own import of torch. All are in a collective when one of them fails.
WORKER = """
import ctypes, os, signal, socket, sys
os.environ.update(RANK=os.environ["NODE_RANK"], WORLD_SIZE=os.environ["NNODES"])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
def fail():
    {fault}
try:
    for step in range(10**9):
        if step == 20 and dist.get_rank() == {rank}:
            fail()
        dist.all_reduce(torch.ones(8))
except RuntimeError:
    {when_lost}
"""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    code: str  # one line of Python
    exit_code: int
    reason: str
    when_lost: str = "raise"  # what the other ranks then do


FAULTS = [
    Fault("exception", "raise ValueError('bad batch')", 1, "exception"),
    Fault("kill", "os.kill(os.getpid(), signal.SIGKILL)", 137, "killed"),
    Fault("no space", "print('x' * 10000, file=open('/dev/full', 'w'), flush=True)", 1, "no-space"),
    Fault("segfault", "ctypes.string_at(0)", 139, "segfault"),
    Fault("exit code", "os._exit(42)", 42, "exit-code"),
    Fault("sys.exit", "dist.destroy_process_group(); sys.exit(17)", 17, "exit-code"),
    Fault("import error", "import no_such_module", 1, "import-error"),
    Fault("out of memory", "bytearray(1 << 62)", 1, "out-of-memory"),
    Fault("port in use", "[socket.create_server(('127.0.0.1', 28999)) for _ in range(2)]", 1, "port-in-use"),
    Fault("abort", "os.abort()", 134, "aborted"),
    Fault("a stranger's TERM", "os.kill(os.getpid(), signal.SIGTERM); signal.pause()", 143, "terminated"),
    Fault("others that end by themselves", "os._exit(42)", 42, "exit-code", when_lost="sys.exit(3)"),
]
NUM_IN_CI = 4


@pytest.mark.parametrize(
    "number", [pytest.param(i, id=fault.name, marks=[pytest.mark.faults] if i >= NUM_IN_CI else []) for i, fault in enumerate(FAULTS)]
)
def test_the_cause_is_right_whatever_the_clocks_say(lan: Lan, workspace: Workspace, number: int) -> None:
    fault, rank = FAULTS[number], number % 3
    clocks = sorted(CLOCKS_S, key=lambda each: -each[rank])[number % 2]  # who fails is ahead: by its clock the others failed before it
    for node, ahead_s in zip(lan.nodes, clocks, strict=True):
        lan.set_clock(node, ahead_s)
    workspace.write("worker.py", WORKER.format(fault=fault.code, rank=rank, when_lost=fault.when_lost))
    job = workspace.write("job.yaml", "launcher: none\nscript: worker.py\ncluster: lan.yaml\ngrace: 5\n")
    result = workspace.dtrain("launch", job, timeout_s=60)
    cause = workspace.status()["first_failure"]
    name = lan.nodes[rank].name
    assert (cause["node"], cause["rank"], cause["reason"]) == (name, rank, fault.reason), result.err
    # torch 2.13 now and then aborts a process that an exception ends, since threads of gloo's are still there.
    assert result.code == cause["exit_code"] in ({1, 134} if fault.exit_code == 1 else {fault.exit_code}), result.err
    assert re.search(rf"^rank {rank} on {name} failed with ", result.err, re.MULTILINE), result.err


def test_a_node_can_be_three_minutes_ahead(lan: Lan, workspace: Workspace) -> None:
    """What the other tests here rely on: all its events bear its own clock, and its time-outs are what they were."""
    lan.set_clock(lan.nodes[1], 180)
    workspace.write("two.yaml", lan.cluster("n1, n2"))
    workspace.write("now.py", "import time\nprint(time.time())\n")
    result = workspace.dtrain("launch", workspace.write("job.yaml", "launcher: none\nscript: now.py\ncluster: two.yaml\n"))
    assert result.code == 0, result.err
    job = workspace.status()["job"]
    here: list[float] = []
    there: list[float] = []
    for rank, (node, told) in enumerate(zip(lan.nodes, (here, there), strict=False)):
        folder = node.path(f"{DIR}/jobs/{job}/{node.name}")
        told += [json.loads(line)["at"] for line in (folder / "events.jsonl").read_text().splitlines()]
        told.append(float((folder / f"logs/rank{rank}.log").read_text()))
        assert max(told) - min(told) < 60
    assert all(150 < ahead - right < 210 for right, ahead in zip(here, there, strict=False)), (here, there)
    assert abs(here[-1] - time.time()) < 60


PAUSED = """
import pathlib, sys, time
from dtrain import api

class Progress:
    def __getattr__(self, name):
        return lambda *_: None
    def committing(self):
        pathlib.Path("committing").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.01)

print(api.launch("job.yaml", progress=Progress()).wait().exit_code)
"""


def test_a_worker_that_fails_before_another_node_was_told_to_run(lan: Lan, workspace: Workspace) -> None:
    """The other node's part is over when it hears of it, and still the job ends with the worker's code."""
    n2 = lan.nodes[1]
    workspace.write("two.yaml", lan.cluster("n1, n2"))
    workspace.write("job.yaml", "name: early\nlauncher: none\ncommand: exit 9\ncluster: two.yaml\n")
    launch = workspace.python(PAUSED)
    workspace.until((workspace.workdir / "committing").exists, "all nodes to be prepared")
    guard, *_ = n2.pids("\0guard\0")
    session = int(Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(session, signal.SIGSTOP)
    try:
        (workspace.workdir / "go").touch()
        workspace.until(lambda: not n2.pids("\0guard\0"), "the second node's part to end with the first one's")
    finally:
        os.kill(session, signal.SIGCONT)
    result = workspace.wait(launch)
    assert (result.code, result.out) == (0, "9\n"), result.err
    cause = workspace.status("early")["first_failure"]
    assert (cause["node"], cause["exit_code"], cause["reason"]) == ("n1", 9, "exit-code")
