"""`launcher: none`: the command runs once on each node and starts its own workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster import Workspace

pytestmark = pytest.mark.net

EXAMPLES = Path(__file__).resolve().parents[2] / "cluster-examples"


def test_the_example_starts_torchrun_by_itself(workspace: Workspace) -> None:
    for name in ("own-launcher.yaml", "sum_of_ranks.py"):
        shutil.copy(EXAMPLES / name, workspace.workdir)
    cluster = workspace.write("two.yaml", f"instances: 2\ngpus_per_instance: 2\ndevice: cpu\ndir: {workspace.nodes}\n")
    result = workspace.dtrain("launch", "own-launcher.yaml", "--cluster", cluster)
    assert result.code == 0, result.err
    for rank in range(4):
        assert f"rank {rank} of 4: the ranks add up to 6" in result.err
    assert "cluster size 4 = 2 instances x 2 GPUs per instance" in result.err
    status = workspace.status("own-launcher")
    assert (status["launcher"], status["cluster_size"]) == ("none", 4)
    assert [[rank["rank"] for rank in node["ranks"]] for node in status["nodes"]] == [[0], [1]]


def test_a_command_knows_its_node_and_has_no_rank(workspace: Workspace) -> None:
    workspace.write("show.py", "import json, os\nprint(json.dumps(dict(os.environ)))\n")
    job = workspace.job("launcher: none\nscript: show.py\n", gpus=3)
    result = workspace.dtrain("launch", job, env={"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "6"})
    assert result.code == 0, result.err
    seen = [json.loads(line[4:]) for line in workspace.dtrain("logs").out.splitlines()]
    names = ("NODE_RANK", "NNODES", "GPUS_PER_NODE", "CLUSTER_SIZE", "MASTER_ADDR")
    assert [[env[name] for name in names] for env in seen] == [["0", "2", "3", "6", "127.0.0.1"], ["1", "2", "3", "6", "127.0.0.1"]]
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert [name for env in seen for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in env] == []


def test_a_command_that_fails_stops_the_other_nodes(workspace: Workspace) -> None:
    workspace.write("fail.sh", 'if [ "$NODE_RANK" = 1 ]; then exit 3; fi\nsetsid sleep 600 & sleep 600\n')
    result = workspace.dtrain("launch", workspace.job("name: fails\nlauncher: none\ncommand: [bash, fail.sh]\ngrace: 5\n"), timeout_s=60)
    assert result.code == 3, result.err
    assert "rank 1 on node1 failed with exit code 3" in result.err
    assert workspace.leftovers() == {}
    assert workspace.status("fails")["exit_source"] == "worker"
