"""The job's `setup` on a node: the user's lines for bash, before any worker, one job's at a time."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Optional

from dtrain.node import procs, wire
from dtrain.node.folder import FOLDER_VARIABLE, JobFolder, lock

_TRY_S = 0.2  # between two tries for the lock
_TAIL_BYTES = 4000
_TAIL_LINES = 20
# Stands in the first of the user's lines, so that they count from 1. They may set a trap of their own in its place.
_TELL_THE_LINE = """trap '[[ $- != *e* ]] || echo "dtrain: line $LINENO of ${BASH_SOURCE:-setup} failed: $BASH_COMMAND" >&2' ERR; """


class Setup:
    """At most one process, and the lock that keeps the setups of other jobs on this machine waiting while it is there."""

    def __init__(self, folder: JobFolder, order: wire.Prepare) -> None:
        self._folder = folder
        self._order = order
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._lock = -1
        self.exit_code: Optional[int] = None  # None before its end; 128+n for signal n
        self.try_at_s = float("inf")  # by time.monotonic(): to be started then, if nobody has the lock

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.exit_code is None

    def start(self) -> None:
        """Start it now, or when the lock is free."""
        try:
            self._lock = lock(self._folder.setup_lock)
        except BlockingIOError:
            if self.try_at_s == float("inf"):
                self._write("dtrain: waiting for another setup on this machine\n")
            self.try_at_s = time.monotonic() + _TRY_S
            return
        self.try_at_s = float("inf")
        order, cwd = self._order, self._order.workdir or self._folder.tree
        path = os.pathsep.join((os.path.dirname(order.python), os.environ.get("PATH", os.defpath)))
        ours = {"PATH": path, **order.worker_env, **order.secrets, FOLDER_VARIABLE: self._folder.path}
        try:
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    ("bash", "-e", "-c", _TELL_THE_LINE + (order.setup or "")),
                    cwd=cwd,
                    env={**os.environ, **ours},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=procs.die_with_parent,
                )
        except OSError as error:
            self._write(f"dtrain: cannot start bash in {cwd}: {error.strerror}\n")
            self.exit_code = 127

    def exited(self, pid: int, status: int) -> None:
        """Is told of every child of the agent that ended."""
        if self._process is not None and pid == self._process.pid:
            self.exit_code = self._process.returncode = procs.exit_code(status)

    def close(self) -> None:
        """Let the next job's begin."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def last_words(self) -> str:
        """Its last lines, as they would stand on a screen: a progress bar redraws its line after a carriage return."""
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").rstrip().split("\n")
        except FileNotFoundError:
            return ""
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines[-_TAIL_LINES:])

    @property
    def _log(self) -> str:
        return self._folder.stream(wire.SETUP_LOG)

    def _write(self, text: str) -> None:
        with open(self._log, "a") as log:
            log.write(text)
