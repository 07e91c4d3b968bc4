"""A transport decides how bytes get to a node; what runs there is the launcher's business."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Protocol

from dtrain.errors import NodeUnreachable, PreflightFailed
from dtrain.node.wire import MAGIC
from dtrain.spec import Instance

# What a Python on a node is started with, in one line and without a quote, so that every login shell passes it on as it is.
# It says the magic, reads a line in hexadecimal from stdin and runs it (bundle.py). Exit code OLD_PYTHON: try another.
OLD_PYTHON = 86
STAGE0 = (
    f"import os,sys;sys.version_info<(3,9)and sys.exit({OLD_PYTHON});os.write(1,bytes({list(MAGIC)}));"
    "exec(bytes.fromhex(bytes().join(iter(lambda:os.read(0,1)or sys.exit(),bytes([10]))).decode()))"
)
_FILES_OF_HOST, _FILES_BESIDE = 2, 128  # open at once: for a node behind ssh; for the rest of dtrain
_FILES_OF_LOCAL, _FILES_BESIDE_LOCAL = 7, 32  # where this machine plays it, while it is started; and no ssh is needed
OWN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # the user's own limit, before it is raised
_MOST_NOISE_BYTES = 16 * 1024 * 1024  # of a shell's start-up files before the node's first word
_SHOWN_BYTES = 1000  # of them, the last ones
_READ_BYTES = 64 * 1024


class Channel(Protocol):
    """Bytes to and from a Python on a node that runs STAGE0 and has said the magic."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" when the other side has ended.

        Raises:
            OSError: nothing came for too long, or the connection broke; without an errno, its text says so.
        """

    def write(self, data: bytes) -> None:
        """All of it.

        Raises:
            OSError: the other side has ended; without an errno, its text says more.
        """

    def stderr(self) -> str:
        """What the other side complained of so far."""

    def close(self) -> None:
        """Hang up; a blocked read returns b""."""


class Transport(Protocol):
    """One node's way in."""

    def open(self, within_s: float) -> Channel:
        """A new channel.

        Args:
            within_s: from the first packet to a Python that speaks; a node that takes longer is given up on.

        Raises:
            NodeUnreachable: there is no way in now, or no usable Python there.
            AccessDenied: the node refuses us, or we refuse its host key.
        """


def transport_to(instance: Instance) -> Transport:
    """The transport of an instance. Each is loaded when it is first used: paramiko takes a while."""
    if instance.host is None:
        from dtrain.transport.local import LocalTransport

        return LocalTransport()
    from dtrain.transport.ssh import SshTransport

    return SshTransport(instance.name, instance.host, instance.ssh, instance.python or "python3")


def make_ready(instances: Sequence[Instance]) -> None:
    """Before many are reached at the same time: make sure that this process may, and ask for what only a person knows.

    Raises:
        PreflightFailed: this machine does not allow so many open files.
    """
    hosts = [(instance.host, instance.ssh) for instance in instances if instance.host is not None]
    num_local = len(instances) - len(hosts)
    beside = _FILES_BESIDE if hosts else _FILES_BESIDE_LOCAL
    _allow_files(_FILES_OF_HOST * len(hosts) + _FILES_OF_LOCAL * num_local + beside, len(instances))
    if hosts:
        from dtrain.transport import ssh

        ssh.make_ready(hosts)


def _allow_files(needed: int, num_nodes: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise PreflightFailed(
            f"{num_nodes} nodes take up to {needed} open files at once, and this machine allows a process {hard}",
            hint="raise the limit here (ulimit -Hn; nofile in /etc/security/limits.conf), or leave nodes out",
        )
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def await_magic(read: Callable[[int], bytes], seen: bytearray) -> None:
    """Read up to the magic, over what a login shell printed before it; behind it, all is silent until it is answered.

    Args:
        seen: gets the last of what was read.

    Raises:
        NodeUnreachable: it did not come; the message is what came instead.
    """
    size = 0
    while MAGIC not in seen:
        del seen[:-_SHOWN_BYTES]
        part = read(_READ_BYTES)
        if not part:
            raise NodeUnreachable(shown_noise(seen) or "it ended without a word")
        seen += part
        size += len(part)
        if size > _MOST_NOISE_BYTES:
            raise NodeUnreachable(f"its start-up files print without end: {shown_noise(seen)}")


def shown_noise(seen: bytearray) -> str:
    """The last of it, for a message."""
    return seen[-_SHOWN_BYTES:].decode(errors="replace").strip()
