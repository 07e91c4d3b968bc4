"""How ssh itself would reach a host: `ssh -G` reads ~/.ssh/config, its includes and matches, better than any copy of it."""

from __future__ import annotations

import functools
import getpass
import os
import pwd
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.errors import NodeUnreachable
from dtrain.spec.cluster import SshOptions

_TIMEOUT_S = 15.0  # Match exec may take a while
RESOLVING_AT_ONCE = 8  # processes, which cost more than the threads that wait for them
_resolving = threading.BoundedSemaphore(RESOLVING_AT_ONCE)
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")  # in ~/.ssh, where nobody names another


@dataclass(frozen=True, slots=True)
class Route:
    """Everything needed to log in to one host."""

    host: str  # name or IP literal to connect to
    port: int
    user: str
    identity_files: tuple[str, ...]  # private keys to try if they exist
    agent: str | None  # socket of the ssh-agent
    only_identity_files: bool  # the agent may use only keys of identity_files
    known_hosts: tuple[str, ...]  # files; new keys go to the first
    host_key_name: str | None  # the name in known_hosts, if it is not the host's own
    proxy_jump: str | None  # the bastion, as [user@]host[:port]; several, in the order in which they are passed: a,b


@functools.lru_cache(maxsize=8192)
def resolve(host: str, options: SshOptions) -> Route:
    """The route to a host or a Host alias of ~/.ssh/config; what `options` say comes before what that file says.

    Raises:
        NodeUnreachable: ssh cannot read its configuration, or it asks for what is not supported.
    """
    ssh = shutil.which("ssh")
    if ssh is None:
        return _without_ssh(host, options)
    argv = (ssh, *_config_file(), "-G", *_arguments(options), "--", host)
    try:
        with _resolving:
            answer = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="surrogateescape", timeout=_TIMEOUT_S, check=False
            )
    except subprocess.TimeoutExpired as error:
        raise NodeUnreachable(f"ssh -G {host} did not answer within {_TIMEOUT_S:g} s", hint="see Match exec in ~/.ssh/config") from error
    if answer.returncode != 0:
        raise NodeUnreachable(f"ssh cannot tell how to reach {host}: {answer.stderr.strip()}", hint="see: ssh -G " + host)
    said: dict[str, list[str]] = {}
    for line in answer.stdout.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value)
    if "proxycommand" in said:
        raise NodeUnreachable(
            f"{host} is reached through a ProxyCommand, which dtrain does not run: {said['proxycommand'][0]}",
            hint="name a bastion with ProxyJump there, or with proxy_jump in the cluster file",
        )
    given = [] if options.identity_file is None else [options.identity_file]
    files = [*given, *(file for file in said.get("identityfile", []) if file not in given)]
    return _route(host, {key: values[0] for key, values in said.items()}, files)


def jump_route(jump: str, options: SshOptions) -> Route:
    """The route to a bastion: its own user and port, the cluster's key and its rule for host keys.

    The last of several is reached through those before it; one alone, through what ~/.ssh/config says of it.

    Raises:
        NodeUnreachable: its configuration cannot be read, or asks for what is not supported.
    """
    before, _, last = jump.rpartition(",")
    user, at, place = last.removeprefix("ssh://").rpartition("@")
    host, port = _split_port(place)
    return resolve(host, SshOptions(user if at else None, port, options.identity_file, before or None, options.host_keys))


def is_default_key(file: str) -> bool:
    """Whether ssh tries it without being told to."""
    return file in _default_keys()


def _default_keys() -> tuple[str, ...]:
    return tuple(os.path.expanduser(f"~/.ssh/{name}") for name in _DEFAULT_KEYS)


def _split_port(place: str) -> tuple[str, int | None]:
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        return host, int(port[1:]) if port[1:].isdigit() else None
    host, colon, port = place.rpartition(":")
    if not colon or ":" in host or not port.isdigit():  # a bare IPv6 address has more than one colon
        return place, None
    return host, int(port)


def _config_file() -> tuple[str, ...]:
    """ssh looks in the home that the user database names; where $HOME says otherwise, that one is meant."""
    home = os.path.expanduser("~")
    if home == pwd.getpwuid(os.getuid()).pw_dir:
        return ()
    config = os.path.join(home, ".ssh/config")
    return ("-F", config if os.path.exists(config) else "none")


def _arguments(options: SshOptions) -> list[str]:
    arguments = []
    for flag, value in (("-l", options.user), ("-p", options.port), ("-i", options.identity_file)):
        if value is not None:
            arguments += [flag, str(value)]
    if options.proxy_jump is not None:
        arguments += ["-o", f"ProxyJump={options.proxy_jump}"]
    return arguments


def _route(alias: str, said: Mapping[str, str], identity_files: Sequence[str]) -> Route:
    host, user = said["hostname"], said["user"]
    tokens = {"%": "%", "d": os.path.expanduser("~"), "h": host, "n": alias, "r": user, "u": getpass.getuser()}
    files = [*said.get("userknownhostsfile", "").split(), *said.get("globalknownhostsfile", "").split()]
    jump = said.get("proxyjump", "none")
    return Route(
        host=host,
        port=int(said["port"]),
        user=user,
        identity_files=tuple(_expand(file, tokens) for file in identity_files if file != "none"),
        agent=_agent(said.get("identityagent", "SSH_AUTH_SOCK"), tokens),
        only_identity_files=said.get("identitiesonly") == "yes",
        known_hosts=tuple(_expand(file, tokens) for file in files if file != "none"),
        host_key_name=said.get("hostkeyalias"),
        proxy_jump=None if jump == "none" else jump,
    )


def _agent(socket: str, tokens: Mapping[str, str]) -> str | None:
    if socket == "none":
        return None
    if socket == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK")
    return os.environ.get(socket[1:]) if socket.startswith("$") else _expand(socket, tokens)


def _expand(path: str, tokens: Mapping[str, str]) -> str:
    return os.path.expanduser(re.sub("%(.)", lambda found: tokens.get(found[1], found[0]), path))


def _without_ssh(host: str, options: SshOptions) -> Route:
    """ssh's own defaults; its configuration is not read."""
    keys = _default_keys()
    return Route(
        host=host,
        port=options.port or 22,
        user=options.user or getpass.getuser(),
        identity_files=keys if options.identity_file is None else (options.identity_file, *keys),
        agent=os.environ.get("SSH_AUTH_SOCK"),
        only_identity_files=False,
        known_hosts=(os.path.expanduser("~/.ssh/known_hosts"), "/etc/ssh/ssh_known_hosts"),
        host_key_name=None,
        proxy_jump=None if options.proxy_jump == "none" else options.proxy_jump,
    )
