"""`activate`: the user's lines for a login bash, run once, and the environment that they leave behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from typing import IO, Callable, Optional

from dtrain.node import wire
from dtrain.node.enclosure import enclosed
from dtrain.node.preparation import Refused

TIMEOUT_S = 60.0
_POLL_S = 0.02
_DRAIN_S = 0.5  # for what it printed last; what even KILL does not end may hold the pipe open
_SHOWN_CHARACTERS = 2000
_SHOWN_LINES = 20
_NO_PROGRAM = 126  # bash's exit code where a command is a folder, or a file that may not be executed
_CONDA = re.compile(r"(?:\bconda|\bmamba|\bsource|(?:^|\s)\.)\s+activate\b[ \t]*([^\s;&|]*)")
_NO_CONDA = ("conda init", "conda: command not found", "mamba: command not found", "activate: No such file")
_CONDA_PROGRAM = re.compile(r"(/[^\s'\":]*)/(?:bin|condabin)/conda\b")
_CONDA_FOLDERS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "conda", "miniconda", "anaconda")


def activated(text: str, is_gone: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """The environment behind `text`, as `bash -lc` leaves it in the home folder.

    Args:
        is_gone: whether nobody waits for it any more.

    Raises:
        Refused: it failed, or did not end in time.
        BrokenPipeError: nobody waits for it.
    """
    bash, env = shutil.which("bash"), shutil.which("env")
    if bash is None or env is None:
        raise Refused(wire.Failed("setup", "activate wants bash and env, and they are not both on the PATH there", "install them"))
    home = os.path.expanduser("~")
    with tempfile.TemporaryFile() as file:
        # A file of its own: the text may print anything. $? and not &&, in which a `set -e` of the text would mean nothing.
        script = f"eval {shlex.quote(text)}\ncase $? in 0) exec {shlex.quote(env)} -0 >&{file.fileno()};; *) exit;; esac"
        process = subprocess.Popen(
            enclosed([bash, "-l", "-c", script], file.fileno()),
            cwd=home if os.path.isdir(home) else "/",  # as sshd does
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(file.fileno(),),
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        said = _Tail(process.stdout)
        try:
            in_time = _has_ended(process, is_gone, timeout_s)
        finally:
            process.stdin.close()  # it is ended with what it started
            process.wait()
        file.seek(0)
        whole = file.read()
    if not in_time:
        raise _refused(f"activate did not end within {timeout_s:g} s", text, said.text(), "it gets no input, and must end by itself")
    if process.returncode != 0:
        code = process.returncode
        raise _refused(f"activate failed with exit code {code}", text, said.text(), _hint(text, said.text(), code))
    if not whole.endswith(b"\0"):
        raise _refused("activate ended before it was through", text, said.text(), "it must not exit, nor exec another program")
    variables = (os.fsdecode(variable).partition("=") for variable in whole[:-1].split(b"\0"))
    return {name: value for name, _, value in variables if name != "_"}  # the last command, which is ours


def _has_ended(process: subprocess.Popen[bytes], is_gone: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it ended in time."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if is_gone():
            raise BrokenPipeError
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


class _Tail:
    """The last characters that come out of a pipe, however many there are."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 65536):
                self._kept = (self._kept + part)[-4 * _SHOWN_CHARACTERS :]

    def text(self) -> str:
        self._thread.join(_DRAIN_S)
        return "\n".join(self._kept.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:].splitlines()[-_SHOWN_LINES:])


def _refused(what: str, text: str, printed: str, hint: str) -> Refused:
    said = ["it printed:", *(f"  {line}" for line in printed.splitlines())] if printed else ["it printed nothing"]
    return Refused(wire.Failed("setup", "\n  ".join((f"{what}:", *text.strip().splitlines(), *said)), hint, "activate-failed"))


def _hint(text: str, printed: str, code: int) -> str:
    if code == _NO_PROGRAM and (line := _sourced(text.strip())):
        return f"that is no line for bash: write `activate: {line}`"
    asked = _CONDA.search(text)
    if asked is None or not any(sign in printed for sign in _NO_CONDA):
        return "log in there, and type it into `bash -l`"
    base = _conda_base()
    line = f"source {base or 'BASE'}/bin/activate {asked[1]}".rstrip()
    where = "" if base else ", BASE being what `conda info --base` says there"
    return f"conda is set up for shells that somebody types into alone: write `activate: {line}`{where}"


def _sourced(path: str) -> Optional[str]:
    """What was meant by the path of an environment, or of its script, alone."""
    home, ends = os.path.expanduser("~"), ("", "activate", "bin/activate")
    found = next((end for end in ends if os.path.isfile(os.path.join(home, os.path.expanduser(path), end).rstrip("/"))), None)
    return None if found is None else f"source {os.path.join(path, found)}".rstrip("/")


def _conda_base() -> Optional[str]:
    """Where conda lies on this node, as far as its user's files and the usual folders tell."""
    home = os.path.expanduser("~")
    named = [os.environ.get("CONDA_EXE", ""), shutil.which("conda") or ""]
    for name in (".bashrc", ".bash_profile", ".profile", ".zshrc", ".config/fish/config.fish"):
        named.append(_start_of(os.path.join(home, name)))  # `conda init` wrote it there
    found = [match[1] for text in named for match in _CONDA_PROGRAM.finditer(text)]
    found += [os.path.join(above, name) for above in (home, "/opt") for name in _CONDA_FOLDERS]
    return next((folder for folder in found if os.path.isfile(os.path.join(folder, "bin/activate"))), None)


def _start_of(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(256 * 1024)
    except OSError:
        return ""
