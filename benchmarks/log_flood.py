"""How log lines come home, from workers on one machine behind ssh (namespaces on a bridge).

Flood: eight workers print as fast as they can, and the bytes that arrive in the store's files are counted while they do. At least
100 MB/s, and not a byte changed. Beside it stands `ssh node cat file > file` for the same bytes, and what the workers saw of it:
they write to files of their own, and wait for nobody. First line: `dtrain logs` and `dtrain attach` of that job, which still runs,
show one within a second. Quiet: from a line that a worker prints now and then to `dtrain launch` on a terminal and to
`dtrain logs --follow` in a pipe, at most 100 ms in the median.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pty
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.lan import Lan, why_not

LIMIT_MB_PER_S = 100
LIMIT_FIRST_LINE_S = 1.0
LIMIT_LATENCY_MS = 100
DTRAIN = str(Path(sys.executable).parent / "dtrain")
BLOCK = "".join(f"epoch {i % 90:2d}  step {i:8d}  loss {i / 7:.6f}  lr 0.000100  grad norm 1.2345\n" for i in range(16_000))
PRINT = """
import json, os, sys, time
block, count = open(sys.argv[1], "rb").read(), int(sys.argv[2])
began, longest = time.perf_counter(), 0.0
for number in range(count):
    data = memoryview(b"block %d\\n" % number + block)
    while data:
        at = time.perf_counter()
        data = data[os.write(1, data):]
        longest = max(longest, time.perf_counter() - at)
with open(f"{os.environ['DTRAIN_OUTPUT_DIR']}/{os.environ['RANK']}.json", "w") as file:
    json.dump([time.perf_counter() - began, longest], file)
while not os.path.exists("/tmp/go"): time.sleep(0.05)
"""
SELDOM = """
import random, sys, time
for _ in range(int(sys.argv[1])):
    time.sleep(random.uniform(5.5, 6.5))
    print("printed at", time.time())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1000, help="of all workers")
    parser.add_argument("--lines", type=int, default=12, help="of the quiet worker; six seconds each")
    args = parser.parse_args()
    if why := why_not():
        print(f"log lines over ssh: not measured, {why}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        here = _Here(Path(folder), args.workers)
        try:
            num_blocks = args.megabytes * 1_000_000 // len(BLOCK) // args.workers
            good = [_flood(here, num_blocks, args.repeats), _quiet(here, args.lines)]
        finally:
            here.lan.close()
    return 0 if all(good) else 1


class _Here:
    """A machine, and where jobs on it are launched from."""

    def __init__(self, root: Path, num_workers: int) -> None:
        self.num_workers = num_workers
        self.lan = Lan(root / "lan", num_nodes=1)
        self.home, self.work, self.state = root / "home", root / "work", root / "state"
        self.home.mkdir()
        self.work.mkdir()
        self.lan.admit(self.home)
        self.env = {**os.environ, "HOME": str(self.home), "XDG_STATE_HOME": str(self.state), "OMP_NUM_THREADS": "1"}
        (self.work / "lan.yaml").write_text(self.lan.cluster(gpus_per_instance=str(num_workers)))
        (self.work / "print.py").write_text(PRINT)
        (self.work / "block.txt").write_text(BLOCK)
        (self.work / "seldom.py").write_text(SELDOM)

    def launch(self, job: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        (self.work / "job.yaml").write_text(f"name: bench\ncluster: lan.yaml\n{job}")
        return subprocess.Popen(
            (DTRAIN, "launch", "job.yaml"), cwd=self.work, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )

    def copies(self) -> list[Path]:
        return sorted((self.state / "dtrain/jobs").rglob("rank*.log"))

    def clear(self) -> None:
        shutil.rmtree(self.state)
        shutil.rmtree(self.lan.nodes[0].path("/var/tmp/dtrain-0/jobs"))


def _flood(here: _Here, num_blocks: int, repeats: int) -> bool:
    node = here.lan.nodes[0]
    whole = hashlib.sha256()
    with node.path("/tmp/whole.txt").open("wb") as file:
        for number in range(num_blocks):
            data = f"block {number}\n{BLOCK}".encode()
            whole.update(data)
            file.write(data)
    size_bytes = here.num_workers * node.path("/tmp/whole.txt").stat().st_size
    rates, waits, firsts = [], [], dict[str, list[float]]()
    for _ in range(repeats):
        launch = here.launch(f"script: print.py\nargs: block.txt {num_blocks}\n")
        ours = _arrival_mb_per_s(here, launch, size_bytes)
        for copy in here.copies():
            with copy.open("rb") as log:
                assert hashlib.file_digest(log, "sha256").hexdigest() == whole.hexdigest(), "the log differs from what the worker wrote"
        for command in ("logs", "logs --tail 10", "logs --tail 10 --follow", "attach"):
            if command == "attach":
                for copy in here.copies():  # as after --detach: all of it comes from the node
                    copy.unlink()
            firsts.setdefault(command, []).append(_first_line_s(here, command))
        told = [json.loads(path.read_text()) for path in node.path("/var/tmp/dtrain-0/outputs/bench/n1").glob("*.json")]
        assert len(told) == here.num_workers
        waits.append((size_bytes / max(took for took, _ in told) / 1e6, max(longest for _, longest in told)))
        node.path("/tmp/go").touch()
        assert launch.wait() == 0
        node.path("/tmp/go").unlink()
        here.clear()
        rates.append((ours, _by_ssh(here, size_bytes)))
    ours, theirs = (statistics.median(each) for each in zip(*rates, strict=True))
    wrote, longest = statistics.median(rate for rate, _ in waits), max(longest for _, longest in waits)
    print(
        f"{here.num_workers} workers, {size_bytes / 1e6:.0f} MB over ssh: {ours:.0f} MB/s, {ours / theirs:.2f} of `ssh cat` "
        f"({theirs:.0f} MB/s; medians of {repeats}; at least {LIMIT_MB_PER_S} MB/s); "
        f"the workers wrote {wrote:.0f} MB/s, and no write of them took longer than {longest * 1e3:.0f} ms"
    )
    for command, took in firsts.items():
        print(f"first line of `dtrain {command}` of that job: {statistics.median(took):.2f} s (at most {LIMIT_FIRST_LINE_S:g} s)")
    return ours >= LIMIT_MB_PER_S and all(statistics.median(took) <= LIMIT_FIRST_LINE_S for took in firsts.values())


def _arrival_mb_per_s(here: _Here, launch: subprocess.Popen[bytes], size_bytes: int) -> float:
    """From the first bytes seen in the store's logs to the last."""
    seen: list[tuple[float, int]] = []
    while not seen or seen[-1][1] < size_bytes:
        assert launch.poll() is None, launch.returncode
        now_bytes = sum(path.stat().st_size for path in here.copies())
        if now_bytes > (seen[-1][1] if seen else 0):
            seen.append((time.perf_counter(), now_bytes))
        time.sleep(0.01)
    (first_at, first_bytes), (last_at, last_bytes) = seen[0], seen[-1]
    return (last_bytes - first_bytes) / (last_at - first_at) / 1e6


def _first_line_s(here: _Here, command: str) -> float:
    began = time.perf_counter()
    process = subprocess.Popen(
        (DTRAIN, *command.split()), env=here.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith(b"["):
        assert line, command
    took = time.perf_counter() - began
    process.kill()
    process.communicate()
    return took


def _by_ssh(here: _Here, size_bytes: int) -> float:
    to = here.work.parent / "copy.txt"
    ssh = ("ssh", "-F", str(here.home / ".ssh/config"), "n1", "cat " + "/tmp/whole.txt " * here.num_workers)
    with to.open("wb") as file:
        began = time.perf_counter()
        subprocess.run(ssh, stdin=subprocess.DEVNULL, stdout=file, check=True)
    took = time.perf_counter() - began
    assert to.stat().st_size == size_bytes
    to.unlink()
    return size_bytes / took / 1e6


def _quiet(here: _Here, num_lines: int) -> bool:
    ours, theirs = pty.openpty()
    job = f"launcher: none\ncommand: [python3, seldom.py, '{num_lines}']\n"
    launch = here.launch(job, theirs)
    os.close(theirs)
    late: dict[str, list[float]] = {"launch, on a terminal": [], "logs --follow, in a pipe": []}
    on_terminal, in_pipe = late.values()
    terminal = threading.Thread(target=_read, args=(ours, on_terminal))
    terminal.start()
    while not on_terminal:
        time.sleep(0.1)
    argv = (DTRAIN, "logs", "--follow", "--tail", "0")
    follow = subprocess.Popen(argv, env=here.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert follow.stdout is not None
    _read(follow.stdout.fileno(), in_pipe)
    terminal.join()
    assert (launch.wait(), follow.wait()) == (0, 0)
    for name, each in late.items():
        print(
            f"a line now and then, to {name}: {statistics.median(each):.0f} ms "
            f"(median of {len(each)}, worst {max(each):.0f} ms; at most {LIMIT_LATENCY_MS} ms)"
        )
    return all(statistics.median(each) <= LIMIT_LATENCY_MS for each in late.values())


def _read(fd: int, late_ms: list[float]) -> None:
    """Note how late each line is."""
    rest = b""
    with contextlib.suppress(OSError):  # EIO: nobody has the other end of the terminal any more
        while part := os.read(fd, 1 << 16):
            now = time.time()
            *lines, rest = (rest + part).split(b"\n")
            late_ms += [1e3 * (now - float(match[1])) for line in lines if (match := re.search(rb"printed at ([0-9.]+)", line))]


if __name__ == "__main__":
    sys.exit(main())
