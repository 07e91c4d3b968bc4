"""The host keys that are known: known_hosts files as sshd(8) describes them."""

from __future__ import annotations

import base64
import fcntl
import fnmatch
import functools
import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["known", "unknown", "changed", "revoked"]

_REVOKED, _AUTHORITY = "@revoked", "@cert-authority"


@dataclass(frozen=True, slots=True)
class HostKey:
    """A line of a known_hosts file."""

    patterns: str  # as written: names with * and ?, negated with !, or one hashed name
    type: str
    blob: bytes
    marker: str  # "" | @revoked | @cert-authority
    where: str  # "~/.ssh/known_hosts:12"

    def is_of(self, name: str) -> bool:
        if self.patterns.startswith("|1|"):
            return _is_hash_of(self.patterns, name)
        patterns = self.patterns.lower().split(",")
        if any(_matches(name, pattern[1:]) for pattern in patterns if pattern.startswith("!")):
            return False
        return any(_matches(name, pattern) for pattern in patterns)


def host_name(host: str, port: int) -> str:
    """The name under which a host's key is kept."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def known_keys(files: Sequence[str], name: str) -> tuple[HostKey, ...]:
    """The lines of some files that speak of a host; a file that is not there has none.

    Certificate authorities are left out: host certificates are not asked for.
    """
    return tuple(key for file in files for key in _read(file, _stamp(file)) if key.marker != _AUTHORITY and key.is_of(name))


def verdict(known: Sequence[HostKey], blob: bytes) -> Verdict:
    """What to make of the key that a host has shown.

    Args:
        known: all lines that speak of the host.
    """
    if any(key.marker == _REVOKED and key.blob == blob for key in known):
        return "revoked"
    good = [key for key in known if not key.marker]
    if any(key.blob == blob for key in good):
        return "known"
    return "changed" if good else "unknown"


def accept(file: str, name: str, type: str, blob: bytes) -> Verdict:
    """Keep a new host's key, unless the host has become known meanwhile.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(file)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)  # many nodes at once, and other launches
        text = lines.read()
        known = [key for key in _parse(text.decode(errors="replace"), file) if key.is_of(name)]
        said = verdict(known, blob)
        if said == "unknown":
            start = b"" if not text or text.endswith(b"\n") else b"\n"
            lines.write(start + f"{name} {type} {base64.b64encode(blob).decode()}\n".encode())
    return "known" if said == "unknown" else said


def fingerprint(blob: bytes) -> str:
    """As ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=16)
def _read(file: str, stamp: tuple[int, int]) -> tuple[HostKey, ...]:
    """Parsed once for all nodes, and again when the file has changed."""
    try:
        text = Path(file).read_text(errors="replace")
    except OSError:  # as to ssh: what cannot be read knows no host
        return ()
    return _parse(text, file)


def _parse(text: str, file: str) -> tuple[HostKey, ...]:
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except ValueError:  # ssh passes over such a line too
            continue
        keys.append(HostKey(fields[0], fields[1], blob, marker, f"{file}:{number}"))
    return tuple(keys)


def _is_hash_of(hashed: str, name: str) -> bool:
    parts = hashed.split("|")
    try:
        salt, wanted = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except (IndexError, ValueError):
        return False
    return hmac.digest(salt, name.encode(), "sha1") == wanted


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or (("*" in pattern or "?" in pattern) and _pattern(pattern).fullmatch(name) is not None)


@functools.lru_cache(maxsize=4096)
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))  # only * and ? are special
