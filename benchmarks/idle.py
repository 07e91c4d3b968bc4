"""What guard and agent cost a node while its workers train: processor time and memory, on three machines (namespaces on a bridge).

At most 0.3 % of a core and 25 MiB a node, together. Memory is PSS: pages that both share count once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.cluster import Workspace
from tests.lan import Lan, Node, why_not
from tests.scene import new_workspace, three_machines

LIMIT_PERCENT = 0.3
LIMIT_MIB = 25.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    if why := why_not():
        print(f"guard and agent: not measured, {why}")
        return 0
    with three_machines() as (lan, folder), new_workspace(lan, folder / "workspace", wipe=False) as workspace:
        costs = _measured(workspace, lan, seconds)
    is_good = True
    for name, (percent, mib) in costs.items():
        print(f"{name}: {percent:.3f} % of a core, {mib:.1f} MiB (over {seconds:g} s; at most {LIMIT_PERCENT} % and {LIMIT_MIB:g} MiB)")
        is_good = is_good and percent <= LIMIT_PERCENT and mib <= LIMIT_MIB
    return 0 if is_good else 1


def _measured(workspace: Workspace, lan: Lan, seconds: float) -> dict[str, tuple[float, float]]:
    """Percent of a core and MiB, by node."""
    job = workspace.write("job.yaml", "launcher: none\ncommand: [sleep, '3600']\ncluster: lan.yaml\ngrace: 1\n")
    launched = workspace.dtrain("launch", job, "--detach")
    assert launched.code == 0, launched.err
    keepers = {node: _keepers(node) for node in lan.nodes}
    before = {node: sum(map(_cpu_s, pids)) for node, pids in keepers.items()}
    time.sleep(seconds)
    costs = {
        f"guard and agent on {node.name}": (
            100 * (sum(map(_cpu_s, pids)) - before[node]) / seconds,
            sum(map(_pss_bytes, pids)) / (1 << 20),
        )
        for node, pids in keepers.items()
    }
    stopped = workspace.dtrain("stop", launched.out.strip())
    assert stopped.code == 0, stopped.err
    return costs


def _keepers(node: Node) -> list[int]:
    """Guard and agent of a node, as this machine numbers them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            is_there = os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{node.init}/ns/pid")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # ended meanwhile
            continue
        if is_there and b"\0guard\0" in command:
            found.append(int(pid))
    assert len(found) == 2, found
    return found


def _cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9  # ticks of 10 ms would see nothing of it


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Pss")


if __name__ == "__main__":
    sys.exit(main())
