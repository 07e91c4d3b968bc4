"""Routes: what ~/.ssh/config and the cluster file say, as ssh itself understands it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dtrain.errors import NodeUnreachable
from dtrain.spec.cluster import SshOptions
from dtrain.transport.ssh.config import jump_route, resolve

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")

CONFIG = """\
Include more/*
Host lab
  HostName 10.1.2.3   # a comment
  Port 2200
  User ana
  IdentityFile ~/keys/%n-%r
  IdentitiesOnly yes
  HostKeyAlias lab-key
  UserKnownHostsFile /data/known
Host behind
  ProxyJump eva@bastion:2201
Host tunnel
  ProxyCommand nc %h %p
Match host 10.9.9.9
  User matched
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".ssh/more").mkdir(parents=True)
    (tmp_path / ".ssh/config").write_text(CONFIG.replace("more/*", f"{tmp_path}/.ssh/more/*"))
    (tmp_path / ".ssh/more/one").write_text("Host included\n  HostName in.cluded\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    resolve.cache_clear()
    return tmp_path


def test_an_alias_is_resolved(home: Path) -> None:
    route = resolve("lab", SshOptions())
    assert (route.host, route.port, route.user) == ("10.1.2.3", 2200, "ana")
    assert route.identity_files == (f"{home}/keys/lab-ana",) and route.only_identity_files
    assert route.host_key_name == "lab-key" and route.known_hosts[0] == "/data/known"
    assert route.proxy_jump is None and route.agent == "/run/agent"
    assert resolve("included", SshOptions()).host == "in.cluded"
    assert resolve("10.9.9.9", SshOptions()).user == "matched"


def test_the_cluster_file_comes_before_the_config(home: Path) -> None:
    key = str(home / "key")
    route = resolve("lab", SshOptions(user="root", port=22, identity_file=key, proxy_jump="gate"))
    assert (route.host, route.port, route.user, route.proxy_jump) == ("10.1.2.3", 22, "root", "gate")
    assert route.identity_files[0] == key
    assert resolve("behind", SshOptions(proxy_jump="none")).proxy_jump is None


def test_a_host_that_no_file_names() -> None:
    route = resolve("10.0.0.5", SshOptions())
    assert (route.host, route.port, route.proxy_jump, route.host_key_name) == ("10.0.0.5", 22, None, None)
    assert any(file.endswith("/id_ed25519") for file in route.identity_files)


def test_a_bastion_has_its_own_user_and_port_and_the_clusters_key(home: Path) -> None:
    key = str(home / "key")
    assert resolve("behind", SshOptions()).proxy_jump == "eva@bastion:2201"
    route = jump_route("eva@bastion:2201", SshOptions(user="root", port=23, identity_file=key))
    assert (route.user, route.host, route.port, route.proxy_jump, route.identity_files[0]) == ("eva", "bastion", 2201, None, key)
    assert jump_route("lab", SshOptions(user="root")).user == "ana"
    for jump, host, port in (("[fe::1]:2", "fe::1", 2), ("[fe::1]", "fe::1", 22), ("fe::1", "fe::1", 22), ("ssh://b:7", "b", 7)):
        route = jump_route(jump, SshOptions())
        assert (route.host, route.port) == (host, port)


def test_bastions_behind_bastions() -> None:
    """Listed, or each with its own ProxyJump."""
    last = jump_route("a,eva@b:7,c", SshOptions(proxy_jump="a,eva@b:7,c"))
    assert (last.host, last.proxy_jump) == ("c", "a,eva@b:7")
    before = jump_route("a,eva@b:7", SshOptions(proxy_jump="a,eva@b:7,c"))
    assert (before.host, before.port, before.user, before.proxy_jump) == ("b", 7, "eva", "a")
    assert jump_route("a", SshOptions(proxy_jump="a,b")).proxy_jump is None
    assert jump_route("behind", SshOptions()).proxy_jump == "eva@bastion:2201"


def test_what_is_not_supported_is_said() -> None:
    with pytest.raises(NodeUnreachable, match="ProxyCommand, which dtrain does not run: nc"):
        resolve("tunnel", SshOptions())


def test_a_config_that_ssh_refuses_is_shown(home: Path) -> None:
    (home / ".ssh/config").write_text("Host x\n  Prot 22\n")
    with pytest.raises(NodeUnreachable, match=r"ssh cannot tell how to reach x: (.|\n)*prot"):
        resolve("x", SshOptions())


def test_without_ssh_its_defaults_hold(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    route = resolve("10.0.0.6", SshOptions(user="ana", port=2200))
    assert (route.host, route.port, route.user) == ("10.0.0.6", 2200, "ana")
    assert f"{home}/.ssh/id_ed25519" in route.identity_files and route.known_hosts[0] == f"{home}/.ssh/known_hosts"
