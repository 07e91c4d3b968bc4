"""What it takes to bring a working directory of 2,000 files and 50 MB to a node (a namespace on a bridge), against `rsync -a` over ssh.

dtrain's time is what sync adds to a launch, in which a session with the node is open by then: the working directory is read, what the
node lacks is sent, and a tree of the job's own is laid out there. rsync's is that of its command, with its login, and it makes no copy.
Fresh: the node has nothing, and no file was read before; at most 1.2 times as long. Unchanged: at most half as long.
Then once more fresh, with the login, through a proxy that makes a round trip take 50 ms: less than 15 s.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import queue
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dtrain.link import Link, Target
from dtrain.spec import ClusterSpec, load_job
from dtrain.sync import Snapshot, scan_workdir, send_tree
from tests.lan import DIR, SSH_PORT, Lan, Node, why_not
from tests.ssh import Host, write_user_files

LIMITS = {"fresh": 1.2, "unchanged": 0.5}
FAR_LIMIT_S = 15.0
ROUND_TRIP_S = 0.05
NUM_FILES, FILE_BYTES = 2000, 25_000
LAY_OUT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from dtrain.node.folder import NodeDir
trees = NodeDir.at("auto").trees()
began = time.perf_counter()
trees.make_tree(trees.manifest(sys.argv[2]), "/var/tmp/tree")
print(time.perf_counter() - began)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    if why := why_not() or (None if shutil.which("rsync") else "not installed: rsync"):
        print(f"dtrain's sync / rsync -a over ssh: not measured, {why}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        lan = Lan(Path(folder) / "lan", num_nodes=1)
        try:
            return _measured(Path(folder), lan, repeats)
        finally:
            lan.close()


def _measured(root: Path, lan: Lan, repeats: int) -> int:
    (node,) = lan.nodes
    home, work = root / "home", root / "work"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = Host("far", "127.0.0.1", listener.getsockname()[1], "root", node.public_key)
        write_user_files(home, lan.user_key, [*lan.hosts(), far])
        os.environ["HOME"] = str(home)  # of dtrain in this process
        _fill(work)
        (root / "job.yaml").write_text("command: 'true'\ncluster: lan.yaml\n")
        (root / "lan.yaml").write_text(lan.cluster("n1, far"))
        cluster = load_job(root / "job.yaml").cluster
        times: dict[str, list[tuple[float, float]]] = {"fresh": [], "unchanged": []}
        _rsync(home, work)  # page cache, byte code, dtrain's own code on the node
        with _open(cluster, 0):
            pass
        for _ in range(repeats):
            _empty(root, node)
            for each in times.values():
                theirs = _timed(functools.partial(_rsync, home, work))
                with _open(cluster, 0) as link:
                    each.append((_sync(root, work, link, node), theirs))
        _empty(root, node)
        threading.Thread(target=_delay, args=(listener, node.address), daemon=True).start()
        far_s = _timed(lambda: _far(root, work, cluster))
    is_good = far_s < FAR_LIMIT_S
    for what, each in times.items():
        ours, theirs = (statistics.median(side) for side in zip(*each, strict=True))
        ratio = statistics.median(mine / its for mine, its in each)
        print(f"sync {what}, dtrain / rsync: {ratio:.2f} ({ours:.2f} s / {theirs:.2f} s, medians of {repeats}; at most {LIMITS[what]})")
        is_good = is_good and ratio <= LIMITS[what]
    print(f"sync fresh with {1000 * ROUND_TRIP_S:g} ms a round trip: {far_s:.1f} s (at most {FAR_LIMIT_S:g} s)")
    return 0 if is_good else 1


def _fill(work: Path) -> None:
    contents = random.Random(0)
    for i in range(NUM_FILES):
        path = work / f"folder{i % 40}" / f"file{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.randbytes(FILE_BYTES))
    time.sleep(2.5)  # files that are just written are read again


def _empty(root: Path, node: Node) -> None:
    shutil.rmtree(root / "digests", ignore_errors=True)
    for path in (f"{DIR}/blobs", f"{DIR}/manifests", "/var/tmp/rsync"):
        shutil.rmtree(node.path(path), ignore_errors=True)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _rsync(home: Path, work: Path) -> None:
    argv = ("rsync", "-a", "-e", f"ssh -F {home}/.ssh/config", f"{work}/", "n1:/var/tmp/rsync")
    subprocess.run(argv, stdin=subprocess.DEVNULL, check=True)


def _open(cluster: ClusterSpec, index: int) -> contextlib.closing[Link]:
    return contextlib.closing(Link.open(Target(cluster.instances[index], cluster.dir, "sync", "sync")))


def _sync(root: Path, work: Path, link: Link, node: Node) -> float:
    snapshots: list[Snapshot] = []

    def bring() -> None:
        snapshots.append(scan_workdir(work, "out", root / "digests"))
        send_tree(link, snapshots[0], lambda sent, total: None)

    brought_s = _timed(bring)
    nsenter = ("nsenter", "--mount", "--target", str(node.init), sys.executable, "-I", "-S", "-c", LAY_OUT)
    argv = (*nsenter, str(Path(__file__).resolve().parents[1]), snapshots[0].hash)
    laid_out = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    shutil.rmtree(node.path("/var/tmp/tree"))
    return brought_s + float(laid_out.stdout)


def _far(root: Path, work: Path, cluster: ClusterSpec) -> None:
    with _open(cluster, 1) as link:
        send_tree(link, scan_workdir(work, "out", root / "digests"), lambda sent, total: None)


# ---- the proxy ----


def _delay(listener: socket.socket, address: str) -> None:
    """Pass one connection on, each direction half a round trip later."""
    here, _ = listener.accept()
    there = socket.create_connection((address, SSH_PORT))
    for source, target in ((here, there), (there, here)):
        target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_the_way: queue.Queue[tuple[float, bytes]] = queue.Queue()
        threading.Thread(target=_take, args=(source, on_the_way), daemon=True).start()
        threading.Thread(target=_deliver, args=(target, on_the_way), daemon=True).start()


def _take(source: socket.socket, on_the_way: queue.Queue[tuple[float, bytes]]) -> None:
    data = b" "
    while data:
        try:
            data = source.recv(1 << 16)
        except ConnectionError:
            data = b""
        on_the_way.put((time.monotonic() + ROUND_TRIP_S / 2, data))


def _deliver(target: socket.socket, on_the_way: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due_s, data = on_the_way.get()
        time.sleep(max(0.0, due_s - time.monotonic()))
        if not data:
            target.close()
            return
        target.sendall(data)


if __name__ == "__main__":
    sys.exit(main())
