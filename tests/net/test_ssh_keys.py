"""Keys of every kind, in files and in a real ssh-agent, and servers that are choosy."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, PublicFormat

from dtrain.bench.config import AllreduceConfig
from dtrain.errors import AccessDenied, NodeUnreachable
from dtrain.link import LOGIN_S
from dtrain.node import wire
from dtrain.nodes import connect
from dtrain.spec import benchmark_job
from dtrain.spec.cluster import SshOptions
from dtrain.start import targets_of
from dtrain.transport import Channel
from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh.config import resolve
from dtrain.transport.ssh.connection import log_in
from dtrain.transport.ssh.keys import ask_passphrases
from tests.cluster import Workspace
from tests.ssh import Sshd, free_port, make_key, write_user_files

pytestmark = pytest.mark.net


@pytest.fixture(autouse=True)
def home(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """These tests log in from their own process."""
    monkeypatch.setenv("HOME", str(workspace.root / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    resolve.cache_clear()
    yield workspace.root / "home"
    resolve.cache_clear()


@pytest.fixture
def agent(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An ssh-agent's socket."""
    path = workspace.root / "agent"
    started = subprocess.run(("ssh-agent", "-a", str(path)), capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    yield path
    found = re.search(r"SSH_AGENT_PID=(\d+)", started)
    assert found is not None
    os.kill(int(found[1]), 15)


def _open(**options: str) -> Channel:
    return SshTransport("box", "box", SshOptions(**options), sys.executable).open(LOGIN_S)  # type: ignore[arg-type]


def _add(*keys: Path) -> None:
    subprocess.run(("ssh-add", "-q", *map(str, keys)), check=True, capture_output=True)


def _use(sshd: Sshd, home: Path, key: str, *, only: bool) -> None:
    """~/.ssh/config names this key file, and whether the agent may offer others."""
    write_user_files(home, Path(key), [sshd.host()])
    if not only:
        config = home / ".ssh/config"
        config.write_text(config.read_text().replace("IdentitiesOnly yes", "IdentitiesOnly no"))


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_key_file_of_any_kind(sshd: Sshd, home: Path, kind: str) -> None:
    (sshd.folder / "authorized_keys").write_text(make_key(sshd.user_key, kind))
    _open().close()


@pytest.mark.parametrize("kind", ["ecdsa PEM", "rsa PKCS8", "ed25519 openssl"])
def test_a_locked_file_in_a_format_that_does_not_say_its_public_half(
    workspace: Workspace, sshd: Sshd, home: Path, agent: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is opened with its passphrase, and found in the agent by the name under which ssh-add put it there."""
    key, public = workspace.root / "locked", sshd.folder / "authorized_keys"
    kind, form = kind.split()
    if form == "openssl":
        written = Ed25519PrivateKey.generate()
        key.write_bytes(written.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret words")))
        public.write_bytes(written.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    else:
        subprocess.run(("ssh-keygen", "-q", "-t", kind, "-m", form, "-N", "secret words", "-f", str(key)), check=True)
        key.with_name("locked.pub").rename(public)
    key.chmod(0o600)
    _use(sshd, home, str(key), only=True)
    with pytest.raises(AccessDenied, match=f"add it to the ssh-agent: ssh-add {key}"):
        _open()
    if form != "openssl":  # which ssh-add of OpenSSH 9.2 does not read
        ask = workspace.root / "ask"
        ask.write_text("#!/bin/sh\necho secret words\n")
        ask.chmod(0o700)
        subprocess.run(("ssh-add", "-q", str(key)), check=True, env={**os.environ, "SSH_ASKPASS_REQUIRE": "force", "SSH_ASKPASS": str(ask)})
        _open().close()
        subprocess.run(("ssh-add", "-q", "-D"), check=True)
    monkeypatch.setattr("getpass.getpass", lambda prompt: "secret words")  # the person
    ask_passphrases([resolve("box", SshOptions())])
    _open().close()


def test_the_agent_is_asked_where_no_file_is_there(sshd: Sshd, home: Path, agent: Path) -> None:
    _add(sshd.user_key)
    _use(sshd, home, "/nowhere", only=False)
    _open().close()


def test_the_right_one_of_many_keys_in_the_agent(sshd: Sshd, home: Path, agent: Path) -> None:
    """A server hangs up at the sixth wrong key; the public half beside the file's name says which one is meant."""
    wrong = [home / f"wrong{number}" for number in range(8)]
    for key in wrong:
        make_key(key)
    named = home / "named"
    (home / "named.pub").write_text(sshd.user_key.with_name("user_key.pub").read_text())
    _add(*wrong, sshd.user_key)
    for only in (True, False):
        _use(sshd, home, str(named), only=only)
        resolve.cache_clear()
        _open().close()
    _use(sshd, home, "/nowhere", only=False)
    resolve.cache_clear()
    with pytest.raises(AccessDenied, match=r"box: permission denied .* tried wrong0 \(ssh-agent\)") as refused:
        _open()
    assert "5 others came first" in refused.value.message and "identity_file" in str(refused.value)


def test_a_key_with_a_passphrase_is_for_the_agent(sshd: Sshd, home: Path, agent: Path) -> None:
    key = sshd.user_key
    _add(key)
    subprocess.run(("ssh-keygen", "-q", "-p", "-P", "", "-N", "secret words", "-f", str(key)), check=True, capture_output=True)
    _open().close()
    subprocess.run(("ssh-add", "-q", "-D"), check=True, capture_output=True)
    with pytest.raises(AccessDenied, match=f"{key} has a passphrase; add it to the ssh-agent: ssh-add {key}"):
        _open()
    with pytest.raises(AccessDenied, match=r"identity_file .* is not there"):
        _open(identity_file=f"{key}.absent")


@pytest.mark.parametrize("named", ["key", "key, its .pub gone", "key.pub", "IdentityFile"])
def test_a_locked_file_is_used_through_the_agent(sshd: Sshd, home: Path, agent: Path, named: str) -> None:
    """Before other keys of the agent, more than the server takes; nobody is asked for the passphrase."""
    key = sshd.user_key
    wrong = [home / f"wrong{number}" for number in range(6)]
    for other in wrong:
        make_key(other)
    _add(*wrong, key)
    subprocess.run(("ssh-keygen", "-q", "-p", "-P", "", "-N", "secret words", "-f", str(key)), check=True, capture_output=True)
    public = key.with_name(f"{key.name}.pub")
    _use(sshd, home, str(key) if named == "IdentityFile" else "/nowhere", only=named == "IdentityFile")
    if named != "key.pub" and named != "key":
        public.unlink()
    options = SshOptions(identity_file=None if named == "IdentityFile" else str(public if named == "key.pub" else key))
    SshTransport("box", "box", options, sys.executable).open(LOGIN_S).close()
    ask_passphrases([resolve("box", options)])  # it would fail: there is no terminal


def test_a_public_half_is_no_key_by_itself(sshd: Sshd, home: Path) -> None:
    with pytest.raises(AccessDenied, match=r"identity_file .*user_key\.pub is the public half of a key: name the file without \.pub"):
        _open(identity_file=f"{sshd.user_key}.pub")


def test_a_file_that_is_no_key_is_named(sshd: Sshd, home: Path) -> None:
    with pytest.raises(AccessDenied, match=r"identity_file .*config is not a private key"):
        _open(identity_file=str(home / ".ssh/config"))


@pytest.mark.parametrize(
    "only",
    ["KexAlgorithms curve25519-sha256", "Ciphers aes256-ctr", "Ciphers aes256-gcm@openssh.com", "MACs hmac-sha2-512-etm@openssh.com"],
)
def test_a_server_that_knows_one_algorithm(workspace: Workspace, home: Path, only: str) -> None:
    server = Sshd(workspace.root / "sshd", extra=(only,))
    try:
        write_user_files(home, server.user_key, [server.host()])
        _open().close()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("Ciphers chacha20-poly1305@openssh.com", "no cipher in common: it offers chacha20-poly1305@openssh.com; dtrain takes aes128-gcm"),
        ("KexAlgorithms sntrup761x25519-sha512@openssh.com", "no key exchange in common: it offers sntrup761x25519-sha512@openssh.com"),
        ("Ciphers aes128-ctr\nMACs umac-128@openssh.com", "no MAC in common: it offers umac-128@openssh.com; dtrain takes hmac-sha2-256"),
    ],
)
def test_a_server_without_a_common_algorithm_is_told_apart(workspace: Workspace, home: Path, only: str, said: str) -> None:
    server = Sshd(workspace.root / "sshd", extra=(only,))
    try:
        write_user_files(home, server.user_key, [server.host()])
        with pytest.raises(NodeUnreachable, match=f"box: no ssh connection: {re.escape(said)}") as refused:
            _open()
        assert f"add one of these to {only.splitlines()[-1].split()[0]} in its sshd_config" in (refused.value.hint or "")
    finally:
        server.close()


def test_many_logins_at_once_to_one_server(sshd: Sshd, home: Path) -> None:
    """It drops some of more than ten that are not authenticated yet (MaxStartups 10:30:100); they try again."""
    with ThreadPoolExecutor(40) as pool:
        for channel in list(pool.map(lambda _: _open(), range(40))):
            channel.close()


def test_a_refused_login_is_not_tried_again(workspace: Workspace, home: Path) -> None:
    """A node may ban who tries often; of 32 nodes behind a bastion that refuses, one asks for all."""
    server = Sshd(workspace.root / "sshd", extra=("LogLevel VERBOSE",))

    def num_connections() -> int:
        return (server.folder / "sshd.log").read_text().count("Connection from")

    def open_behind(number: int) -> str:
        with pytest.raises(AccessDenied) as refused:
            SshTransport(f"n{number}", "10.0.0.1", SshOptions(proxy_jump="box"), sys.executable).open(LOGIN_S)
        return refused.value.message

    try:
        make_key(server.user_key)
        write_user_files(home, server.user_key, [server.host()])
        with pytest.raises(AccessDenied, match="box: permission denied"):
            _open()
        assert num_connections() == 1
        with ThreadPoolExecutor(32) as pool:
            said = list(pool.map(open_behind, range(32)))
        assert all(text.startswith(f"n{number}: bastion box: permission denied") for number, text in enumerate(said)), said
        assert num_connections() < 1 + 4  # a thread may begin to ask when the first has its answer already
    finally:
        server.close()


def test_bastions_in_a_chain_and_many_nodes_behind_them(workspace: Workspace, home: Path) -> None:
    """All through one connection to the last of them, which may have one session."""
    server = Sshd(workspace.root / "sshd", extra=("MaxSessions 1",))
    try:
        write_user_files(home, server.user_key, [server.host(), server.host("gate"), server.host("inner")])
        with ThreadPoolExecutor(8) as pool:
            for channel in list(pool.map(lambda _: _open(proxy_jump="gate,inner"), range(8))):
                channel.close()
        assert len(re.findall("Accepted publickey", (server.folder / "sshd.log").read_text())) == 8 + 2
    finally:
        server.close()


def test_which_connection_broke(workspace: Workspace, sshd: Sshd, home: Path) -> None:
    gate = Sshd(workspace.root / "gate")
    try:
        (gate.folder / "authorized_keys").write_text(sshd.user_key.with_name("user_key.pub").read_text())
        write_user_files(home, sshd.user_key, [sshd.host(), gate.host("gate")])
        for broken, said in ((sshd, "the connection broke"), (gate, "the connection to the bastion gate broke")):
            channel = _open(proxy_jump="gate")
            broken.drop_connections()
            with pytest.raises(ConnectionResetError, match=f"^{said}$"):
                channel.read(1)
            with pytest.raises(BrokenPipeError, match=f"^{said}$"):
                channel.write(b"stop")
            channel.close()
    finally:
        gate.close()


def test_a_bastion_that_refuses_is_not_taken_for_the_instance() -> None:
    port = free_port()
    told = f"box: bastion [127.0.0.1]:{port}: 127.0.0.1 port {port}: connection refused\nhint: start sshd there, correct its port"
    with pytest.raises(NodeUnreachable) as refused:
        _open(proxy_jump=f"127.0.0.1:{port}")
    assert str(refused.value).startswith(told)


def test_a_port_that_the_bastion_cannot_reach(sshd: Sshd, home: Path) -> None:
    options = SshOptions(proxy_jump="box", port=free_port())
    with pytest.raises(NodeUnreachable, match=rf"the bastion box does not get through to 127.0.0.1 port {options.port}: connect failed\n"):
        SshTransport("behind", "127.0.0.1", options, sys.executable).open(LOGIN_S)


def test_an_ipv6_address(workspace: Workspace, home: Path) -> None:
    server = Sshd(workspace.root / "sshd", extra=("ListenAddress ::1",))
    try:
        write_user_files(home, server.user_key, [replace(server.host(), address="::1")])
        known = home / ".ssh/known_hosts"
        known.write_text(f"[::1]:{server.port} {server.public_key}")
        SshTransport("six", "::1", SshOptions(port=server.port, user=server.host().user), sys.executable).open(LOGIN_S).close()
    finally:
        server.close()


def test_a_name_whose_first_address_leads_nowhere(sshd: Sshd, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a name has an IPv6 address and the network takes none: the next one counts, and what is wrong with the last is told."""
    good = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", sshd.port))]
    with socket.socket(socket.AF_INET6) as full:
        full.bind(("::1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket(socket.AF_INET6) for _ in range(4)]  # nobody accepts them, and the next gets no answer
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        dead = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", each) for each in (address, ("100::1", 22), address)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*dead, *good])
        _open().close()
        sshd.close()
        with pytest.raises(NodeUnreachable, match=r"box: 127.0.0.1 port \d+: connection refused"):
            _open()
        for each in waiting:
            each.close()


def test_who_does_not_answer_is_named_and_holds_up_no_other(workspace: Workspace, sshd: Sshd, home: Path) -> None:
    """A port on which nobody speaks, and a start-up file that waits for something."""
    waits = Sshd(workspace.root / "waits")
    try:
        write_user_files(home, sshd.user_key, [sshd.host(), waits.host("waits")])
        (waits.folder / "authorized_keys").write_text(sshd.user_key.with_name("user_key.pub").read_text())
        (waits.home / ".bashrc").write_text("echo choose a cluster; read -r answer; read -r answer\n")
        with socket.socket() as silent, ThreadPoolExecutor(2) as pool:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            port = SshOptions(port=silent.getsockname()[1])
            mute = pool.submit(SshTransport("mute", "127.0.0.1", port, sys.executable).open, 5.0)
            waiting = pool.submit(SshTransport("waits", "waits", SshOptions(), sys.executable).open, 5.0)
            _open().close()
            assert not mute.done() and not waiting.done()
            with pytest.raises(NodeUnreachable, match=r"mute: 127.0.0.1 port \d+ takes a connection, and no ssh server speaks there"):
                mute.result()
            with pytest.raises(NodeUnreachable, match=r"waits: .* no answer within 5 s; it said: choose a cluster") as refused:
                waiting.result()
            assert "start-up file" in (refused.value.hint or "")
    finally:
        waits.close()


def test_who_has_not_answered_yet_is_named(workspace: Workspace, sshd: Sshd) -> None:
    steps: list[str] = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        text = f"instances: [box, {{host: 127.0.0.1, ssh: {{port: {silent.getsockname()[1]}}}}}]\ndir: {workspace.nodes}\n"
        cluster = benchmark_job(workspace.write("cluster.yaml", text), AllreduceConfig()).cluster
        reached = connect(targets_of(cluster, "check-0", "check"), steps.append, within_s=6.0)
    for link in reached.results.values():
        link.close()
    assert list(reached.errors) == ["127.0.0.1"]
    assert (steps[0], steps[-1]) == ("connecting to 2 nodes", "connecting to 2 nodes: waiting for 127.0.0.1")


def test_what_finds_a_dead_peer_is_set(sshd: Sshd, home: Path) -> None:
    """tests/net/test_lan.py has the cut; here, what must add up to 30 s."""
    connection = log_in(resolve("box", SshOptions()), SshOptions(), time.monotonic() + LOGIN_S)
    try:
        assert isinstance(connection.sock, socket.socket)
        unacknowledged_s = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert wire.SAY_S + unacknowledged_s < 30 and wire.HEAR_S <= 30
        assert connection.packetizer._Packetizer__keepalive_interval == 10  # type: ignore[attr-defined]
    finally:
        connection.close()


def test_a_node_that_takes_nothing_is_waited_for_once(sshd: Sshd, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its session is frozen: what is told it next, such as to stop, waits for nothing more."""
    monkeypatch.setattr("dtrain.transport.ssh.HEAR_S", 0.5)
    channel = _open()
    until_hung_up = b"import select; hung_up = select.poll(); hung_up.register(1, 0); hung_up.poll()"
    channel.write(until_hung_up.hex().encode() + b"\n")
    with pytest.raises(TimeoutError, match=r"it has taken nothing for 0\.5 s"):
        channel.write(bytes(64 << 20))
    with pytest.raises(BrokenPipeError, match="the connection is gone"):
        channel.write(b"stop")


def test_a_port_without_ssh(sshd: Sshd, home: Path) -> None:
    write_user_files(home, sshd.user_key, [replace(sshd.host(), port=free_port())])
    with pytest.raises(NodeUnreachable, match=r"box: 127.0.0.1 port \d+: connection refused"):
        _open()


@pytest.mark.parametrize(
    ("start_up_file", "said"),
    [("echo go away; exit 3\n", "go away"), ("exec sleep 0.1\n", "ended without a word")],
)
def test_a_login_that_runs_no_command(sshd: Sshd, home: Path, start_up_file: str, said: str) -> None:
    (sshd.home / ".bashrc").write_text(start_up_file)
    with pytest.raises(NodeUnreachable, match=said) as refused:
        _open()
    assert refused.value.message.startswith("box: ") and refused.value.hint


@pytest.mark.parametrize(
    "garbage",
    [b"SSH-2.0-x\r\n" + b"\0\0\1\0" + b"\x14" * 300, b"SSH-2.0-x\r\n" + bytes(range(256)) * 8],
    ids=["wrong key exchange", "binary"],
)
def test_a_server_that_talks_garbage_is_told_as_a_message(home: Path, garbage: bytes) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:  # the test is over
                    return
                client.sendall(garbage)
                client.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(NodeUnreachable, match="box: ") as refused:
            SshTransport("box", "127.0.0.1", SshOptions(port=server.getsockname()[1]), sys.executable).open(LOGIN_S)
        assert refused.value.hint
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_name_that_no_name_server_takes(home: Path, host: str) -> None:
    with pytest.raises(NodeUnreachable, match=f"box: the name {re.escape(host)} is not known"):
        SshTransport("box", host, SshOptions(), sys.executable).open(LOGIN_S)


def test_known_hosts_with_anything_in_it(sshd: Sshd, home: Path) -> None:
    known = home / ".ssh/known_hosts"
    good = known.read_bytes()
    known.write_bytes("box ssh-ed25519 käy\n|1|ä|ö ssh-ed25519 AAAA\n\xff\n".encode() + b"\xff\xfe\n" + good)
    _open().close()
    known.unlink()
    known.mkdir()
    with pytest.raises(AccessDenied, match="box: its host key is not known"):
        _open()
