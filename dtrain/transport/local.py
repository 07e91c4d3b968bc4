"""An instance played by this machine: the same Python process as over ssh, started by us instead of by sshd."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

from dtrain.errors import NodeUnreachable
from dtrain.transport import OWN_FILES, STAGE0, Channel, await_magic


class LocalTransport:
    def open(self, within_s: float) -> Channel:
        channel = _LocalChannel()
        try:
            await_magic(channel.read, bytearray())
        except NodeUnreachable as error:
            complaint = channel.stderr()
            channel.close()
            raise NodeUnreachable(f"{sys.executable}: {complaint or error}") from error
        return channel


class _LocalChannel:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", STAGE0),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone
        )
        resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, OWN_FILES)  # the job's is the user's own
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def read(self, size: int) -> bytes:
        return os.read(self._stdout.fileno(), size)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._stdin.fileno(), view) :]

    def stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def close(self) -> None:
        self._stdin.close()  # the session ends at the end of its orders
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._errors.close()
