"""Nodes that answer ssh: one authenticated connection and one channel per node. No other package imports paramiko."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import paramiko

from dtrain.errors import DtrainError, NodeUnreachable, PreflightFailed
from dtrain.node.wire import HEAR_S
from dtrain.spec.cluster import SshOptions
from dtrain.transport import OLD_PYTHON, STAGE0, Channel, await_magic, shown_noise
from dtrain.transport.ssh.config import RESOLVING_AT_ONCE, Route, jump_route, resolve
from dtrain.transport.ssh.connection import FAULTS, Connection, left_s, log_in, words
from dtrain.transport.ssh.keys import ask_passphrases

# The same for every node and job, so there is nothing to quote and nothing to see in `ps`. The first line of stdin names
# the Python to try first; each is named before it is tried. No single quote, backslash, ! or line end inside: bash, dash,
# zsh, fish and tcsh pass it on as it is.
COMMAND = (
    '/bin/sh -c \'IFS= read -r p; for p in "$p" python3 /usr/bin/python3 /usr/local/bin/python3 /usr/libexec/platform-python'
    " python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do"
    ' p=$(command -v "$p" 2>/dev/null) && [ -f "$p" ] || continue;'  # a folder of that name is none
    ' echo "dtrain $$ tries $p";'
    f' "$p" -I -S -c "{STAGE0}"; r=$?; [ $r = {OLD_PYTHON} ] || exit $r;'
    " done; echo no Python of version 3.9 or newer was found; exit 127'"
)

_TRIED = re.compile(rb"^dtrain ([0-9]+) tries (/.*)\n", re.MULTILINE)
# Ends what hangs, with the process group of that shell: without a terminal, sshd leaves it when the connection ends.
_END = "/bin/sh -c 'read -r pid name state parent group rest </proc/{}/stat && kill -KILL -$group'"
_END_S = 2.0

_STDERR_BYTES = 64 * 1024


def make_ready(hosts: Sequence[tuple[str, SshOptions]]) -> None:
    """Ask for passphrases while nothing else happens."""
    if sys.stdin is not None and sys.stdin.isatty():  # else nobody is there to be asked
        with ThreadPoolExecutor(RESOLVING_AT_ONCE) as pool:
            ask_passphrases(route for routes in pool.map(_routes, *zip(*hosts, strict=True)) for route in routes)


def _routes(host: str, options: SshOptions) -> list[Route]:
    """To a host and the bastion before it, as far as they can be told; connecting says why not."""
    routes = []
    with contextlib.suppress(DtrainError):
        routes.append(resolve(host, options))
        if routes[0].proxy_jump is not None:
            routes.append(jump_route(routes[0].proxy_jump, options))
    return routes


class SshTransport:
    """The way to one host.

    Args:
        node: its name in messages.
        host: host name, IP literal or Host alias of ~/.ssh/config.
        python: the interpreter to try first; any Python from 3.9 on will do.
    """

    def __init__(self, node: str, host: str, options: SshOptions, python: str) -> None:
        self._node = node
        self._host = host
        self._options = options
        self._python = python

    def open(self, within_s: float) -> Channel:
        until_s = time.monotonic() + within_s
        try:
            connection = log_in(resolve(self._host, self._options), self._options, until_s)
        except DtrainError as error:
            raise type(error)(f"{self._node}: {error.message}", hint=error.hint) from error
        try:
            return _start(connection, self._python, until_s, within_s)
        except PreflightFailed as error:
            connection.close()
            raise PreflightFailed(f"{self._node}: {error.message}", hint=error.hint, finding=error.finding) from error
        except (*FAULTS, NodeUnreachable) as error:
            connection.close()
            hint = error.hint if isinstance(error, NodeUnreachable) else None
            raise NodeUnreachable(f"{self._node}: no Python could be started there: {words(error)}", hint=hint) from error


class _SshChannel:
    def __init__(self, connection: Connection, channel: paramiko.Channel) -> None:
        self._connection = connection
        self._channel = channel
        self._complaint = b""
        self._is_closed = False

    def read(self, size: int) -> bytes:
        try:
            part = self._channel.recv(size)
        except TimeoutError as error:
            raise TimeoutError(f"it has said nothing for {HEAR_S:g} s") from error
        if not part and not self._channel.eof_received and not self._is_closed:
            raise ConnectionResetError(self._connection.what_broke())
        return part

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except TimeoutError as error:
            self.close()  # a part of it was sent, so that nothing behind it could be understood
            raise TimeoutError(f"it has taken nothing for {HEAR_S:g} s") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise BrokenPipeError("the connection is gone" if self._is_closed else self._connection.what_broke()) from error

    def stderr(self) -> str:
        while self._channel.recv_stderr_ready() and len(self._complaint) < _STDERR_BYTES:
            self._complaint += self._channel.recv_stderr(_STDERR_BYTES)
        return self._complaint.decode(errors="replace").strip()

    def close(self) -> None:
        self._is_closed = True
        self._connection.close()


def _start(connection: Connection, python: str, until_s: float, within_s: float) -> Channel:
    channel = connection.open_session(timeout=left_s(until_s))
    channel.settimeout(left_s(until_s))
    channel.set_combine_stderr(True)  # what a start-up file says on stderr is noise too, and must not fill the window
    channel.exec_command(COMMAND)
    with contextlib.suppress(OSError):  # what ran there has ended already; what it said is still to be read
        channel.sendall(python.encode() + b"\n")
    seen = bytearray()
    shell = tried = b""

    def read(size: int) -> bytes:
        nonlocal shell, tried
        channel.settimeout(left_s(until_s))
        part = channel.recv(size)
        for found in _TRIED.finditer(seen + part):
            shell, tried = found.groups()
        return part

    try:
        await_magic(read, seen)
    except TimeoutError as error:
        if shell:
            _end(connection, shell)
        raise _no_python(tried, seen, f"no answer within {within_s:g} s") from error
    except NodeUnreachable as error:
        if channel.closed and not channel.eof_received:
            raise NodeUnreachable(connection.what_broke()) from error
        raise _no_python(tried, seen) from error
    channel.set_combine_stderr(False)
    channel.settimeout(HEAR_S)
    return _SshChannel(connection, channel)


def _end(connection: Connection, shell: bytes) -> None:
    with contextlib.suppress(*FAULTS):  # it takes one session only, or is gone: nothing more can be done from here
        channel = connection.open_session(timeout=_END_S)
        channel.settimeout(_END_S)
        channel.exec_command(_END.format(shell.decode()))
        channel.recv(1)


def _no_python(tried: bytes, seen: bytearray, silence: str = "") -> DtrainError:
    """Why none speaks: that which was tried last does not, or the login shell has not come so far.

    Args:
        seen: the last of what was printed.
        silence: how long it was waited for one that has not ended.
    """
    *_, last = _TRIED.split(seen)
    said = shown_noise(bytearray(last))
    if said.startswith("no Python of version"):
        hint = "install Python 3.9 or newer there, or name one with python: in the cluster file"
        return PreflightFailed(said, hint=hint, finding="python-missing")
    words = "; it said: ".join(filter(None, (silence, said))) or "it ended without a word"
    if tried:
        problem = f"{tried.decode(errors='replace')} does not run as a Python: {words}"
        return PreflightFailed(problem, hint="set python: in the cluster file to one that has torch", finding="python-missing")
    if silence:
        return NodeUnreachable(words, hint="does a start-up file of the login shell there read its input, or run something else?")
    return NodeUnreachable(words, hint="its login shell must run commands: try ssh HOST /bin/sh -c true")
