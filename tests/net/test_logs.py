"""What workers print, on its way to a person: per rank, whole, harmless, and as much of it as was asked for."""

from __future__ import annotations

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net

# Numbered lines, and then none before there is a file `go`.
COUNT = """
import os, time
rank = os.environ["RANK"]
for i in range(100):
    print(f"rank {rank} line {i}" + (" [/red]" if i % 10 == 0 else ""))
print("ready")
while not os.path.exists(os.environ["GO"]): time.sleep(0.05)
print("late [/red]")
print("no newline", end="")
"""


def test_as_much_of_the_logs_as_was_asked_for(workspace: Workspace) -> None:
    """While the job runs, so what is printed is there at once: nobody flushes, and no buffer of Python's is full."""
    workspace.write("count.py", COUNT)
    job = workspace.job(f"name: count\nscript: count.py\nenv: {{GO: {workspace.root / 'go'}}}\n", gpus=2)
    launch = workspace.start("launch", job)
    workspace.until(lambda: launch.poll() is not None or workspace.printed("ready") == 4, "the workers")

    def logs(*options: str) -> list[str]:
        result = workspace.dtrain("logs", *options)
        assert (result.code, result.err) == (0, ""), result.err
        return result.out.splitlines()

    assert len(logs()) == 4 * 101
    assert logs("--node", "node1", "--tail", "1") == ["[2] ready", "[3] ready"]
    assert logs("--node", "node1", "--ranks", "0,3", "--tail", "2") == ["[3] rank 3 line 99", "[3] ready"]
    assert logs("--ranks", "1", "--grep", "[/red]", "--tail", "2") == ["[1] rank 1 line 80 [/red]", "[1] rank 1 line 90 [/red]"]
    assert logs("--grep", "[.red]") == [] == logs("--tail", "0")
    assert logs("--grep", "line 42") == [f"[{rank}] rank {rank} line 42" for rank in range(4)]

    follow = workspace.start("logs", "--follow", "--node", "node0", "--tail", "1", "--grep", "[/red]")
    assert follow.stdout is not None
    first = [follow.stdout.readline() for _ in range(2)]
    (workspace.root / "go").touch()
    rest, _ = follow.communicate(timeout=60)
    assert first == ["[0] rank 0 line 90 [/red]\n", "[1] rank 1 line 90 [/red]\n"]
    assert sorted(rest.splitlines()) == ["[0] late [/red]", "[1] late [/red]"]
    assert workspace.wait(launch).code == 0
    assert logs("--ranks", "2", "--tail", "2") == ["[2] late [/red]", "[2] no newline"]

    for options, told in (
        (("--node", "node2"), "has no node node2\nhint: its nodes: node0, node1\n"),
        (("--node", "node1", "--ranks", "0"), "has none of these ranks on node1\nhint: its ranks on node1: 2-3\n"),
    ):
        result = workspace.dtrain("logs", *options)
        assert (result.code, result.out) == (66, "") and result.err.endswith(told), result.err
