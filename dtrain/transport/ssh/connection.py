"""From a route to an authenticated connection, through one bastion where there is one."""

from __future__ import annotations

import logging
import random
import socket
import struct
import threading
import time
from contextlib import closing
from typing import Any

import paramiko
from paramiko.kex_curve25519 import KexCurve25519

from dtrain.errors import AccessDenied, DtrainError, NodeUnreachable
from dtrain.spec.cluster import SshOptions
from dtrain.transport.ssh.config import Route, jump_route
from dtrain.transport.ssh.keys import KEY_TRIES, NoKey, candidates
from dtrain.transport.ssh.known_hosts import HostKey, accept, fingerprint, host_name, known_keys, verdict

# What paramiko raises, beside its own: a server that sends garbage makes its parsers fail in many ways.
FAULTS = (OSError, EOFError, ValueError, LookupError, TypeError, struct.error, paramiko.SSHException)
REPLY_S = 30.0  # for one step of a login
_CONNECT_S = 10.0
_KEEPALIVE_S = 10
_UNACKNOWLEDGED_S = 20.0  # of what was sent into a cut link; the kernel's own limit is a quarter of an hour
_TRIES = 8  # at a server that hangs up before it says anything
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")  # the fastest first
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_CURVE = "curve25519-sha256"  # the only name of it that some servers know (RFC 8731)
_KEX = (f"{_CURVE}@libssh.org", _CURVE, "ecdh-sha2-nistp256", "ecdh-sha2-nistp384", "ecdh-sha2-nistp521")
_SLOW_KEX = ("diffie-hellman-group16-sha512", "diffie-hellman-group14-sha256")
_RSA = ("rsa-sha2-512", "rsa-sha2-256")  # signatures of a key of type ssh-rsa
_HOST_KEYS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", *_RSA)

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its threads print their tracebacks


class Connection(paramiko.Transport):
    """A connection that prefers what is fast and costs little while it is idle.

    Args:
        sock: connected to the server.
        key_types: of host keys, in order of preference.
    """

    _active_check_timeout = 2.0  # paramiko's 0.1 s would keep a quarter of a core busy for 1,000 nodes
    _preferred_ciphers = _CIPHERS
    _preferred_macs = _MACS
    _preferred_kex = _KEX + _SLOW_KEX
    _kex_info = {**paramiko.Transport._kex_info, _CURVE: KexCurve25519}  # type: ignore[attr-defined]  # noqa: RUF012

    def __init__(self, sock: Any, key_types: tuple[str, ...]) -> None:
        super().__init__(sock)
        self._preferred_keys = key_types
        self.banner_timeout = _CONNECT_S
        self.handshake_timeout = REPLY_S
        self.auth_timeout = REPLY_S
        self.channel_timeout = REPLY_S


def log_in(route: Route, options: SshOptions) -> Connection:
    """Connect, check the host key, authenticate.

    Raises:
        NodeUnreachable, AccessDenied: without the node's name, which the caller knows.
    """
    name = route.host_key_name or host_name(route.host, route.port)
    known = known_keys(route.known_hosts, name)
    connection = _handshake(route, options, _key_types(known))
    try:
        _check_host_key(connection, route, name, known, accept_new=options.host_keys == "accept-new")
        _authenticate(connection, route, options)
        connection.set_keepalive(_KEEPALIVE_S)
    except FAULTS as error:
        connection.close()
        raise NodeUnreachable(f"the login failed: {words(error)}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def words(error: BaseException) -> str:
    """An error of a library in words; many have none."""
    if isinstance(error, DtrainError):
        return error.message
    if isinstance(error, EOFError):
        return "the other side hung up"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _handshake(route: Route, options: SshOptions, key_types: tuple[str, ...]) -> Connection:
    attempt = 0
    while True:
        began = time.monotonic()
        connection = Connection(_connect(route, options), key_types)
        try:
            connection.start_client(timeout=REPLY_S)
            if not connection.initial_kex_done:  # it returns without a word when the time is over
                raise TimeoutError
            return connection
        except FAULTS as error:
            connection.close()
            attempt += 1
            if connection.remote_version:
                raise NodeUnreachable(f"no ssh connection: {words(error)}", hint=f"its server: {connection.remote_version}") from error
            hung_up = isinstance(error, (EOFError, ConnectionError)) or "banner" in str(error)  # before it said anything
            if not hung_up or time.monotonic() - began > _CONNECT_S / 2:
                raise NodeUnreachable(
                    f"{route.host} port {route.port} takes a connection, and no ssh server speaks there", hint="is it the right port?"
                ) from error
            if attempt == _TRIES:
                raise NodeUnreachable(
                    f"{route.host} port {route.port} hangs up at once, {_TRIES} times in a row",
                    hint="is it an ssh server? one with many logins at once drops some (MaxStartups), and may ban who fails often",
                ) from error
        time.sleep(random.uniform(0.05, 0.1 * 2**attempt))  # a server drops some of many that come at once (MaxStartups)


def _connect(route: Route, options: SshOptions) -> socket.socket | paramiko.Channel:
    if route.proxy_jump is not None:
        return _through(route.proxy_jump, route, options)
    at = f"{route.host} port {route.port}"
    try:
        sock = socket.create_connection((route.host, route.port), timeout=_CONNECT_S)
    except (socket.gaierror, UnicodeError) as error:
        raise NodeUnreachable(
            f"the name {route.host} is not known: {words(error)}", hint="write an address, or a Host alias of ~/.ssh/config"
        ) from error
    except TimeoutError as error:
        raise NodeUnreachable(
            f"no answer from {at} within {_CONNECT_S:g} s", hint="is the machine up, and does a firewall let ssh through?"
        ) from error
    except OSError as error:
        raise NodeUnreachable(f"{at}: {words(error).lower()}", hint="start sshd there, or leave it out of instances") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; with the keepalives it finds a cut link
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1000))
    return sock


# ---- bastions -----------------------------------------------------------------------------------------------------

_bastions: dict[tuple[str, SshOptions], Connection] = {}  # kept for later nodes and reconnects, to the end of this process
_bastion_locks: dict[tuple[str, SshOptions], threading.Lock] = {}


def _through(jump: str, route: Route, options: SshOptions) -> paramiko.Channel:
    """A byte stream to the node from the bastion, whose one connection all its nodes share."""
    key = (jump, options)
    with _bastion_locks.setdefault(key, threading.Lock()):
        bastion = _bastions.get(key)
        if bastion is None or not bastion.is_active():
            try:
                bastion = _bastions[key] = log_in(jump_route(jump, options), options)
            except DtrainError as error:
                raise type(error)(f"bastion {jump}: {error.message}", hint=error.hint) from error
    try:
        return bastion.open_channel("direct-tcpip", (route.host, route.port), ("127.0.0.1", 0), timeout=_CONNECT_S)
    except FAULTS as error:
        raise NodeUnreachable(
            f"the bastion {jump} does not get through to {route.host} port {route.port}: {words(error)}",
            hint=f"try from there: ssh -p {route.port} {route.host}",
        ) from error


# ---- the host's key -----------------------------------------------------------------------------------------------


def _key_types(known: tuple[HostKey, ...]) -> tuple[str, ...]:
    """Ask for a key of a type that is known for the host: a server with several may else show one to compare with nothing."""
    types = {key.type for key in known if not key.marker}
    return tuple(name for name in _HOST_KEYS if name in types or (name in _RSA and "ssh-rsa" in types)) or _HOST_KEYS


def _check_host_key(connection: Connection, route: Route, name: str, known: tuple[HostKey, ...], *, accept_new: bool) -> None:
    key = connection.get_remote_server_key()
    blob = key.asbytes()
    shown = f"{key.get_name()} {fingerprint(blob)}"
    said = verdict(known, blob)
    if said == "unknown" and accept_new:
        if not route.known_hosts:
            raise AccessDenied("there is no known_hosts file to keep its host key in", hint="see UserKnownHostsFile in ~/.ssh/config")
        try:
            said = accept(route.known_hosts[0], name, key.get_name(), blob)
        except OSError as error:
            raise AccessDenied(f"its host key cannot be kept in {route.known_hosts[0]}: {words(error)}") from error
    match said:
        case "known":
            return
        case "unknown":
            raise AccessDenied(
                f"its host key is not known: {shown}",
                hint=f"log in once with ssh and compare it, or accept new ones with ssh: {{host_keys: accept-new}}; it is kept as {name}",
            )
        case "changed":
            kept = next(entry for entry in known_keys(route.known_hosts, name) if not entry.marker)
            file = kept.where.rpartition(":")[0]
            raise AccessDenied(
                f"its host key has changed, or this is another machine: it shows {shown}, and {kept.where} has {kept.type}"
                f" {fingerprint(kept.blob)}",
                hint=f"only if it was set up anew: ssh-keygen -R '{name}' -f {file}",
            )
        case "revoked":
            raise AccessDenied(f"its host key is marked as revoked: {shown}", hint="the machine needs a new one")


# ---- our keys -----------------------------------------------------------------------------------------------------


def _authenticate(connection: Connection, route: Route, options: SshOptions) -> None:
    tried: list[str] = []
    passed_over: list[str] = []
    with closing(candidates(route)) as keys:
        for candidate in keys:
            if len(tried) == KEY_TRIES:
                passed_over.append(f"{candidate.label}: {KEY_TRIES} others came first")
                break
            try:
                key = candidate.load()
            except NoKey as error:
                if candidate.label == options.identity_file:
                    raise AccessDenied(f"identity_file {candidate.label} {error}") from error
                if not error.is_absent:
                    passed_over.append(f"{candidate.label} {error}")
                continue
            tried.append(candidate.label)
            if _is_accepted(connection, route.user, key):
                return
            if not connection.is_active():
                break
    what = "permission denied" if connection.is_active() else "it hung up"
    said = [f"{what} for user {route.user}", f"tried {', '.join(tried)}" if tried else "there was no key to try", *passed_over]
    raise AccessDenied(
        "; ".join(said), hint=f"try ssh -p {route.port} {route.user}@{route.host}, or name the key with ssh: {{identity_file: ...}}"
    )


def _is_accepted(connection: Connection, user: str, key: paramiko.PKey) -> bool:
    try:
        further = connection.auth_publickey(user, key)
    except paramiko.BadAuthenticationType as error:
        raise AccessDenied(f"it takes no keys, only {', '.join(error.allowed_types)}", hint="allow public keys there") from error
    except paramiko.AuthenticationException:
        return False
    except FAULTS as error:
        if not connection.is_active():
            return False
        raise NodeUnreachable(f"the login as {user} failed: {words(error)}") from error
    if further:
        raise AccessDenied(f"beside a key it wants {', '.join(further)}", hint="allow a key alone for this user there")
    return True
