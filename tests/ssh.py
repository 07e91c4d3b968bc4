"""A real sshd on loopback, for any user, and what a user has in ~/.ssh."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True, slots=True)
class Host:
    """One `Host` of ~/.ssh/config, with the key that known_hosts has for it."""

    alias: str
    address: str
    port: int
    user: str
    public_key: str | None  # None: not known yet
    more: str = ""  # further lines of its stanza

    @property
    def known_as(self) -> str:
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


def make_key(path: Path, kind: str = "ed25519") -> str:
    """A new key pair at `path` and `path`.pub.

    Returns:
        The public key.
    """
    for old in (path, path.with_name(f"{path.name}.pub")):
        old.unlink(missing_ok=True)
    subprocess.run(("ssh-keygen", "-q", "-t", kind, "-N", "", "-C", path.name, "-f", str(path)), check=True, stdin=subprocess.DEVNULL)
    return path.with_name(f"{path.name}.pub").read_text()


def write_user_files(home: Path, key: Path, hosts: Sequence[Host]) -> None:
    """~/.ssh of a user who can reach the hosts with `key`, and has no other way."""
    folder = home / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    known = folder / "known_hosts"
    known.write_text("".join(f"{host.known_as} {host.public_key}" for host in hosts if host.public_key is not None))
    stanzas = [f"Host {host.alias}\n  HostName {host.address}\n  Port {host.port}\n  User {host.user}\n" + host.more for host in hosts]
    everywhere = f"Host *\n  UserKnownHostsFile {known}\n  GlobalKnownHostsFile /dev/null\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
    (folder / "config").write_text("\n".join([*stanzas, everywhere]))


def server_files(folder: Path, *, port: int, authorized_key: str, home: str, host_key: str = "ed25519", extra: Sequence[str] = ()) -> str:
    """sshd_config, its host key and authorized_keys in `folder`. Sessions have `home` as their HOME, so nobody's start-up files run.

    Returns:
        The public host key.
    """
    public = make_key(folder / "host_key", host_key)
    (folder / "authorized_keys").write_text(authorized_key)
    lines = (
        f"Port {port}",
        f"HostKey {folder}/host_key",
        f"PidFile {folder}/sshd.pid",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        "StrictModes no",
        "UsePAM no",
        "UseDNS no",
        "PermitRootLogin yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PrintMotd no",
        "PrintLastLog no",
        f"SetEnv HOME={home}",
        *extra,
    )
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    return public


def await_listening(log: Path, process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Wait until sshd says that it listens; connecting would cost one of its MaxStartups."""
    deadline = time.monotonic() + timeout_s
    while b"Server listening on" not in log.read_bytes():
        assert process.poll() is None and time.monotonic() < deadline, f"sshd does not listen:\n{log.read_text()}"
        time.sleep(0.005)


class Sshd:
    """An sshd on a port of 127.0.0.1 that lets in whoever runs the tests, with the key `user_key`."""

    def __init__(self, folder: Path, *, host_key: str = "ed25519", extra: Sequence[str] = ()) -> None:
        assert SSHD is not None
        folder.mkdir(parents=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it as root
        self.folder = folder
        self.home = folder / "home"  # of its sessions
        self.home.mkdir()
        self.user_key = folder / "user_key"
        self.port = free_port()
        self.public_key = server_files(
            folder,
            port=self.port,
            authorized_key=make_key(self.user_key),
            home=str(self.home),
            host_key=host_key,
            extra=("ListenAddress 127.0.0.1", *extra),
        )
        log = folder / "sshd.log"
        with log.open("wb") as stderr:
            self._process = subprocess.Popen((SSHD, "-D", "-e", "-f", str(folder / "sshd_config")), stdin=subprocess.DEVNULL, stderr=stderr)
        try:
            await_listening(log, self._process)
        except BaseException:
            self.close()
            raise

    def host(self, alias: str = "box", *, known: bool = True, more: str = "") -> Host:
        return Host(alias, "127.0.0.1", self.port, _user_name(), self.public_key if known else None, more)

    def drop_connections(self) -> None:
        """Kill what serves the connections there are; what it started goes on."""
        for pid in _descendants(self._process.pid):
            try:
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):  # ended with the other half of its connection
                continue

    def close(self) -> None:
        """End it and every session; what a session left behind detached is not its child any more."""
        if self._process.poll() is not None:
            return
        for pid in [self._process.pid, *_descendants(self._process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert isinstance(port, int)
    return port


def _user_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
        children.setdefault(parent, []).append(int(name))
    found = list(children.get(ancestor, ()))
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return found
