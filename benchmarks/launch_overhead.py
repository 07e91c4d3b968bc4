"""What dtrain adds to torchrun: from Enter to exit, `dtrain launch` of a script that prints and exits on two local
instances, against the same two torchrun commands started by hand in parallel. At most 1.25 times as long.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        work = root / "work"
        work.mkdir()
        (work / "hello.py").write_text("print('hello')\n")
        (work / "job.yaml").write_text(
            f"script: hello.py\ncluster: {{instances: 2, gpus_per_instance: 1, device: cpu, dir: {root / 'nodes'}}}\n"
        )
        env = {**os.environ, "XDG_STATE_HOME": str(root / "state"), "OMP_NUM_THREADS": "1"}
        _by_dtrain(work, env)  # both once beforehand: page cache, byte code, the bundle on the nodes
        _by_hand(work, env)
        pairs = [(_by_dtrain(work, env), _by_hand(work, env)) for _ in range(repeats)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"dtrain launch / torchrun by hand: {ours / theirs:.2f} ({ours:.2f} s / {theirs:.2f} s, medians of {repeats}; at most {LIMIT})")
    return 0 if ours / theirs <= LIMIT else 1


def _by_dtrain(work: Path, env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run((_beside("dtrain"), "launch", "job.yaml"), cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - began


def _by_hand(work: Path, env: dict[str, str]) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    running = [
        subprocess.Popen(
            (
                _beside("torchrun"), "--nnodes=2", f"--node-rank={node_rank}", "--nproc-per-node=1",
                "--master-addr=127.0.0.1", f"--master-port={port}", "hello.py",
            ),
            cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for node_rank in range(2)
    ]  # fmt: skip
    codes = [process.wait() for process in running]
    took = time.perf_counter() - began
    assert codes == [0, 0], codes
    return took


def _beside(name: str) -> str:
    """A command of the environment that runs this."""
    return str(Path(sys.executable).parent / name)


if __name__ == "__main__":
    sys.exit(main())
