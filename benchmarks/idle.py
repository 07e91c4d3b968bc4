"""What guard and agent cost a node while its workers train: processor time and memory, on three machines (namespaces on a bridge).

At most 0.3 % of a core and 25 MiB a node, together. Memory is PSS: pages that both share count once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.lan import Lan, Node, why_not

LIMIT_PERCENT = 0.3
LIMIT_MIB = 25.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    if why := why_not():
        print(f"guard and agent: not measured, {why}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lan = Lan(root / "lan", num_nodes=3)
        try:
            costs = _measured(root, lan, seconds)
        finally:
            lan.close()
    is_good = True
    for name, (percent, mib) in costs.items():
        print(f"{name}: {percent:.3f} % of a core, {mib:.1f} MiB (over {seconds:g} s; at most {LIMIT_PERCENT} % and {LIMIT_MIB:g} MiB)")
        is_good = is_good and percent <= LIMIT_PERCENT and mib <= LIMIT_MIB
    return 0 if is_good else 1


def _measured(root: Path, lan: Lan, seconds: float) -> dict[str, tuple[float, float]]:
    """Percent of a core and MiB, by node."""
    home, work = root / "home", root / "work"
    home.mkdir()
    work.mkdir()
    lan.admit(home)
    (work / "lan.yaml").write_text(lan.cluster())
    (work / "job.yaml").write_text("launcher: none\ncommand: [sleep, '3600']\ncluster: lan.yaml\ngrace: 1\n")
    env = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(root / "state")}
    dtrain = str(Path(sys.executable).parent / "dtrain")
    argv = (dtrain, "launch", "job.yaml", "--detach")
    job = subprocess.run(argv, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True).stdout.strip()
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
    subprocess.run((dtrain, "stop", job), cwd=work, env=env, capture_output=True, check=True)
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
