"""worker.py: stands between the launcher and one user process, the same under every launcher.

It fetches what to run from the agent (so no user argument or secret is in a launcher's argv), gives the process a log
file of its own, and reports its start and its end.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Optional

from dtrain.node import disk, lastwords, oom, procs, wire
from dtrain.node.folder import JobFolder

_BLOCK_BYTES = 4096


def main(argv: list[str]) -> int:
    """Run one worker to its end, and end with its exit code.

    Args:
        argv: the job folder, and the launcher that started us.
    """
    procs.die_with_parent()
    log = _Log()
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: log.told_to_end())  # the user's process is in our group and gets it too; we stay to report
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

    log.open(folder.stream(wire.rank_log(rank)))
    kernel = oom.Witness(order.oom_score)
    environ = {**place.environ, **order.env}
    user: Optional[subprocess.Popen[bytes]] = None
    why, code = "", 127
    try:
        user = _start(order, environ, log.fd)
    except OSError as error:
        why = _not_started(order, environ, error)
        os.write(log.fd, f"{why}\n".encode())
    else:
        agent.sendall(wire.frame(wire.WorkerStarted(time.time(), rank, local_rank, user.pid)))
        status = user.wait()
        code = status if status >= 0 else 128 - status
    number = code - 128 if user is not None and user.returncode < 0 else None
    ended = _ended(rank, local_rank, code, number, log)
    if user is None:
        ended = replace(ended, traceback=why)
    elif not ended.symptom and not log.is_told_to_end:
        ended = replace(ended, memory=kernel.asked(user.pid, code, number, ended.traceback))
    agent.sendall(wire.frame(ended))
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


def _start(order: wire.WorkerOrder, environ: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        procs.die_with_parent()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(order.oom_score))

    return subprocess.Popen(
        order.argv,
        cwd=order.cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=in_child,
    )


def _not_started(order: wire.WorkerOrder, environ: Mapping[str, str], error: OSError) -> str:
    """One line, by which reasons.py tells the causes apart."""
    if error.filename == order.cwd:
        return f"dtrain: cannot enter the working directory {order.cwd}: {error.strerror}"
    why = f"dtrain: cannot start {order.argv[0]}: {error.strerror}"
    if error.errno != errno.E2BIG:
        return why
    size_bytes = sum(len(os.fsencode(text)) for text in (*order.argv, *environ, *environ.values()))
    return f"{why}: {size_bytes:,} bytes of arguments and variables"


class _Log:
    """What the user's process writes, and how much of it was there when we were told to end."""

    def __init__(self) -> None:
        self.fd = -1
        self._path = ""
        self._end_when_told: Optional[int] = None

    def open(self, path: str) -> None:
        self._path = path
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def told_to_end(self) -> None:
        if self._end_when_told is None and self.fd >= 0:
            self._end_when_told = os.fstat(self.fd).st_size

    @property
    def is_told_to_end(self) -> bool:
        return self._end_when_told is not None

    def tail(self) -> str:
        return self._before(os.fstat(self.fd).st_size)

    def tail_when_told(self) -> str:
        """Its end as it was when we were told to end; "" where nobody told us."""
        return "" if self._end_when_told is None else self._before(self._end_when_told)

    def cut_off(self) -> str:
        """What stands in place of last words for which its disk has no room; "" where it has."""
        try:
            disk.reserve(self.fd, _BLOCK_BYTES)
        except OSError as error:
            return f"[Errno {error.errno}] {error.strerror}: {self._path!r}; the last words there are cut off"
        return ""

    def _before(self, end: int) -> str:
        start = max(0, end - lastwords.TAIL_BYTES)
        return os.pread(self.fd, end - start, start).decode(errors="replace")


def _ended(rank: int, local_rank: int, code: int, number: Optional[int], log: _Log) -> wire.WorkerEnded:
    if code != 0:
        # An exception takes a while to end a process, and its peers see their connections closed meanwhile and end first.
        # What was told to end in that while had failed by itself, with the code that Python gives an exception.
        early = lastwords.last_words(log.tail_when_told(), 128 + signal.SIGTERM, signal.SIGTERM)
        if early.told and not early.is_peer_lost:
            code, number = (code, None) if number is None else (1, None)
            return wire.WorkerEnded(time.time(), rank, local_rank, code, number, early.told, symptom=False, failed_first=True)
    words = lastwords.last_words(log.tail() if code != 0 else "", code, number)
    symptom = number == signal.SIGTERM or words.is_peer_lost
    told = words.told
    if code != 0 and number is None and not lastwords.is_whole(told):
        told = log.cut_off() or told
    return wire.WorkerEnded(time.time(), rank, local_rank, code, number, told, symptom)
