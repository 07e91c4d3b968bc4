"""What git says of a working directory: the commit that is checked out, and whether anything was changed since."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

_LIMIT_S = 2.0  # a checkout on a slow disk is not waited for


@dataclass(frozen=True, slots=True)
class Checkout:
    commit: str
    changed: bool | None  # whether the directory has files that are not as in that commit; None: git did not say in time


class Look(Thread):
    """Beside other work."""

    def __init__(self, workdir: Path, outputs: str) -> None:
        super().__init__(name="git", daemon=True)
        self._workdir = workdir
        self._outputs = outputs
        self._until_s = time.monotonic() + _LIMIT_S
        self._commit = ""
        self._changed: bool | None = None
        self.start()

    def run(self) -> None:
        git = shutil.which("git")
        if git is None:
            return
        self._commit = (self._ask(git, "rev-parse", "HEAD") or "").strip()
        if self._commit:
            without = () if os.path.isabs(self._outputs) else (f":(exclude,literal){self._outputs}",)
            files = self._ask(git, "--no-optional-locks", "status", "--porcelain", "--", ".", *without)
            self._changed = None if files is None else files != ""

    def _ask(self, git: str, *words: str) -> str | None:
        try:
            return subprocess.run(
                (git, *words),
                cwd=self._workdir,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=True,
                timeout=max(0.0, self._until_s - time.monotonic()),
            ).stdout
        except (OSError, subprocess.SubprocessError):  # no checkout, an empty one, another user's; or it takes too long
            return None

    def checkout(self) -> Checkout | None:
        """None where the directory is in no checkout, or git does not answer."""
        self.join(max(0.0, self._until_s - time.monotonic()))
        return Checkout(self._commit, self._changed) if self._commit else None
