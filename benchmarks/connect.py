"""What dtrain costs to reach many nodes: 64 sshd on loopback, connected to, logged in to and probed, all at once.

At most 1.3 times as long as bare paramiko connections that run the same probe program, and at most 0.6 times as long as that program
through `ssh` processes, 32 at once. Each measurement is a process of its own, without its imports. Then: of 100 logins at once to one
sshd as it comes all get in, and 200 idle sessions cost at most 1 % of a core and 150 KiB each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dtrain.link import LOGIN_S
from dtrain.spec import JobSpec, load_job
from tests.ssh import SSHD, Sshd, write_user_files

NUM_NODES, NUM_LOGINS, NUM_IDLE = 64, 100, 200
LIMIT_PARAMIKO, LIMIT_SSH = 1.3, 0.6
LIMIT_PERCENT, LIMIT_KIB = 1.0, 150.0
IDLE_S = 10.0
AT_ONCE, SSH_AT_ONCE = 64, 32
_T = TypeVar("_T")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=tuple(MEASURED), help=argparse.SUPPRESS)  # one measurement, in a process of its own
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(MEASURED[options.only](Path(options.folder))))
        sys.stdout.flush()
        os._exit(0)  # what ends 64 connections is not measured
    if SSHD is None:
        print("connections: not measured, not installed: sshd")
        return 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        root = Path(folder)
        start_servers(root, running)
        return 0 if all((_ratios(root, options.repeats), _logins(root), _idle(root))) else 1


def start_servers(root: Path, running: contextlib.ExitStack) -> None:
    (root / "home").mkdir()
    servers = [Sshd(root / "n0")]
    running.callback(servers[0].close)
    key = servers[0].user_key
    authorized = key.with_name("user_key.pub").read_text()
    for number in range(1, NUM_NODES + 1):
        server = Sshd(root / f"n{number}", extra=("MaxStartups 500",))
        running.callback(server.close)
        (server.folder / "authorized_keys").write_text(authorized)
        servers.append(server)
    write_user_files(root / "home", key, [server.host(f"n{number}") for number, server in enumerate(servers)])
    (root / "hosts.json").write_text(json.dumps([[str(key), server.port, server.host().user] for server in servers]))


def _ratios(root: Path, repeats: int) -> bool:
    names = ("dtrain", "paramiko", "ssh")
    _measure("dtrain", root)  # page cache, and the bundle in its place
    rounds = [{name: _measure(name, root) for name in names} for _ in range(repeats)]
    took = {name: statistics.median(each[name] for each in rounds) for name in names}
    is_good = True
    for other, limit in (("paramiko", LIMIT_PARAMIKO), ("ssh", LIMIT_SSH)):
        ratio = took["dtrain"] / took[other]
        print(
            f"connect, log in and probe {NUM_NODES} nodes, dtrain / {other}: {ratio:.2f} "
            f"({took['dtrain']:.2f} s / {took[other]:.2f} s, medians of {repeats}; at most {limit})"
        )
        is_good = is_good and ratio <= limit
    return is_good


def _logins(root: Path) -> bool:
    num_in = _measure("logins", root)
    print(f"{NUM_LOGINS} logins at once to one sshd: {num_in:.0f} of {NUM_LOGINS}")
    return bool(num_in == NUM_LOGINS)


def _idle(root: Path) -> bool:
    percent, kib = _measure("percent and KiB", root)
    print(
        f"{NUM_IDLE} idle sessions: {percent:.2f} % of a core over {IDLE_S:g} s, {kib:.0f} KiB each"
        f" (at most {LIMIT_PERCENT:g} % and {LIMIT_KIB:g} KiB)"
    )
    return bool(percent <= LIMIT_PERCENT and kib <= LIMIT_KIB)


def _measure(name: str, root: Path) -> Any:
    env = {**os.environ, "HOME": str(root / "home")}
    env.pop("SSH_AUTH_SOCK", None)
    argv = (sys.executable, __file__, "--only", name, "--folder", str(root))
    return json.loads(subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout)


# ---- measured, each in a process of its own ----


def _spec(root: Path, names: list[str]) -> JobSpec:
    job = root / "job.yaml"
    (root / "train.py").touch()
    cluster = f"{{instances: [{', '.join(names)}], gpus_per_instance: 1, device: cpu, python: {sys.executable}, dir: {root}/nodes}}"
    job.write_text(f"script: train.py\ncluster: {cluster}\n")
    return load_job(job)


def _by_dtrain(root: Path) -> float:
    import dtrain.transport.ssh  # noqa: F401  loaded before the clock starts, as theirs
    from dtrain.nodes import connect, probe
    from dtrain.start import targets_of

    spec = _spec(root, [f"n{number}" for number in range(1, NUM_NODES + 1)])
    began = time.perf_counter()
    facts = probe(spec, connect(targets_of(spec.cluster, "measured", spec.name), lambda step: None).all()).all()
    took = time.perf_counter() - began
    assert len(facts) == NUM_NODES
    return took


def _program(root: Path) -> tuple[str, bytes]:
    """The command that dtrain runs on a node, and all that it says to it up to the probe."""
    from dtrain.bundle import bundle
    from dtrain.node import wire
    from dtrain.transport.ssh import COMMAND

    code = bundle()
    lines = f"{sys.executable}\n".encode() + code.start(f"{root}/nodes")
    orders = (wire.Open(f"{root}/nodes", "measured", "measured", "n"), wire.Probe(sys.executable, mpi=False))
    return COMMAND, lines + b"".join(map(wire.frame, orders))


def _by_paramiko(root: Path) -> float:
    import paramiko

    command, said = _program(root)
    hosts = json.loads((root / "hosts.json").read_text())[1:]
    key = paramiko.PKey.from_path(hosts[0][0])

    def ask(host: tuple[str, int, str]) -> paramiko.Transport:
        connection = paramiko.Transport(("127.0.0.1", host[1]))
        connection.start_client(timeout=60)
        connection.auth_publickey(host[2], key)
        channel = connection.open_session()
        channel.exec_command(command)
        channel.sendall(said)
        _await_facts(channel.recv)
        return connection

    return _all_at_once(hosts, ask, AT_ONCE)


def _by_ssh(root: Path) -> float:
    command, said = _program(root)
    config = str(root / "home/.ssh/config")

    def ask(number: int) -> None:
        argv = ("ssh", "-F", config, "-T", f"n{number}", command)
        done = subprocess.run(argv, input=said, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert b"NodeFacts" in done.stdout

    return _all_at_once(range(1, NUM_NODES + 1), ask, SSH_AT_ONCE)


def _await_facts(read: Callable[[int], bytes]) -> None:
    seen = b""
    while b"NodeFacts" not in seen:
        part = read(65536)
        assert part, seen
        seen += part


def _all_at_once(work: Iterable[_T], ask: Callable[[_T], object], at_once: int) -> float:
    with ThreadPoolExecutor(at_once) as pool:
        began = time.perf_counter()
        kept = list(pool.map(ask, work))
        took = time.perf_counter() - began
    del kept
    return took


def _num_logged_in(root: Path) -> int:
    from dtrain.errors import DtrainError
    from dtrain.spec.cluster import SshOptions
    from dtrain.transport import Channel
    from dtrain.transport.ssh import SshTransport

    def log_in(_: int) -> int:
        try:
            kept.append(SshTransport("n0", "n0", SshOptions(), sys.executable).open(LOGIN_S))
        except DtrainError as error:
            print(error, file=sys.stderr)
            return 0
        return 1

    kept: list[Channel] = []
    with ThreadPoolExecutor(NUM_LOGINS) as pool:
        return sum(pool.map(log_in, range(NUM_LOGINS)))


def _idle_cost(root: Path) -> tuple[float, float]:
    """Percent of a core and KiB, of this process."""
    from dtrain.link import Link
    from dtrain.start import targets_of

    (target,) = targets_of(_spec(root, ["n1"]).cluster, "measured", "measured")
    kept = [Link.open(target)]  # what all share
    before = _rss_bytes()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        kept += pool.map(lambda _: Link.open(target), range(NUM_IDLE))
    kib = (_rss_bytes() - before) / NUM_IDLE / 1024
    began = time.process_time()
    time.sleep(IDLE_S)
    return 100 * (time.process_time() - began) / IDLE_S, kib


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


MEASURED: dict[str, Callable[[Path], object]] = {
    "dtrain": _by_dtrain,
    "paramiko": _by_paramiko,
    "ssh": _by_ssh,
    "logins": _num_logged_in,
    "percent and KiB": _idle_cost,
}


if __name__ == "__main__":
    sys.exit(main())
