"""The IP addresses of this node, as the kernel lists them (rtnetlink(7))."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from typing import Optional

from dtrain.node.wire import Address

_NETLINK_TIMEOUT_S = 2.0
_NETLINK_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_ADDRESS_HEADER = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface index
_ATTRIBUTE_HEADER = struct.Struct("=HH")  # rtattr: length, type
_NLMSG_ERROR, _NLMSG_DONE, _RTM_NEWADDR, _RTM_GETADDR = 2, 3, 20, 22
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_UNIVERSE = 0
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_RUNNING = 0x1, 0x40


def addresses() -> tuple[Address, ...]:
    """The addresses at which others could reach this node, and 127.0.0.1 and ::1, in the kernel's order.

    Link-local ones are left out, as well as those of an interface that is down or has no carrier. One that only claims to be
    up is found by the proof.
    """
    try:
        found = list(_ask_kernel())
    except OSError:  # netlink is refused in some sandboxes
        return (Address("lo", "127.0.0.1", 8, 0),)
    interfaces = {index: _interface(index) for index, _, _ in found}
    down = {name for name in interfaces.values() if _is_down(name)}
    return tuple(
        Address(interfaces[index], address, prefix_length, max(0, _number(interfaces[index], "speed") or 0))
        for index, address, prefix_length in found
        if interfaces[index] not in down
    )


def _ask_kernel() -> Iterator[tuple[int, str, int]]:
    """Interface index, address and prefix length of every address that may be of use."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_NETLINK_TIMEOUT_S)
        size = _NETLINK_HEADER.size + _ADDRESS_HEADER.size
        kernel.send(_NETLINK_HEADER.pack(size, _RTM_GETADDR, _REQUEST_DUMP, 1, 0) + _ADDRESS_HEADER.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        while True:
            answer = kernel.recv(1 << 16)
            at = 0
            while at < len(answer):
                length, kind, _, _, _ = _NETLINK_HEADER.unpack_from(answer, at)
                body = answer[at + _NETLINK_HEADER.size : at + length]
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                if kind == _RTM_NEWADDR:
                    yield from _useful(body)
                at += _aligned(length)


def _useful(body: bytes) -> Iterator[tuple[int, str, int]]:
    family, prefix_length, _, scope, index = _ADDRESS_HEADER.unpack_from(body)
    attributes: dict[int, bytes] = {}
    at = _ADDRESS_HEADER.size
    while at < len(body):
        length, kind = _ATTRIBUTE_HEADER.unpack_from(body, at)
        attributes[kind] = body[at + _ATTRIBUTE_HEADER.size : at + length]
        at += _aligned(length)
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))  # of a point-to-point link, ADDRESS is the other end's
    if raw is None or family not in (socket.AF_INET, socket.AF_INET6):
        return
    address = socket.inet_ntop(family, raw)
    is_of_use = not address.startswith(("127.", "169.254.")) if family == socket.AF_INET else scope == _SCOPE_UNIVERSE
    if is_of_use or address in ("127.0.0.1", "::1"):
        yield index, address, prefix_length


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _interface(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:  # gone since
        return ""


def _is_down(interface: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH22x", os.fsencode(interface), 0))
        except OSError:
            return interface == ""
    flags: int = struct.unpack_from("16xH", answer)[0]
    if not flags & _IFF_UP:
        return True
    return not flags & _IFF_RUNNING and _number(interface, "carrier") == 0  # RUNNING comes up to a second after the carrier


def _number(interface: str, name: str) -> Optional[int]:
    try:
        with open(f"/sys/class/net/{interface}/{name}") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
