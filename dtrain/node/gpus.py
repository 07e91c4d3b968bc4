"""The GPUs of this node: which there are, who holds them, and a lock on each that a job takes.

nvidia-smi knows processes, and a job that is only about to start has none yet. So each job keeps a lock on each of its GPUs,
in the folder that all jobs of one user on one node share.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
from typing import Optional

from dtrain.node import procs, wire
from dtrain.node.folder import NodeDir, lock
from dtrain.node.record import dataclass

_NVIDIA_SMI_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S = 1.0
_COMMAND_LENGTH = 60  # of what is told of another's process
_MOST_WORDS = 300  # of what nvidia-smi complains of, in letters
_GPU = "gpu=index,uuid,memory.total,memory.used,name"  # the name last: it is free text
_PROCESS = "compute-apps=gpu_uuid,pid,used_memory"  # what a desktop draws with is not among them


class Taken(Exception):
    """A GPU has become another job's."""

    def __init__(self, index: int, by: Optional[wire.Open]) -> None:
        super().__init__(index, by)
        self.index = index
        self.by = by


@dataclass(frozen=True)
class Found:
    gpus: tuple[wire.Gpu, ...]
    fault: str = ""  # why not all of them, or none, are told


def found(node_dir: NodeDir) -> Found:
    """All GPUs, and for each the job that has reserved it and the processes that compute on it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Found(())
    try:
        listed = _ask(tool, _GPU, "tells of no GPU")
        by_uuid, lost = parse_gpus(listed)
        if not by_uuid:
            return Found((), f"{tool} tells of no GPU: {_words(listed)}")
        jobs = {gpu.index: _reserved_by(node_dir, gpu.index) for gpu in by_uuid.values()}
        holders = parse_processes(_ask(tool, _PROCESS, "does not say who holds the GPUs"))
    except ValueError as error:
        return Found((), str(error))
    gpus = tuple(
        wire.Gpu(gpu.index, gpu.name, gpu.memory_bytes, gpu.memory_used_bytes, jobs[gpu.index], tuple(holders.get(uuid, ())))
        for uuid, gpu in by_uuid.items()
    )
    return Found(gpus, f"{tool} says of {lost}" if lost else "")


def parse_gpus(listed: str) -> tuple[dict[str, wire.Gpu], str]:
    """GPUs by uuid, and those that the driver has lost, in words. A line that is no GPU's is a warning of the driver's."""
    rows = [row for line in listed.splitlines() if len(row := line.split(", ", 4)) == 5 and row[0].isdigit()]
    there = {row[1]: wire.Gpu(int(row[0]), row[4], _bytes(row[2]), _bytes(row[3])) for row in rows if not row[1].startswith("[")}
    return there, ", ".join(f"GPU {row[0]}: {row[1]}" for row in rows if row[1].startswith("["))


def parse_processes(listed: str) -> dict[str, list[wire.GpuHolder]]:
    """Who holds each GPU, by its uuid. A process holds it also where neither its pid nor its memory is told."""
    holders: dict[str, list[wire.GpuHolder]] = {}
    for row in (line.split(", ") for line in listed.splitlines()):
        if len(row) == 3:
            pid = int(row[1]) if row[1].isdigit() else 0
            holders.setdefault(row[0], []).append(wire.GpuHolder(pid, _user(pid), _bytes(row[2]), _command(pid)))
    return holders


def reserve(node_dir: NodeDir, indices: tuple[int, ...], about: wire.Open) -> tuple[int, ...]:
    """Lock GPUs for a job, all or none of them.

    Returns:
        Descriptors: a GPU is the job's as long as a process has one that came from here.

    Raises:
        Taken: one is another's.
    """
    with contextlib.ExitStack() as taken:
        fds = []
        for index in sorted(indices):  # of two jobs that want the same ones, one gets them
            path = node_dir.gpu_lock(index)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            try:
                fd = lock(path, _LOCK_TIMEOUT_S)
            except BlockingIOError:
                raise Taken(index, _named_in(path)) from None
            taken.callback(os.close, fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, wire.to_json(about).encode(), 0)
            fds.append(fd)
        taken.pop_all()
    return tuple(fds)


def release(locks: tuple[int, ...]) -> None:
    """Unlock GPUs, also for the other processes that have inherited these descriptors."""
    for fd in locks:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _ask(tool: str, query: str, otherwise: str) -> str:
    """Raises ValueError: it does not do that, and why."""
    argv = [tool, f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:  # of another architecture, as in an image
        raise ValueError(f"{tool} {otherwise}: {error.strerror}") from None
    try:
        said, complained = asked.communicate(timeout=_NVIDIA_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(asked.pid, signal.SIGKILL)
        for pipe in filter(None, (asked.stdout, asked.stderr)):
            pipe.close()
        asked.returncode = -signal.SIGKILL  # it is not waited for: one that hangs in the driver does not end
        raise ValueError(f"{tool} did not answer within {_NVIDIA_SMI_TIMEOUT_S:g} s") from None
    if asked.returncode != 0:
        raise ValueError(f"{tool} {otherwise}: {_words(complained or said) or f'it ended with {asked.returncode}'}")
    return said


def _words(said: str) -> str:
    """In a line, without what would do something to a terminal."""
    text = " ".join(said.split())[:_MOST_WORDS]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _reserved_by(node_dir: NodeDir, index: int) -> str:
    path = node_dir.gpu_lock(index)
    if not os.path.exists(path):
        return ""
    try:
        os.close(lock(path))
    except BlockingIOError:
        by = _named_in(path)
        return "of another launch" if by is None else f"{by.name} {by.job}"
    return ""


def _named_in(path: str) -> Optional[wire.Open]:
    """The job that a lock names; None in the instant before its name is written."""
    with open(path) as file:
        text = file.read()
    try:
        named = wire.from_json(text)
    except ValueError:
        return None
    return named if isinstance(named, wire.Open) else None


def _bytes(mebibytes: str) -> Optional[int]:
    """None for "[N/A]" and its like."""
    return int(mebibytes) << 20 if mebibytes.isdigit() else None


def _user(pid: int) -> str:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:  # ended meanwhile, or of another container
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _command(pid: int) -> str:
    """Its start, without what would do something to a terminal."""
    text = "".join(letter if letter.isprintable() else "?" for letter in procs.command_line(pid))
    return text if len(text) <= _COMMAND_LENGTH else f"{text[:_COMMAND_LENGTH]}..."
