"""Our own keys: files, each read once however many nodes there are, and what the ssh-agent holds."""

from __future__ import annotations

import base64
import contextlib
import functools
import getpass
import io
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import UnknownKeyType

from dtrain.transport.ssh.config import Route, is_default_key

KEY_TRIES = 5  # OpenSSH's server hangs up at the sixth (MaxAuthTries)
_AGENT_S = 10.0
_PASSPHRASE_TRIES = 3
_OPENSSH_BEGIN = "-----BEGIN OPENSSH PRIVATE KEY-----"
_OPENSSH_MAGIC = b"openssh-key-v1\0"  # PROTOCOL.key of OpenSSH

_keys: dict[str, paramiko.PKey | NoKey] = {}  # by file
_loading = threading.Lock()  # reading an RSA key takes a fifth of a second: one thread does it, the others wait for that


class NoKey(Exception):
    """A file holds no usable key; the text goes on after the file's name."""

    def __init__(self, text: str, *, is_absent: bool = False, is_locked: bool = False) -> None:
        super().__init__(text)
        self.is_absent = is_absent
        self.is_locked = is_locked  # by a passphrase


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key that the server may accept."""

    label: str  # the file, or what the agent calls it
    load: Callable[[], paramiko.PKey]  # raises NoKey


def candidates(route: Route) -> Generator[Candidate]:
    """Files in the order of the configuration, those that cannot be read by what the agent holds of them; then its other keys."""
    with contextlib.ExitStack() as agent:
        held = functools.cache(lambda: _held(route.agent, agent))
        had: set[bytes] = set()
        for file in route.identity_files:
            key = _read(file)
            public = key.asbytes() if isinstance(key, paramiko.PKey) else _public_half(file)
            if isinstance(key, NoKey) and key.is_locked and public is None:  # by its name: ssh-add calls it so
                public = next((blob for blob, other in held().items() if other.comment == file), None)
            if isinstance(key, NoKey) and public is not None and public in held():
                yield Candidate(f"{file} (ssh-agent)", functools.partial(_itself, held()[public]))
            else:
                yield Candidate(file, functools.partial(_load, file))
            had |= {public} if public is not None else set()
        if not route.only_identity_files:
            for public, other in held().items():
                if public not in had:
                    yield Candidate(f"{other.comment or other.get_name()} (ssh-agent)", functools.partial(_itself, other))


def ask_passphrases(routes: Iterable[Route]) -> None:
    """Ask the person at the terminal for the passphrase of each key that is needed, once for all.

    Needed is a key that the ssh-agent does not hold, and that was named or is all that there is to offer.
    """
    for file in dict.fromkeys(file for route in routes for file in _needed(route)):
        for _ in range(_PASSPHRASE_TRIES):
            try:
                _keys[file] = _unlock(file, getpass.getpass(f"passphrase of {file}: ").encode())
                break
            except (ValueError, TypeError, EOFError, paramiko.SSHException):  # TypeError, EOFError: nothing was typed
                print("that does not open it", file=sys.stderr)


def _needed(route: Route) -> list[str]:
    loaded = {file: _read(file) for file in route.identity_files}
    locked = [file for file, key in loaded.items() if isinstance(key, NoKey) and key.is_locked]
    if not locked:
        return []
    offered = [candidate.label for candidate in candidates(route)]
    has_others = any(not isinstance(loaded.get(label), NoKey) for label in offered)
    return [file for file in locked if file in offered and (not has_others or not is_default_key(file))]


def _held(path: str | None, until: contextlib.ExitStack) -> dict[bytes, AgentKey]:
    """The keys that an agent can sign with for so long, by their public half."""
    if path is None:
        return {}
    try:
        agent = until.enter_context(contextlib.closing(_Agent(path)))
    except (OSError, paramiko.SSHException):  # as ssh does: without an agent there are the files
        return {}
    return {key.asbytes(): key for key in agent.get_keys()}


def _itself(key: paramiko.PKey) -> paramiko.PKey:
    return key


def _load(file: str) -> paramiko.PKey:
    key = _read(file)
    if isinstance(key, NoKey):
        raise key
    return key


def _read(file: str) -> paramiko.PKey | NoKey:
    with _loading:
        if file not in _keys:
            _keys[file] = _parse(file)
        return _keys[file]


def _parse(file: str) -> paramiko.PKey | NoKey:
    try:
        return _unlock(file, None)
    except FileNotFoundError:
        return NoKey("is not there", is_absent=True)
    except OSError as error:
        return NoKey(f"cannot be read: {error.strerror}")
    except TypeError:  # how cryptography says that a passphrase is needed
        return NoKey("has a passphrase; add it to the ssh-agent: ssh-add " + file, is_locked=True)
    except (ValueError, UnknownKeyType, UnsupportedAlgorithm, paramiko.SSHException):
        if _public_line(file) is not None:
            return NoKey("is the public half of a key: name the file without .pub, or add that one to the ssh-agent")
        return NoKey("is not a private key of a kind that works here (Ed25519, ECDSA, RSA)")


def _unlock(file: str, passphrase: Any) -> paramiko.PKey:
    """The key in a file; a passphrase is bytes, and not text as paramiko's annotation says."""
    try:
        return paramiko.PKey.from_path(file, passphrase)
    except paramiko.SSHException:
        return _from_pkcs8(Path(file).read_bytes(), passphrase)


def _from_pkcs8(data: bytes, passphrase: bytes | None) -> paramiko.PKey:
    """A key as openssl writes it, which cryptography reads and paramiko does not."""
    key = load_pem_private_key(data, passphrase)
    kinds = ((Ed25519PrivateKey, paramiko.Ed25519Key), (EllipticCurvePrivateKey, paramiko.ECDSAKey), (RSAPrivateKey, paramiko.RSAKey))
    for theirs, ours in kinds:
        if isinstance(key, theirs):
            return ours.from_private_key(io.StringIO(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()))
    raise ValueError(f"no kind of key that works here: {type(key).__name__}")


def _public_half(file: str) -> bytes | None:
    """As ssh finds it: the file is one itself, one is beside it, or the file says it in front of what its passphrase locks."""
    return _public_line(file) or _public_line(file + ".pub") or _public_in_private(file)


def _public_line(file: str) -> bytes | None:
    try:
        kind, text = Path(file).read_text().split()[:2]
        blob = base64.b64decode(text)
    except (OSError, ValueError):
        return None
    return blob if paramiko.Message(blob).get_string() == kind.encode() else None


def _public_in_private(file: str) -> bytes | None:
    try:
        pem = Path(file).read_text().partition(f"{_OPENSSH_BEGIN}\n")[2].partition("-")[0]
        data = base64.b64decode(pem)
    except (OSError, ValueError):
        return None
    if not data.startswith(_OPENSSH_MAGIC):
        return None
    fields = paramiko.Message(data[len(_OPENSSH_MAGIC) :])
    for _ in ("cipher", "way from the passphrase to its key", "options of that"):
        fields.get_string()
    fields.get_int()  # number of keys, which is 1
    return fields.get_string()


class _Agent(AgentSSH):
    """An agent at any socket; paramiko's own looks at $SSH_AUTH_SOCK alone.

    Each login has a connection to it of its own: signing on one from several threads would mix the answers.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_AGENT_S)
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]
