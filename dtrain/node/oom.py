"""Whether the kernel ended a worker, or a process that it started, for lack of memory: its log and the cgroup's counter say so.

A worker that was killed by hand ends with the same signal, so without one of the two nothing is claimed.
"""

from __future__ import annotations

import os
import re
from typing import Optional

from dtrain.node.wire import MemoryFinding

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h; the kernel's log counts as this one does
_KMSG = "/dev/kmsg"
_KMSG_DEVICE = os.makedev(1, 11)  # in some containers the path is another device, which says nothing
_KILLED = re.compile(r"Kill(?:ed)? process (\d+)")
_CHILD_KILLED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: Killed|exited unexpectedly)|BrokenProcessPool"
)
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number close to 2**63


class Witness:
    """What the kernel had said when it was made, which is just before the worker starts.

    Args:
        score: oom_score_adj of the worker and what it starts, which the kernel's log names.
    """

    def __init__(self, score: int) -> None:
        self._score = score
        self._log = _open_log()
        self._kills = _kills()

    def asked(self, pid: int, exit_code: int, signal: Optional[int], traceback: str) -> Optional[MemoryFinding]:
        """What the kernel has said since; None where the worker did not end as one does that lacked memory.

        Args:
            pid: the worker's, as we see it.
            exit_code: 128+9 is also what a shell ends with whose command was killed.
        """
        last_line = traceback.rpartition("\n")[2]
        child = _CHILD_KILLED.search(last_line)
        if exit_code != 128 + 9 and child is None:
            return None
        children = {int(each) for each in (child[1] or "").split(",") if each.strip()} if child else set()
        # Only where the kernel and we number alike, and a number is known, must it be that one. Elsewhere, as in a container or below
        # a shell, a process of this user and with our score is taken for it.
        pids = children or ({pid} if signal is not None else set())
        is_numbered = bool(pids) and os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
        lines = self._new_lines()
        for line in lines or ():
            killed = _KILLED.search(line)
            if killed and (int(killed[1]) in pids if is_numbered else self._is_like_ours(line)):
                return MemoryFinding(True, "kernel log: " + line.partition(", file-rss")[0])
        now = _kills()
        for path, (limit, count) in now.items():
            more = count - self._kills.get(path, (limit, count))[1]
            if more > 0:
                of = "" if limit is None else f" (limit {limit >> 20} MiB)"
                return MemoryFinding(True, f"cgroup {path}{of}: {more} killed for lack of memory while the worker ran")
        return MemoryFinding(False, _nothing_found(lines is not None, bool(now)))

    def _is_like_ours(self, line: str) -> bool:
        return re.search(rf"UID:{os.getuid()}\b.*oom_score_adj:{self._score}\b", line) is not None

    def _new_lines(self) -> Optional[list[str]]:
        """Lines of the kernel log since the start; None where it cannot be read."""
        if self._log is None:
            return None
        lines: list[str] = []
        while True:
            try:
                record = os.read(self._log, 8192)  # one at a time: "priority,sequence,time,flags;text\n key=value..."
            except BrokenPipeError:  # older ones were overwritten
                continue
            except OSError:  # there is no more
                return lines
            lines.append(record.decode(errors="replace").partition(";")[2].partition("\n")[0])


def _nothing_found(has_log: bool, has_cgroup: bool) -> str:
    if has_log and has_cgroup:
        return "neither the kernel log nor its cgroup shows it"
    if has_log:
        return "the kernel log does not show it, and its cgroup cannot be read"
    if has_cgroup:
        return "its cgroup does not show it, and the kernel log cannot be read"
    return "neither the kernel log nor its cgroup can be read"


def _open_log() -> Optional[int]:
    """The kernel log from its present end on."""
    try:
        log = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # dmesg_restrict, or no such device in a container
        return None
    if os.fstat(log).st_rdev != _KMSG_DEVICE:
        os.close(log)
        return None
    os.lseek(log, 0, os.SEEK_END)
    return log


def _kills() -> dict[str, tuple[Optional[int], int]]:
    """Cgroup of this process -> its limit in bytes, and how many the kernel has killed in it for lack of memory."""
    found = {}
    with open("/proc/self/cgroup") as file:
        groups = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            roots, counter, limit = ["/sys/fs/cgroup/memory"], "memory.oom_control", "memory.limit_in_bytes"
        elif controllers == "":
            roots, counter, limit = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], "memory.events", "memory.max"
        else:
            continue
        # A container may see its own group as the root, and its path from outside.
        for folder in [root + path.rstrip("/") for root in roots] + roots:
            match = re.search(r"^oom_kill (\d+)$", _read(f"{folder}/{counter}"), re.MULTILINE)
            if match:
                limited = _read(f"{folder}/{limit}").strip()
                size = int(limited) if limited.isdigit() and int(limited) < _UNLIMITED_BYTES else None
                found[path] = (size, int(match[1]))
                break
    return found


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
