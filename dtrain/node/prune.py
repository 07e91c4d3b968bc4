"""What a node keeps of old jobs: the newest of them whole, of the others their outputs alone."""

from __future__ import annotations

import contextlib
import os

from dtrain.node import tree
from dtrain.node.folder import NodeDir, names_in

NUM_KEPT = 20  # jobs


def prune(node_dir: NodeDir, kept_tree: str = "") -> None:
    """Remove old jobs and the contents that no job uses; nothing while somebody else is at it, or brings a tree.

    Args:
        kept_tree: that no job has yet.

    Killed at any point, it leaves nothing that the next time does not remove.
    """
    try:
        lock = node_dir.lock_trees(shared=False, timeout_s=0.0)
    except BlockingIOError:
        return
    try:
        for job in _old_jobs(node_dir.jobs):
            _take_away(node_dir, job)
        for job in names_in(node_dir.removed):
            tree.remove(os.path.join(node_dir.removed, job))
        used = {folder.used_tree() for job in names_in(node_dir.jobs) for folder in node_dir.folders(job)}
        node_dir.trees().collect(used | {kept_tree})
    finally:
        os.close(lock)


def _old_jobs(jobs: str) -> list[str]:
    """All but the newest, by when their folders came."""
    came_at = {}
    for job in names_in(jobs):
        path = os.path.join(jobs, job)
        with contextlib.suppress(FileNotFoundError):  # somebody deletes it by hand
            if os.path.isdir(path):
                came_at[job] = os.stat(path).st_mtime_ns
    return sorted(came_at, key=came_at.__getitem__)[:-NUM_KEPT]


def _take_away(node_dir: NodeDir, job: str) -> None:
    """Out of the jobs in one step, unless it runs or has not said how it ended."""
    with contextlib.ExitStack() as held:
        for folder in node_dir.folders(job):
            try:
                held.callback(os.close, folder.lock())
            except OSError:  # its agent or guard has it
                return
            if folder.is_unsettled:
                return
        os.makedirs(node_dir.removed, mode=0o700, exist_ok=True)
        os.rename(os.path.join(node_dir.jobs, job), os.path.join(node_dir.removed, job))
