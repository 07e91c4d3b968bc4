"""A transport decides how bytes get to a node; what runs there is the launcher's business."""

from __future__ import annotations

from typing import Protocol

from dtrain.errors import NodeUnreachable
from dtrain.spec import Instance

# The one command that starts everything on a node. No user data is in it, so there is nothing to quote. It says the magic,
# then reads the length (4 bytes) and text of node/boot.py from stdin and runs it.
STAGE0 = (
    "import os;os.write(1,bytes([0])+b'DTRAIN1'+bytes([0,10]))\n"
    "def r(n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  p=os.read(0,n-len(b))\n"
    "  if not p:raise SystemExit\n"
    "  b+=p\n"
    " return b\n"
    "exec(compile(r(int.from_bytes(r(4),'big')),'boot','exec'))"
)


class Channel(Protocol):
    """Bytes to and from a Python on a node that runs STAGE0."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" when the other side has ended."""

    def write(self, data: bytes) -> None:
        """All of it.

        Raises:
            OSError: the other side has ended.
        """

    def stderr(self) -> str:
        """What the other side complained of so far."""

    def close(self) -> None:
        """Hang up; a blocked read returns b""."""


class Transport(Protocol):
    """One node's way in."""

    def open(self) -> Channel:
        """A new channel.

        Raises:
            NodeUnreachable: there is no way in now.
            AccessDenied: the node refuses us, or we refuse its host key.
        """


def transport_to(instance: Instance) -> Transport:
    """The transport of an instance.

    Raises:
        NodeUnreachable: it is another machine, for which there is no transport yet.
    """
    from dtrain.transport.local import LocalTransport

    if instance.host is not None:
        raise NodeUnreachable(
            f"{instance.host}: this version of dtrain reaches no other machines yet",
            hint="instances: 2 plays two on this machine",
        )
    return LocalTransport()
