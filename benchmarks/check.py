"""What `dtrain check` takes: of 64 nodes that are well, and of 1,000 that are not.

64 sshd on loopback are nodes of their own to dtrain: each is logged in to and asked, and dials 16 others or more. All of that is this
machine's CPU, so each has one address (`network: lo`), however many this machine has. At most 5 s, with the start of Python, and one
line of output. Then the recorded facts of 1,000 nodes, of which every tenth differs in all that has to agree and lacks all that a node
can lack, are judged and printed: at most 1 s.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from connect import NUM_NODES, start_servers
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dtrain.findings import KINDS
from dtrain.node.wire import Gpu, Limits
from dtrain.preflight import judge
from dtrain.render.findings import print_facts, print_finding
from tests.facts import FACTS, MACHINE
from tests.ssh import SSHD

NUM_RECORDED = 1000
LIMIT_S, LIMIT_RECORDED_S = 5.0, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    return 0 if all((_recorded(repeats), _healthy(repeats))) else 1


def _recorded(repeats: int) -> bool:
    took_s = statistics.median(_time_recorded() for _ in range(repeats))
    print(f"facts of {NUM_RECORDED} nodes, judged and printed: {took_s:.2f} s of CPU (median of {repeats}; at most {LIMIT_RECORDED_S:g} s)")
    return took_s <= LIMIT_RECORDED_S


def _time_recorded() -> float:
    facts = {f"trn{number:04}.lab": FACTS for number in range(NUM_RECORDED)}
    for number in range(0, NUM_RECORDED, 10):
        machine = replace(
            MACHINE, gpu_driver=f"535.{number}", name_means=("127.0.1.1",), limits=Limits(number, number, None),
            shm_bytes=number << 10, free_bytes=number << 10, ends_at_logout=True,
        )  # fmt: skip
        facts[f"trn{number:04}.lab"] = replace(
            FACTS, torch_version=f"2.12.{number}", nccl_version=f"2.{number}", cuda_version=f"11.{number}", python_version=f"3.{number}.1",
            gpus=(Gpu(0, f"NVIDIA {number}", 40 << 30, 0),), machine=machine,
        )  # fmt: skip
    began_s = time.process_time()
    console = Console(file=io.StringIO(), width=80)
    for finding in judge(facts, {node: 600.0 + index for index, node in enumerate(facts)}, is_trainer=True):
        print_finding(console, finding)
    print_facts(console, facts, dict.fromkeys(facts, 0.0))
    return time.process_time() - began_s  # CPU: it waits for nothing, and what else the machine does is left out


def _healthy(repeats: int) -> bool:
    if SSHD is None:
        print("check of real nodes: not measured, not installed: sshd")
        return True
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        root = Path(folder)
        start_servers(root, running)
        names = ", ".join(f"n{number}" for number in range(1, NUM_NODES + 1))
        cluster = root / "cluster.yaml"
        cluster.write_text(
            f"instances: [{names}]\ngpus_per_instance: 1\ndevice: cpu\npython: {sys.executable}\nnetwork: lo\ndir: {root}/nodes\n"
        )
        _time_check(cluster)  # page cache, and the bundle in its place
        took_s = statistics.median(_time_check(cluster) for _ in range(repeats))
    print(f"check of {NUM_NODES} nodes, 64 sshd here: {took_s:.2f} s (median of {repeats}; at most {LIMIT_S:g} s)")
    return took_s <= LIMIT_S


def _time_check(cluster: Path) -> float:
    env = {**os.environ, "HOME": str(cluster.parent / "home")}
    env.pop("SSH_AUTH_SOCK", None)
    warnings = [word for name, kind in KINDS.items() if not kind.is_error for word in ("--ignore", name)]  # what this machine is like
    began_s = time.perf_counter()
    done = subprocess.run(
        (sys.executable, "-m", "dtrain", "check", str(cluster), *warnings),
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    took_s = time.perf_counter() - began_s
    assert done.returncode == 0 and done.stdout.startswith(f"fit: {NUM_NODES} nodes") and done.stdout.count("\n") == 1, done
    return took_s


if __name__ == "__main__":
    sys.exit(main())
