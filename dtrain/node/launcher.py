"""The launcher on a node: torchrun, mpirun or one of its daemons, or the worker.py of a job without one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Optional

from dtrain.node import mpi, procs, wire
from dtrain.node.folder import FOLDER_VARIABLE, JobFolder

_TAIL_BYTES = 4000


class Launcher:
    """At most one process. What it returns decides nothing; what it printed may explain something."""

    def __init__(self, folder: JobFolder, env: Mapping[str, str], *, is_mpi: bool) -> None:
        self._folder = folder
        self._env = env
        self._is_mpi = is_mpi
        self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the user's own; the agent may raise its
        self._process: Optional[subprocess.Popen[bytes]] = None
        self.ended_s: Optional[float] = None  # by time.monotonic(); None while it runs, and before
        self.until_s = float("inf")  # it has nothing left to wait for after this

    @property
    def pid(self) -> Optional[int]:
        return self._process.pid if self._process is not None else None

    @property
    def was_started(self) -> bool:
        return self._process is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.ended_s is None

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or has begun to."""
        return self._process is not None and (self.ended_s is not None or procs.is_ending(self._process.pid))

    def start(self, argv: tuple[str, ...]) -> None:
        """Start it.

        Raises:
            OSError: its program cannot be run.
        """
        environ = mpi.environment(os.environ, self._folder) if self._is_mpi else os.environ
        with open(self._folder.stream(wire.LAUNCHER_LOG), "ab") as log:
            self._process = subprocess.Popen(
                argv,
                cwd=self._folder.path,  # not the user's tree: a torch/ folder there would be imported instead of torch
                env={**environ, **self._env, FOLDER_VARIABLE: self._folder.path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # own group: a stop signals the workers' groups and leaves the launcher to see it
                preexec_fn=self._in_child,
            )

    def _in_child(self) -> None:
        procs.die_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._most_files)

    def exited(self, pid: int, status: int) -> None:
        """Is told of every child of the agent that ended."""
        if self._process is not None and pid == self._process.pid:
            self._process.returncode = procs.exit_code(status)
            self.ended_s = time.monotonic()

    def finish(self) -> None:
        """Every worker of the whole job has ended: end torchrun's wait for its peers (an exit barrier of up to 300 s).

        mpirun and its daemons end by themselves, unless a worker.py was killed.
        """
        self.until_s = time.monotonic() + (mpi.LINGER_S if self._is_mpi else 0.0)

    def check(self) -> None:
        """Kill it when its time is over."""
        if time.monotonic() >= self.until_s:
            self.until_s = float("inf")
            if self._process is not None and self.ended_s is None:
                os.kill(self._process.pid, signal.SIGKILL)  # our own child, not reaped yet: the pid is its

    def complain(self, text: str) -> None:
        """Add a line of ours to its log."""
        with open(self._folder.stream(wire.LAUNCHER_LOG), "a") as log:
            log.write(f"dtrain: {text}\n")

    @property
    def ending(self) -> str:
        """How it ended, as a line like those of complain; "" while it runs."""
        if self._process is None or self._process.returncode is None:
            return ""
        code = self._process.returncode
        return f"dtrain: it was ended by signal {code - 128}\n" if code > 128 else f"dtrain: it ended with exit code {code}\n"

    def last_words(self) -> str:
        """What it printed last."""
        try:
            with open(self._folder.stream(wire.LAUNCHER_LOG), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
