"""The one constant command: every login shell passes it on, and it finds a Python whatever the user's folders hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.node.wire import MAGIC
from dtrain.transport.ssh import COMMAND

pytestmark = pytest.mark.net

SHELLS = [shell for name in ("sh", "bash", "dash", "zsh", "fish", "tcsh") if (shell := shutil.which(name))]
PROGRAM = b"import os\nos.write(1, b'it runs: \"$HOME\" ' + os.read(0, 100))\n"


def _run(shell: str, python: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    stdin = python.encode() + b"\n" + PROGRAM.hex().encode() + b"\n" + b"what follows"
    return subprocess.run((shell, "-c", COMMAND), input=stdin, capture_output=True, timeout=30.0, check=False, env=env)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_passes_it_on(shell: str) -> None:
    ran = _run(shell, sys.executable)
    assert ran.stdout == MAGIC + b'it runs: "$HOME" what follows', ran.stderr


@pytest.mark.parametrize("python", ["", "/nowhere/python", "python3", "a name; with $(odd) 'things'", "/usr/bin", "/bin/false"])
def test_another_python_will_do(python: str) -> None:
    ran = _run("/bin/sh", python)
    if python == "/bin/false":  # it is there and starts: what it says is the answer
        assert (ran.returncode, ran.stdout) == (1, b"")
        return
    assert ran.stdout == MAGIC + b'it runs: "$HOME" what follows', ran.stderr


def test_a_python_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    """What the version check makes of an old one is its exit code; the next is tried with stdin untouched."""
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 86\n")
    old.chmod(0o700)
    assert _run("/bin/sh", str(old)).stdout == MAGIC + b'it runs: "$HOME" what follows'


def test_no_python_at_all_is_said(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 86\n")
    old.chmod(0o700)
    command = COMMAND.replace("/usr/bin/python3 /usr/local/bin/python3 /usr/libexec/platform-python", "")
    env = {"PATH": str(tmp_path)}
    ran = subprocess.run(("/bin/sh", "-c", command), input=b"python3\n", capture_output=True, timeout=30.0, check=False, env=env)
    assert ran.returncode == 127 and b"no Python of version 3.9" in ran.stdout


def test_files_in_the_users_folders_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("raise SystemExit('the wrong os')\n")
    (tmp_path / "sitecustomize.py").write_text("print('noise')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "HOME": str(tmp_path)}
    assert _run("/bin/sh", "python3", env).stdout.endswith(b"what follows")
