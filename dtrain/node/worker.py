"""worker.py: stands between the launcher and one user process, the same under every launcher.

It fetches what to run from the agent (so no user argument or secret is in a launcher's argv), gives the process a log
file of its own, and reports its start and its end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from dtrain.node import procs, wire
from dtrain.node.folder import JobFolder

_TAIL_BYTES = 256 * 1024
_TRACEBACK = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch puts it before each line once a process group exists
# A process that says one of these lost its peer: what ended the peer is the cause, not this.
_PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|recvValue failed|sendBytes failed|failed to recv|Socket Timeout|DistNetworkError"
)


def main(argv: list[str]) -> int:
    """Run one worker to its end, and end with its exit code.

    Args:
        argv: the job folder, and the launcher that started us.
    """
    procs.die_with_parent()
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # the user's process is in our group and gets it too; we stay to report
    folder = JobFolder(argv[0])
    place = place_of(argv[1], os.environ)
    rank, local_rank = place.rank, place.local_rank
    agent = folder.connect()
    agent.sendall(wire.frame(wire.WorkerHello(rank, local_rank)))
    received = wire.read_frame(agent.recv)
    if received is None:
        return 1  # the agent is gone, and with it the job
    order = received[0]
    assert isinstance(order, wire.WorkerOrder)

    log_path = folder.stream(wire.rank_log(rank))
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    user = _start(order, place.environ, log)
    if user is not None:
        agent.sendall(wire.frame(wire.WorkerStarted(time.time(), rank, local_rank, user.pid)))
        code = _wait(user)
    else:
        code = 127
    number = code - 128 if user is not None and user.returncode < 0 else None
    tail = _tail(log_path) if code != 0 else ""
    agent.sendall(
        wire.frame(
            wire.WorkerEnded(
                at=time.time(),
                rank=rank,
                local_rank=local_rank,
                exit_code=code,
                signal=number,
                traceback=last_traceback(tail),
                symptom=number == signal.SIGTERM or is_peer_lost(tail),
            )
        )
    )
    os._exit(code)  # Python's own end lets go of our signal handlers, and mpirun never ends once TERM has killed a worker.py


@dataclass(frozen=True)
class Place:
    """A worker's numbers, and what its process sees of the environment in which the launcher started us."""

    rank: int
    local_rank: int
    environ: dict[str, str]


_NUMBERS = {  # torchrun's name of each: Open MPI's
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def place_of(launcher: str, environ: Mapping[str, str]) -> Place:
    """What a launcher said of a worker's place, in torchrun's words; under `none` a node's command has no such place."""
    kept = {**environ, "PATH": os.pathsep.join((os.path.dirname(sys.executable), environ.get("PATH", os.defpath)))}
    if launcher == "none":
        unnumbered = {name: value for name, value in kept.items() if name not in _NUMBERS}
        return Place(int(environ["NODE_RANK"]), 0, unnumbered)
    if launcher == "mpirun":
        kept.update({name: environ[theirs] for name, theirs in _NUMBERS.items()})
    return Place(int(kept["RANK"]), int(kept["LOCAL_RANK"]), kept)


def _start(order: wire.WorkerOrder, environ: Mapping[str, str], log: int) -> Optional[subprocess.Popen[bytes]]:
    def in_child() -> None:
        procs.die_with_parent()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(order.oom_score))

    try:
        return subprocess.Popen(
            order.argv,
            cwd=order.cwd,
            env={**environ, **order.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=in_child,
        )
    except OSError as error:
        os.write(log, f"dtrain: cannot start {order.argv[0]}: {error.strerror}\n".encode())
        return None


def _wait(user: subprocess.Popen[bytes]) -> int:
    status = user.wait()
    return status if status >= 0 else 128 - status


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def last_traceback(text: str) -> str:
    """The last Python traceback in a worker's output, with the line that names the exception; "" without one.

    Chained tracebacks ("During handling of ...", "The above exception was the direct cause ...") stay together.
    """
    text = _RANK_PREFIX.sub("", text)
    start = text.rfind(_TRACEBACK)
    if start < 0:
        return ""
    while True:
        before = text.rfind(_TRACEBACK, 0, start)
        between = text[before:start].rstrip() if before >= 0 else ""
        if not between.endswith(("another exception occurred:", "direct cause of the following exception:")):
            break
        start = before
    lines = text[start:].splitlines()
    end = len(lines)
    last_mark = max(index for index, line in enumerate(lines) if line.startswith(_TRACEBACK))
    for index in range(last_mark + 1, len(lines)):
        if lines[index] and not lines[index].startswith((" ", "\t")):  # the exception's own line
            end = index + 1
            break
    return "\n".join(lines[:end])


def is_peer_lost(text: str) -> bool:
    """Whether the output's last traceback says that another worker went away."""
    return _PEER_LOST.search(last_traceback(text)) is not None
