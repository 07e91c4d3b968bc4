"""Processes of this node: who they are, and how to end them so that none is left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import time
from typing import Callable, Optional

from dtrain.node import wire
from dtrain.node.record import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # linux/sched.h
_LIBC = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """From now on orphans among the descendants of this process become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel KILL this process when its parent ends. Survives exec, not fork.

    The signal follows the thread that forked, so parents fork in their main thread only.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")


@dataclass(frozen=True)
class Process:
    """One line of /proc: a process as it was when it was looked at."""

    pid: int
    ppid: int
    pgid: int
    state: str  # R, S, D, Z, ...
    start_ticks: int
    num_threads: int

    @property
    def is_dead(self) -> bool:
        """A zombie. One with threads has only lost its first thread, and lives on in the others."""
        return self.state in "ZX" and self.num_threads < 2


def look(pid: int) -> Optional[Process]:
    """The process of that id, or None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:  # ended meanwhile
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold spaces and parentheses
    return Process(pid, int(fields[1]), int(fields[2]), fields[0].decode(), int(fields[19]), int(fields[17]))


def is_ending(pid: int) -> bool:
    """Whether the main thread of a process has begun to end, which is before the children of that thread get their death signal."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return True
    return bool(int(text[text.rindex(b")") + 2 :].split()[6]) & _PF_EXITING)


def descendants(root: int) -> list[Process]:
    """All living processes below `root`; a zombie counts as dead, its children do not."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = look(int(name))
            if process is not None:
                children.setdefault(process.ppid, []).append(process)
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += [process for process in below if not process.is_dead]
        waiting += [process.pid for process in below]
    return found


def with_variable(name: str, value: str) -> list[Process]:
    """All living processes that have this variable in their environment, and whatever is below them; never this one."""
    wanted = f"{name}={value}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        process = look(int(entry))
        if process is None or process.is_dead:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                has_it = wanted in file.read().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if has_it:
            for each in (process, *descendants(process.pid)):
                found[each.pid] = each
    found.pop(os.getpid(), None)
    return list(found.values())


def kill(processes: list[Process]) -> None:
    """KILL processes that somebody else started: each only if it is still the one that was found."""
    pids = {process.pid for process in processes}
    for process in processes:
        now = look(process.pid)
        if now is not None and now.start_ticks == process.start_ticks:
            if process.pgid == process.pid or process.pgid in pids:
                _signal(os.killpg, process.pgid, signal.SIGKILL)
            _signal(os.kill, process.pid, signal.SIGKILL)


def as_survivors(left: list[Process]) -> tuple[wire.Survivor, ...]:
    """What a last event says of processes that are still there."""
    return tuple(wire.Survivor(process.pid, process.state, command_line(process.pid)) for process in left)


def command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def reap(on_exit: Callable[[int, int], None]) -> bool:
    """Take the exit status of every child that ended.

    Args:
        on_exit: called with pid and wait status of each.

    Returns:
        Whether a child is left. False is proof that no descendant of a subreaper exists.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        on_exit(pid, status)


def terminate(processes: list[Process]) -> None:
    """TERM every process group that these belong to, once each."""
    for pgid in sorted({process.pgid for process in processes} - {0, os.getpgrp()}):
        _signal(os.killpg, pgid, signal.SIGTERM)


def kill_all(on_exit: Callable[[int, int], None], timeout_s: float, pause: Callable[[float], None] = time.sleep) -> list[Process]:
    """KILL every descendant of this subreaper until the kernel says that there is none.

    A scan of /proc can miss a process that forks while it is read; only ECHILD ends the loop. Groups go first, since a
    signal to a group is atomic against a fork inside it.

    Args:
        pause: what to do between two rounds, for so many seconds.

    Returns:
        What is left after timeout_s: processes that KILL does not reach (uninterruptible, or another user's).
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = descendants(os.getpid())
        for pgid in {process.pgid for process in left} - {0, os.getpgrp()}:
            _signal(os.killpg, pgid, signal.SIGKILL)
        for process in left:
            _signal(os.kill, process.pid, signal.SIGKILL)
        if not reap(on_exit):
            return []
        if time.monotonic() > deadline:
            return left
        pause(0.002)


def _signal(send: Callable[[int, int], None], target: int, number: int) -> None:
    try:
        send(target, number)
    except OSError as error:  # ended meanwhile, or not ours to signal: kill_all reports what stays
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise


def allow_most_files() -> None:
    """Raise this process's own limit of open files to what it may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a limit beyond what this kernel takes; then what there is must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def exit_code(status: int) -> int:
    """A wait status as a shell says it: the code, or 128+n for signal n."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
