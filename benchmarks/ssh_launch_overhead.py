"""What dtrain adds to torchrun over ssh: from Enter to exit, `dtrain launch` of a script that prints and exits on three machines
(namespaces on a bridge), against the same three torchrun commands started by hand in parallel through ssh. At most 1.25 times as long.

By hand they are given --local-addr too: without it torchrun looks up its host name, which takes seconds more where no name server
answers, as here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.lan import Lan, why_not

LIMIT = 1.25
PORT = 29500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    if why := why_not():
        print(f"dtrain launch / torchrun through ssh by hand: not measured, {why}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lan = Lan(root / "lan", num_nodes=3)
        try:
            pairs = _measured(root, lan, repeats)
        finally:
            lan.close()
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    fastest = [min(times) for times in zip(*pairs, strict=True)]
    print(
        f"dtrain launch / torchrun through ssh by hand: {ours / theirs:.2f} "
        f"({ours:.2f} s / {theirs:.2f} s, medians of {repeats}; the fastest {fastest[0]:.2f} s / {fastest[1]:.2f} s; at most {LIMIT})"
    )
    return 0 if ours / theirs <= LIMIT else 1


def _measured(root: Path, lan: Lan, repeats: int) -> list[tuple[float, float]]:
    home, work = root / "home", root / "work"
    home.mkdir()
    work.mkdir()
    lan.admit(home)
    (work / "hello.py").write_text("print('hello')\n")
    (work / "lan.yaml").write_text(lan.cluster())
    (work / "job.yaml").write_text("script: hello.py\ncluster: lan.yaml\n")
    for node in lan.nodes:
        node.path("/tmp/hello.py").write_text("print('hello')\n")
    env = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(root / "state")}
    _by_dtrain(work, env)  # both once beforehand: page cache, byte code, the bundle on the nodes
    _by_hand(lan, home)
    return [(_by_dtrain(work, env), _by_hand(lan, home)) for _ in range(repeats)]


def _by_dtrain(work: Path, env: dict[str, str]) -> float:
    dtrain = str(Path(sys.executable).parent / "dtrain")
    began = time.perf_counter()
    subprocess.run((dtrain, "launch", "job.yaml"), cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - began


def _by_hand(lan: Lan, home: Path) -> float:
    began = time.perf_counter()
    running = [
        subprocess.Popen(
            (
                "ssh", "-F", str(home / ".ssh/config"), node.name,
                f"{sys.executable} -m torch.distributed.run --nnodes=3 --node-rank={node_rank} --nproc-per-node=1"
                f" --master-addr={lan.nodes[0].address} --master-port={PORT} --local-addr={node.address} /tmp/hello.py",
            ),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for node_rank, node in enumerate(lan.nodes)
    ]  # fmt: skip
    codes = [process.wait() for process in running]
    took = time.perf_counter() - began
    assert codes == [0, 0, 0], codes
    return took


if __name__ == "__main__":
    sys.exit(main())
