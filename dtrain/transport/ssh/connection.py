"""From a route to an authenticated connection, through bastions where there are some."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimeoutOfFuture  # Python 3.10 has two
from typing import Any

import paramiko
from paramiko.kex_curve25519 import KexCurve25519
from paramiko.ssh_exception import IncompatiblePeer

from dtrain.errors import AccessDenied, DtrainError, NodeUnreachable
from dtrain.spec.cluster import SshOptions
from dtrain.transport.ssh.config import Route, jump_route
from dtrain.transport.ssh.keys import KEY_TRIES, NoKey, candidates
from dtrain.transport.ssh.known_hosts import HostKey, accept, fingerprint, host_name, known_keys, verdict

# What paramiko raises, beside its own: a server that sends garbage makes its parsers fail in many ways.
FAULTS = (OSError, EOFError, ValueError, LookupError, TypeError, struct.error, paramiko.SSHException)
_CONNECT_S = 10.0
_NEXT_ADDRESS_S = 2.0  # for an address of a name that has others
_KEEPALIVE_S = 10
_UNACKNOWLEDGED_S = 15.0  # of what was sent into a cut link, at most _KEEPALIVE_S after the cut; the kernel's own limit is 15 minutes
_ENDING_S = 0.2  # a connection ends its streams just before it says that it has ended
_MOST_PAUSE_S = 2.0  # between two tries at a server that hangs up before it says anything; shorter ones only keep it busy
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")  # the fastest first
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_CURVE = "curve25519-sha256"  # the only name of it that some servers know (RFC 8731)
_KEX = (f"{_CURVE}@libssh.org", _CURVE, "ecdh-sha2-nistp256", "ecdh-sha2-nistp384", "ecdh-sha2-nistp521")
_SLOW_KEX = ("diffie-hellman-group16-sha512", "diffie-hellman-group14-sha256")
_RSA = ("rsa-sha2-512", "rsa-sha2-256")  # signatures of a key of type ssh-rsa
_HOST_KEYS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", *_RSA)

_log = logging.getLogger(__name__)  # a warning is printed on stderr
logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its threads print their tracebacks


class Connection(paramiko.Transport):
    """A connection that prefers what is fast and costs little while it is idle.

    Args:
        sock: connected to the server.
        jump: the bastion through which it is.
        key_types: of host keys, in order of preference.
        until_s: of the handshake, by time.monotonic().
    """

    _active_check_timeout = (
        5.0  # between two looks at whether to say something; paramiko's 0.1 s would keep a quarter of a core busy for 1,000 nodes
    )
    _preferred_ciphers = _CIPHERS
    _preferred_macs = _MACS
    _preferred_kex = _KEX + _SLOW_KEX
    _kex_info = {**paramiko.Transport._kex_info, _CURVE: KexCurve25519}  # type: ignore[attr-defined]  # noqa: RUF012

    def __init__(self, sock: Any, jump: str | None, key_types: tuple[str, ...], until_s: float) -> None:
        super().__init__(sock)
        self._jump = jump
        self._preferred_keys = key_types
        self.banner_timeout = min(_CONNECT_S, left_s(until_s))
        self.handshake_timeout = left_s(until_s)
        self.offered: dict[str, list[str]] = {}  # by the server: names of algorithms, by paramiko's name of their kind

    def what_broke(self) -> str:
        """Once it has ended by itself: it alone, or the bastion's that it is in."""
        if isinstance(self.sock, paramiko.Channel):
            bastion = self.sock.get_transport()
            bastion.join(_ENDING_S)
            if not bastion.is_active():
                return f"the connection to the bastion {self._jump} broke"
        return "the connection broke"

    def _really_parse_kex_init(self, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        self.offered = super()._really_parse_kex_init(*args, **kwargs)  # type: ignore[misc]
        return self.offered


def log_in(route: Route, options: SshOptions, until_s: float) -> Connection:
    """Connect, check the host key, authenticate.

    Args:
        until_s: when it has to be done, by time.monotonic().

    Raises:
        NodeUnreachable, AccessDenied: without the node's name, which the caller knows.
    """
    name = route.host_key_name or host_name(route.host, route.port)
    known = known_keys(route.known_hosts, name)
    connection = _handshake(route, options, _key_types(known), until_s)
    try:
        _check_host_key(connection, route, name, known, accept_new=options.host_keys == "accept-new")
        _authenticate(connection, route, options, until_s)
        connection.set_keepalive(_KEEPALIVE_S)
    except FAULTS as error:
        connection.close()
        raise NodeUnreachable(f"the login failed: {words(error)}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def left_s(until_s: float) -> float:
    """Seconds to a point in time, by time.monotonic(); never 0, which means no timeout to some."""
    return max(0.01, until_s - time.monotonic())


def words(error: BaseException) -> str:
    """An error of a library in words; many have none."""
    if isinstance(error, DtrainError):
        return error.message
    if isinstance(error, paramiko.ChannelException):
        return error.text.lower()
    if isinstance(error, EOFError):
        return "the other side hung up"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _handshake(route: Route, options: SshOptions, key_types: tuple[str, ...], until_s: float) -> Connection:
    attempt = 0
    while True:
        began = time.monotonic()
        connection = Connection(_connect(route, options, until_s), route.proxy_jump, key_types, until_s)
        try:
            connection.start_client(timeout=left_s(until_s))
            if not connection.initial_kex_done:  # it returns without a word when the time is over
                raise TimeoutError
            return connection
        except IncompatiblePeer as error:
            connection.close()
            raise _without_a_common_algorithm(connection, error) from error
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
            pause_s = random.uniform(0.05, min(0.1 * 2**attempt, _MOST_PAUSE_S))
            if time.monotonic() + pause_s > until_s:
                raise NodeUnreachable(
                    f"{route.host} port {route.port} hangs up at once, {attempt} times in a row",
                    hint="is it an ssh server? one with many logins at once drops some (MaxStartups), and may ban who fails often",
                ) from error
        time.sleep(pause_s)  # a server drops some of many that come at once (MaxStartups)


def _without_a_common_algorithm(connection: Connection, error: IncompatiblePeer) -> NodeUnreachable:
    kinds = {
        "kex algorithm": ("key exchange", "kex_algo_list", connection.preferred_kex, "KexAlgorithms"),
        "host key": ("kind of host key", "server_key_algo_list", connection.preferred_keys, "HostKeyAlgorithms"),
        "ciphers": ("cipher", "server_encrypt_algo_list", connection.preferred_ciphers, "Ciphers"),
        "macs": ("MAC", "server_mac_algo_list", connection.preferred_macs, "MACs"),
    }
    for word, (kind, theirs, ours, key) in kinds.items():
        if f"no acceptable {word}" in str(error):
            offered = ", ".join(connection.offered.get(theirs, ()))
            return NodeUnreachable(
                f"no ssh connection: no {kind} in common: it offers {offered}; dtrain takes {', '.join(ours)}",
                hint=f"add one of these to {key} in its sshd_config ({connection.remote_version})",
            )
    return NodeUnreachable(f"no ssh connection: {words(error)}", hint=f"its server: {connection.remote_version}")


def _connect(route: Route, options: SshOptions, until_s: float) -> socket.socket | paramiko.Channel:
    if route.proxy_jump is not None:
        return _through(route.proxy_jump, route, options, until_s)
    at = f"{route.host} port {route.port}"
    within_s = min(_CONNECT_S, left_s(until_s))
    try:
        sock = _dial(route.host, route.port, until_s)
    except (socket.gaierror, UnicodeError) as error:
        unread = "" if shutil.which("ssh") else ", which is not read here: ssh is not installed"
        raise NodeUnreachable(
            f"the name {route.host} is not known: {words(error)}", hint=f"write an address, or a Host alias of ~/.ssh/config{unread}"
        ) from error
    except TimeoutError as error:
        raise NodeUnreachable(
            f"no answer from {at} within {within_s:.0f} s", hint="is the machine up, and does a firewall let ssh through?"
        ) from error
    except OSError as error:
        raise NodeUnreachable(f"{at}: {words(error).lower()}", hint="start sshd there, correct its port, or leave it out") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; with the keepalives it finds a cut link
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1000))
    return sock


def _dial(host: str, port: int, until_s: float) -> socket.socket:
    """A connection to the first address of a name that answers: with IPv6 and IPv4, one of them may lead nowhere.

    Raises:
        OSError: of the last address.
    """
    found = _addresses(host, port, until_s)
    for number, (family, kind, protocol, _, address) in enumerate(found, 1):
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(min(left_s(until_s), _CONNECT_S if number == len(found) else _NEXT_ADDRESS_S))
        try:
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            failed = error
    raise failed


def _addresses(host: str, port: int, until_s: float) -> Sequence[tuple[Any, ...]]:
    """What getaddrinfo says, which itself knows no deadline: a name server that is silent keeps it for long."""
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    answer: Future[Sequence[tuple[Any, ...]]] = Future()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)

    within_s = left_s(until_s)
    threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
    try:
        return answer.result(within_s)
    except TimeoutOfFuture as error:
        raise NodeUnreachable(
            f"no name server has said within {within_s:.0f} s what the name {host} means",
            hint="look at /etc/resolv.conf here, or write an address",
        ) from error


# ---- bastions -----------------------------------------------------------------------------------------------------


class _Bastion:
    """One connection for all nodes behind it, kept for later nodes and reconnects to the end of this process."""

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._connection: Connection | None = None
        self._error: DtrainError | None = None  # of the last try
        self._failed_s = 0.0

    def connection(self, jump: str, options: SshOptions, until_s: float) -> Connection:
        """Opened by the first who asks. What keeps it from that is an answer to all who have waited meanwhile, too."""
        asked_s = time.monotonic()
        if not self._opening.acquire(timeout=left_s(until_s)):
            raise NodeUnreachable(f"bastion {jump}: not there in time", hint="do bastions name each other in ~/.ssh/config?")
        try:
            if self._connection is not None and self._connection.is_active():
                return self._connection
            if self._error is None or self._failed_s < asked_s:
                self._error = None
                try:
                    self._connection = log_in(jump_route(jump, options), options, until_s)
                    return self._connection
                except DtrainError as error:
                    self._error, self._failed_s = error, time.monotonic()
            raise type(self._error)(f"bastion {jump}: {self._error.message}", hint=self._error.hint) from self._error
        finally:
            self._opening.release()


_bastions: dict[tuple[str, SshOptions], _Bastion] = {}


def _through(jump: str, route: Route, options: SshOptions, until_s: float) -> paramiko.Channel:
    """A byte stream to the node from the bastion."""
    bastion = _bastions.setdefault((jump, options), _Bastion()).connection(jump, options, until_s)
    try:
        timeout_s = min(_CONNECT_S, left_s(until_s))
        return bastion.open_channel("direct-tcpip", (route.host, route.port), ("127.0.0.1", 0), timeout=timeout_s)
    except FAULTS as error:
        raise NodeUnreachable(
            f"the bastion {jump} does not get through to {route.host} port {route.port}: {words(error)}",
            hint=f"try from there: ssh -p {route.port} {route.host}",
        ) from error


# ---- the host's key -----------------------------------------------------------------------------------------------


def _key_types(known: tuple[HostKey, ...]) -> tuple[str, ...]:
    """Ask first for a key of a type that is known for the host: a server with several may else show one to compare with nothing.

    One of another type is a changed one, to be shown.
    """
    types = {key.type for key in known if not key.marker}
    first = tuple(name for name in _HOST_KEYS if ("ssh-rsa" if name in _RSA else name) in types)
    return first + tuple(name for name in _HOST_KEYS if name not in first)


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
        if said == "known":
            _log.warning("%s: a new host key was accepted, and is kept in %s: %s", name, route.known_hosts[0], shown)
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


def _authenticate(connection: Connection, route: Route, options: SshOptions, until_s: float) -> None:
    tried: list[str] = []
    passed_over: list[str] = []
    with contextlib.closing(candidates(route)) as keys:
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
            connection.auth_timeout = left_s(until_s)
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
    except paramiko.AuthenticationException as error:
        if "timeout" in str(error):  # no refusal
            raise NodeUnreachable(f"the login as {user} took too long", hint="is it busy, or its disk?") from error
        return False
    except FAULTS as error:
        if not connection.is_active():
            return False
        raise NodeUnreachable(f"the login as {user} failed: {words(error)}") from error
    if further:
        raise AccessDenied(f"beside a key it wants {', '.join(further)}", hint="allow a key alone for this user there")
    return True
