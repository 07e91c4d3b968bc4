"""The one constant command: every login shell passes it on, and it finds a Python whatever the user's folders hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from dtrain.errors import NodeUnreachable, PreflightFailed
from dtrain.link import LOGIN_S
from dtrain.node.wire import MAGIC
from dtrain.spec.cluster import SshOptions
from dtrain.transport.ssh import COMMAND, SshTransport
from dtrain.transport.ssh.config import resolve
from tests.cluster import Workspace
from tests.ssh import SSHD, Sshd, write_user_files

pytestmark = pytest.mark.net

SHELLS = [shell for name in ("sh", "bash", "dash", "zsh", "fish", "tcsh") if (shell := shutil.which(name))]
PROGRAM = b"import os\nos.write(1, b'it runs: \"$HOME\" ' + os.read(0, 100))\n"

# What each reads before any command, and what people write there.
START_UP_FILES = {"bash": ".bashrc", "zsh": ".zshenv", "fish": ".config/fish/config.fish", "tcsh": ".tcshrc"}
HABITS = {
    "bash": "set -u -f; shopt -s expand_aliases; alias sh=false exec=false; python3() { false; }",
    "zsh": "setopt no_unset ksh_arrays csh_junkie_quotes; alias sh=false; alias -g exec=false; python3() { false; }",
    "fish": "alias sh=false; function python3; false; end; set -x PATH /nowhere",
    "tcsh": "set echo verbose noglob; alias sh false; alias exec false; setenv PATH /nowhere",
}
READS = {"bash": "read -r answer", "zsh": "read -r answer", "fish": "read answer", "tcsh": "set answer = $<"}
LEAVES = {"bash": "exit 3", "zsh": "exit 3", "fish": "kill %self", "tcsh": "kill $$"}  # where exit only ends the file
needs_sshd = pytest.mark.skipif(SSHD is None, reason="not installed: sshd")


def _run(shell: str, python: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    stdin = python.encode() + b"\n" + PROGRAM.hex().encode() + b"\n" + b"what follows"
    ran = subprocess.run((shell, "-c", COMMAND), input=stdin, capture_output=True, timeout=30.0, check=False, env=env)
    ran.stdout = re.sub(rb"^(dtrain [0-9]+ tries /.*\n)+", b"", ran.stdout)
    return ran


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


@needs_sshd
@pytest.mark.parametrize("shell", [shell for shell in HABITS if shutil.which(shell)])
def test_what_people_write_into_start_up_files_changes_nothing(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    with _nodes_of(workspace, monkeypatch, {shell: (shell, f"echo welcome\ncd /\n{HABITS[shell]}\n")}):
        assert _login(shell, LOGIN_S) == ""


@needs_sshd
def test_start_up_files_that_let_nothing_run_are_told_with_what_they_printed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"reads": READS, "becomes": dict.fromkeys(READS, "exec cat"), "leaves": LEAVES}
    nodes = {
        f"{shell}-{way}": (shell, f"echo choose one\n{lines[shell]}\n")
        for shell in filter(shutil.which, READS)
        for way, lines in ways.items()
    }
    with _nodes_of(workspace, monkeypatch, nodes), ThreadPoolExecutor(len(nodes)) as pool:
        for node, said in zip(nodes, pool.map(_login, nodes, [4.0] * len(nodes)), strict=True):
            is_silent = not node.endswith("-leaves")
            assert f"{node}: no Python could be started there: " in said and "choose one" in said
            assert ("no answer within 4 s" in said) == is_silent, said
            assert ("does a start-up file" if is_silent else "its login shell must run commands") in said.partition("hint: ")[2], said


BROKEN = {
    "no program": ("", 0o600, "ermission denied"),
    "no interpreter": ("#!/nowhere/python\n", 0o700, "not found"),
    "a wrapper that ends": ("#!/bin/sh\nprintf '%02000d\nno licence\n' 0\nexit 3\n", 0o700, "no licence"),
    "a silent one": ("#!/bin/sh\nexit 3\n", 0o700, "it ended without a word"),
    "a wrapper that hangs": ("#!/bin/sh\necho waiting\nsleep 1000\n", 0o700, "no answer within 4 s; it said: waiting"),
}


@needs_sshd
def test_a_python_that_does_not_run_is_named_and_ended(workspace: Workspace, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays, which the workspace sees to."""
    monkeypatch.setenv("HOME", str(workspace.root / "home"))
    resolve.cache_clear()
    for name, (text, mode, said) in BROKEN.items():
        python = workspace.root / "python"
        python.unlink(missing_ok=True)
        python.write_text(text)
        python.chmod(mode)
        with pytest.raises(PreflightFailed, match=f"^box: {python} does not run as a Python: ") as refused:
            SshTransport("box", "box", SshOptions(), str(python)).open(4.0)
        assert said in refused.value.message and refused.value.finding == "python-missing", (name, refused.value)


@contextmanager
def _nodes_of(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, nodes: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """Each with this login shell and its start-up file."""
    monkeypatch.setenv("HOME", str(workspace.root / "home"))
    resolve.cache_clear()
    with ExitStack() as servers:
        hosts = []
        for node, (shell, start_up_file) in nodes.items():
            extra = () if shell == "bash" else (f'ForceCommand exec {shell} -c "$SSH_ORIGINAL_COMMAND"',)
            sshd = servers.enter_context(closing(Sshd(workspace.root / node, extra=extra)))
            path = sshd.home / START_UP_FILES[shell]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(start_up_file)
            hosts.append(sshd.host(node, more=f"  IdentityFile {sshd.user_key}\n"))
        write_user_files(workspace.root / "home", workspace.root / "none", hosts)
        yield


def _login(node: str, within_s: float) -> str:
    """Why no Python comes to run there; "" where one does."""
    try:
        SshTransport(node, node, SshOptions(), sys.executable).open(within_s).close()
    except NodeUnreachable as error:
        return f"{error.message}\nhint: {error.hint}"
    return ""
