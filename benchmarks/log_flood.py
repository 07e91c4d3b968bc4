"""How fast log lines come home: one worker on one machine behind ssh (namespaces on a bridge) prints as fast as it can, and the bytes
that arrive in the store's log file are counted while they do. At least 60 MB/s, and not a byte changed. Beside it stands
`ssh node cat file > file` for the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.lan import Lan, why_not

LIMIT_MB_PER_S = 60
BLOCK = "".join(f"epoch {i % 90:2d}  step {i:8d}  loss {i / 7:.6f}  lr 0.000100  grad norm 1.2345\n" for i in range(16_000))
PRINT = """
import os, sys
block, count = open(sys.argv[1], "rb").read(), int(sys.argv[2])
for number in range(count):
    data = memoryview(b"block %d\\n" % number + block)
    while data:
        data = data[os.write(1, data):]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=300)
    args = parser.parse_args()
    if why := why_not():
        print(f"log lines over ssh: not measured, {why}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lan = Lan(root / "lan", num_nodes=1)
        try:
            pairs = _measured(root, lan, args.megabytes * 1_000_000 // len(BLOCK), args.repeats)
        finally:
            lan.close()
    ours, theirs = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    print(
        f"log lines over ssh: {ours:.0f} MB/s, {ours / theirs:.2f} of `ssh cat` "
        f"({theirs:.0f} MB/s; medians of {args.repeats}; at least {LIMIT_MB_PER_S} MB/s)"
    )
    return 0 if ours >= LIMIT_MB_PER_S else 1


def _measured(root: Path, lan: Lan, num_blocks: int, repeats: int) -> list[tuple[float, float]]:
    home, work = root / "home", root / "work"
    home.mkdir()
    work.mkdir()
    lan.admit(home)
    (work / "print.py").write_text(PRINT)
    (work / "block.txt").write_text(BLOCK)
    (work / "lan.yaml").write_text(lan.cluster())
    (work / "job.yaml").write_text(f"script: print.py\nargs: block.txt {num_blocks}\ncluster: lan.yaml\n")
    whole = hashlib.sha256()
    with lan.nodes[0].path("/tmp/whole.txt").open("wb") as file:
        for number in range(num_blocks):
            data = f"block {number}\n{BLOCK}".encode()
            whole.update(data)
            file.write(data)
    size_bytes = lan.nodes[0].path("/tmp/whole.txt").stat().st_size
    ssh = ("ssh", "-F", str(home / ".ssh/config"), "n1", "cat /tmp/whole.txt")
    pairs = []
    for _ in range(repeats):
        env = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(root / "state")}
        ours = _by_dtrain(work, env, size_bytes, whole.hexdigest())
        theirs = _by_ssh(ssh, root / "copy.txt", size_bytes)
        pairs.append((ours, theirs))
        shutil.rmtree(root / "state")
        shutil.rmtree(lan.nodes[0].path("/var/tmp/dtrain-0/jobs"))
    return pairs


def _by_dtrain(work: Path, env: dict[str, str], size_bytes: int, sha256: str) -> float:
    """MB/s from the first bytes seen in the store's log to the last."""
    dtrain = str(Path(sys.executable).parent / "dtrain")
    launch = subprocess.Popen(
        (dtrain, "launch", "job.yaml"), cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    jobs = Path(env["XDG_STATE_HOME"]) / "dtrain/jobs"
    seen: list[tuple[float, int]] = []
    ended = False
    while not ended and (not seen or seen[-1][1] < size_bytes):
        ended = launch.poll() is not None
        now_bytes = next((path.stat().st_size for path in jobs.rglob("rank0.log")), 0)
        if now_bytes > (seen[-1][1] if seen else 0):
            seen.append((time.perf_counter(), now_bytes))
        time.sleep(0.01)
    code = launch.wait()
    assert code == 0, code
    (log,) = jobs.rglob("rank0.log")
    with log.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == sha256, "the log differs from what the worker wrote"
    (first_at, first_bytes), (last_at, last_bytes) = seen[0], seen[-1]
    return (last_bytes - first_bytes) / (last_at - first_at) / 1e6


def _by_ssh(argv: tuple[str, ...], to: Path, size_bytes: int) -> float:
    with to.open("wb") as file:
        began = time.perf_counter()
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=file, check=True)
    took = time.perf_counter() - began
    assert to.stat().st_size == size_bytes
    return size_bytes / took / 1e6


if __name__ == "__main__":
    sys.exit(main())
