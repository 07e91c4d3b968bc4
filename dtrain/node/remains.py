"""What is left of a job whose agent and guard are both gone: found, ended and recorded by the next session on the node."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Optional

from dtrain.node import procs, wire
from dtrain.node.folder import FOLDER_VARIABLE, JobFolder, NodeDir, read_plain

_KILL_TIMEOUT_S = 10.0


def settle(node_dir: NodeDir) -> tuple[wire.LeftOver, ...]:
    """Settle every job of this node that nobody looks after any more.

    Returns:
        Those that had left something running.
    """
    return tuple(found for folder in node_dir.unsettled() if (found := settle_job(folder)) is not None)


def settle_job(folder: JobFolder) -> Optional[wire.LeftOver]:
    """End what a job has left running, and write its last event; nothing where the job is alive, over, or never began."""
    started, is_over = _read(folder)
    if started is None or is_over:
        return None
    try:
        lock = folder.lock()
    except OSError:  # agent or guard lives, another session is at it, or the folder is being deleted
        return None
    try:
        if _read(folder)[1]:
            return None  # another session was faster
        if started.boot_id != procs.boot_id():
            _end(folder, "rebooted", "", [])  # its processes are gone, and their ids are others' now
            return None
        num_found, left = _kill_processes_of(folder)
        found = f"what they left running was killed: {num_found} process{'' if num_found == 1 else 'es'}" if num_found else ""
        _end(folder, "all-killed", found, left)
        return wire.LeftOver(folder.job, num_found, tuple(process.pid for process in left)) if num_found else None
    finally:
        os.close(lock)


def _end(folder: JobFolder, reason: str, detail: str, left: list[procs.Process]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next session tries again
        folder.append_event(wire.NodeEnded(time.time(), "lost", reason, detail, procs.as_survivors(left)))
        folder.settled()


def _read(folder: JobFolder) -> tuple[Optional[wire.AgentStarted], bool]:
    """How the agent started, and whether there is a last event."""
    started, is_over = None, False
    try:
        lines = read_plain(folder.stream(wire.EVENTS)).split(b"\n")
    except OSError:
        return None, False
    for line in lines:
        try:
            event = wire.from_json(line)
        except ValueError:  # torn, as on a full disk
            continue
        if isinstance(event, wire.AgentStarted):
            started = event
        is_over = is_over or isinstance(event, wire.NodeEnded)
    return started, is_over


def _kill_processes_of(folder: JobFolder) -> tuple[int, list[procs.Process]]:
    """KILL whatever carries the job's folder in its environment, and what is below that, until nothing is found twice.

    Returns:
        How many there were, and what is left of them.
    """
    found: set[tuple[int, int]] = set()
    until_s = time.monotonic() + _KILL_TIMEOUT_S
    num_empty = 0
    while True:
        left = procs.with_variable(FOLDER_VARIABLE, folder.path)
        found |= {(process.pid, process.start_ticks) for process in left}
        num_empty = 0 if left else num_empty + 1
        if num_empty == 2 or time.monotonic() >= until_s:
            return len(found), left
        procs.kill(left)
        time.sleep(0.01)
