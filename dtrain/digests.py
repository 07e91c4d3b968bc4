"""Digests of a working directory's files from one launch to the next, so that only what has changed is read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from dtrain.node.tree import Found, file_digest

_RECENT_NS = 2_000_000_000  # a file may change twice within one tick of a file system's clock
_OLD_S = 30 * 86400.0


def digests_in(state: Path) -> Path:
    """Where dtrain's folder on this machine has them."""
    return state / "digests"


class Digests:
    """By path; a digest holds as long as the file's size, times and inode stay what they were."""

    def __init__(self, folder: Path, workdir: Path) -> None:
        self._workdir = workdir
        self._file = folder / f"{hashlib.blake2b(os.fsencode(workdir), digest_size=16).hexdigest()}.json"
        self._known = _read(self._file)
        self._now: dict[str, list[object]] = {}
        self._read_at_ns = time.time_ns()

    def of(self, found: Found) -> str:
        """The digest of a file.

        Raises:
            OSError: it cannot be read.
        """
        looks = [found.size_bytes, found.mtime_ns, found.ctime_ns, found.inode]
        known = self._known.get(found.path)
        if isinstance(known, list) and known[:-1] == looks:
            digest = str(known[-1])
        else:
            digest = file_digest(os.path.join(self._workdir, found.path), found.size_bytes)
        if max(found.mtime_ns, found.ctime_ns) < self._read_at_ns - _RECENT_NS:
            self._now[found.path] = [*looks, digest]
        return digest

    def save(self) -> None:
        """Keep what is known by now, and no longer what was kept of folders from which nothing is launched any more."""
        if self._now == self._known:
            return
        with contextlib.suppress(OSError):  # the next launch reads the files again
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, partial = tempfile.mkstemp(dir=self._file.parent)
            with open(fd, "w") as file:
                json.dump(self._now, file)
            os.replace(partial, self._file)
            for other in self._file.parent.iterdir():
                if time.time() - other.stat().st_mtime > _OLD_S:
                    other.unlink()


def _read(file: Path) -> dict[str, object]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):  # the first time; a file that was cut off
        return {}
    return known if isinstance(known, dict) else {}
