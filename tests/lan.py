"""Machines for a test: network, PID, mount, UTS and IPC namespaces on a bridge, each with an sshd as its process 1.

A node has its own addresses, host name, /proc, /tmp, /var/tmp, /run and /dev/shm, and shares the rest of the file system. The launcher
runs outside of them and has an address on the bridge. What hurts on real clusters is always there: a node's name resolves to 127.0.1.1
on it (Debian), and two interfaces that lead nowhere are listed before eth0.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ssh import SSHD, Host, await_listening, make_key, server_files, write_user_files

SSH_PORT = 22
DIR = "/var/tmp/dtrain-0"  # what `dir: auto` is on a node
_ROOT = Path(__file__).resolve().parents[1]
_OWN = ("/tmp", "/var/tmp", "/run", "/dev/shm", "/root")  # a node's own, and empty
_HOME = "/run/root"

# Moves the wall clock of what it is preloaded into and leaves the monotonic one. Not libfaketime: with Debian's (0.9.10) time.sleep of
# Python 3.11 fails with EINVAL (its issue 426).
_DATEFUDGE = next((str(path) for path in Path("/usr/lib").glob("*/datefudge/datefudge.so")), None)

# What a node's process 1 does before it becomes sshd. $1: the folder that the test prepared. $2: host name. From $3: what
# stays visible even where it lies in one of the node's own folders, such as a checkout below /tmp.
_INIT = rf"""
set -e
etc=$1/etc stage=$1/stage; hostname "$2"; shift 2
mount -t sysfs sysfs /sys  # /sys/class/net of this network namespace
mount -t tmpfs tmpfs "$stage"
i=0; for kept; do i=$((i + 1)); mkdir "$stage/$i"; mount --bind "$kept" "$stage/$i"; done
mkdir "$stage/etc"; mount --bind "$etc" "$stage/etc"
cd "$stage"; exec 9<.  # reachable once /tmp is covered
for own in {" ".join(_OWN)}; do mount -t tmpfs -o mode=1777 tmpfs "$own"; done
i=0; for kept; do
    i=$((i + 1)); case $kept in {"|".join(f"{own}/*" for own in _OWN)}) mkdir -p "$kept"; mount --bind "/proc/self/fd/9/$i" "$kept";; esac
done
mkdir -m 755 /run/sshd /run/etc; mkdir -m 700 {_HOME}
cp -r /proc/self/fd/9/etc/. /run/etc
for name in hosts passwd shadow; do mount --bind "/run/etc/$name" "/etc/$name"; done
umount -l /proc/self/fd/9/; exec 9<&-; cd /
ip link set lo up
echo ready
read -r boot  # eth0 is there
eval "exec $boot" >/dev/null
"""


class Node:
    """One machine. `root` is its file system as seen from here."""

    def __init__(self, name: str, address: str, link: str, folder: Path, authorized_key: str, cores: str) -> None:
        self.name = name
        self.address = address
        self.link = link  # the bridge's end of its cable
        self.init: int | None = None
        folder.mkdir()
        self.log = folder / "sshd.log"  # of its sshd
        etc = folder / "etc"
        etc.mkdir()
        (folder / "stage").mkdir()
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost ip6-localhost\n")
        (etc / "passwd").write_text(f"root:x:0:0:root:{_HOME}:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n")
        (etc / "shadow").write_text("root:*:20000:0:99999:7:::\n")
        self.public_key = server_files(etc, port=SSH_PORT, authorized_key=authorized_key, home=_HOME, extra=["PermitUserEnvironment yes"])
        config = etc / "sshd_config"
        config.write_text(config.read_text().replace(str(etc), "/run/etc"))
        kept = {str(Path(path).resolve()) for path in (_ROOT, sys.prefix, sys.base_prefix)}
        with self.log.open("wb") as stderr:
            self._process = subprocess.Popen(
                ("taskset", "--cpu-list", cores, "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--fork",
                 "--kill-child", "--mount", "--mount-proc", "--uts", "--ipc", "sh", "-c", _INIT, "sh", str(folder), name, *sorted(kept)),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip

    def await_init(self) -> None:
        """Wait until the namespaces are there."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", f"{self.name}: {self.log.read_text()}"
        self.init = _child_of(self._process.pid)  # process 1, as this machine numbers it
        self.root = Path(f"/proc/{self.init}/root")

    def start_sshd(self) -> None:
        self.become(f"{SSHD} -D -e -f /run/etc/sshd_config")

    def become(self, command: str) -> None:
        """Let process 1 be this from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.close()

    def await_sshd(self) -> None:
        await_listening(self.log, self._process)

    def inside(self, *argv: str) -> tuple[str, ...]:
        """The command that runs `argv` in the node's network, with this machine's files."""
        return ("nsenter", "--net", "--target", str(self.init), *argv)

    def run(self, *argv: str, input: str | None = None) -> str:
        return _run(*self.inside(*argv), input=input)

    def within(self, *argv: str) -> str:
        """Run something on the node, with its files and processes."""
        return _run("nsenter", "--net", "--pid", "--mount", "--target", str(self.init), *argv)

    @contextmanager
    def small_disk(self, folder: str, size: str) -> Iterator[None]:
        """A disk of its own, empty and so small, is in a folder's place."""
        self.within("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
        try:
            yield
        finally:
            self.within("umount", "-l", folder)

    @contextmanager
    def in_place_of(self, path: str, other: str) -> Iterator[None]:
        """On this node alone, a file is another one."""
        real = self.within("readlink", "-f", path).strip()
        self.within("mount", "--bind", other, real)
        try:
            yield
        finally:
            self.within("umount", real)

    def path(self, absolute: str) -> Path:
        """A file of the node, from here."""
        return self.root / absolute.lstrip("/")

    def processes(self) -> dict[int, str]:
        """What runs on the node besides the sshd that is its process 1, as the node numbers it."""
        found = {}
        for name in filter(str.isdigit, os.listdir(self.path("/proc"))):
            try:
                command = self.path(f"/proc/{name}/cmdline").read_bytes()
                state = self.path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # ended meanwhile
                continue
            if int(name) != 1 and state != "Z":
                found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def pids(self, word: str) -> list[int]:
        """Processes of the node whose command has that word, as this machine numbers them; signals take those numbers."""
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes() and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    found.append(int(name))
            except OSError:  # ended meanwhile
                continue
        return found

    def files(self) -> set[str]:
        """What somebody left on the node outside of dtrain's own folder."""
        ours = {"/run/sshd", "/run/etc", "/run/mount", _HOME, DIR, "/tmp/torchinductor_root"}  # the last is torch's own
        kept = {path for prefix in (_ROOT, sys.prefix, sys.base_prefix) for path in map(str, [Path(prefix), *Path(prefix).parents])}
        found = {f"{folder}/{name}" for folder in (*_OWN, _HOME) for name in os.listdir(self.path(folder))}
        return found - ours - kept

    def wipe(self) -> None:
        """End everything on it and make its folders empty, as at the start."""
        for pid in self.processes():
            _run("nsenter", "--pid", "--mount", "--target", str(self.init), "kill", "-9", str(pid), check=False)
        for name in {DIR, *self.files()}:
            path = self.path(name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self.init is not None:
            os.kill(self.init, signal.SIGKILL)  # takes all others along; unshare ends with it
        else:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        self._process.wait()


class Lan:
    """Some nodes and the launcher on one bridge. Damage done by its methods is undone by heal().

    Args:
        boot: what a node does to get its sshd.
    """

    def __init__(self, folder: Path, num_nodes: int, boot: Callable[[Node], None] = Node.start_sshd) -> None:
        folder.mkdir(parents=True)
        self.nodes: list[Node] = []
        self.user_key = folder / "user_key"
        self._undo: list[Callable[[], object]] = []
        self.bridge, self.network = _new_bridge()
        self.address = str(self.network[1])  # the launcher's
        try:
            self._build(folder, make_key(self.user_key), num_nodes, boot)
        except BaseException:
            self.close()
            raise

    def _build(self, folder: Path, authorized_key: str, num_nodes: int, boot: Callable[[Node], None]) -> None:
        _run("ip", "address", "add", f"{self.address}/{self.network.prefixlen}", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        cores = sorted(os.sched_getaffinity(0))  # shared out: nodes that all count the whole machine's starve each other
        for i in range(num_nodes):
            own = ",".join(map(str, cores[i::num_nodes])) or str(cores[i % len(cores)])
            name = f"n{i + 1}"
            self.nodes.append(Node(name, str(self.network[11 + i]), f"{self.bridge}{name}", folder / name, authorized_key, own))
        for i, node in enumerate(self.nodes, 1):
            node.await_init()
            # docker0: one address on every node. dead0: one subnet on every node, and no cable between them.
            node.run(
                "ip", "-batch", "-",
                input="link add docker0 type bridge\naddress add 172.17.0.1/16 dev docker0\nlink set docker0 up\n"
                "link add dead0 type veth peer name dead1\nlink set dead1 up\nlink set dead0 up\n"
                f"address add 172.29.0.{i}/24 dev dead0\n",
            )  # fmt: skip
            _run("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(node.init))
            _run("ip", "link", "set", node.link, "master", self.bridge, "up")
            node.run("ip", "-batch", "-", input=f"address add {node.address}/{self.network.prefixlen} dev eth0\nlink set eth0 up\n")
            boot(node)
        for node in self.nodes:
            node.await_sshd()

    def hosts(self, *, more: str = "") -> list[Host]:
        return [Host(node.name, node.address, SSH_PORT, "root", node.public_key, more) for node in self.nodes]

    def admit(self, home: Path) -> None:
        """Let the user of this home in, by the names n1, n2, ..."""
        write_user_files(home, self.user_key, self.hosts())

    def cluster(self, instances: str | None = None, **keys: str) -> str:
        """A cluster file: `n1, n2, ...` or the instances given, one CPU worker each."""
        all_keys = {"gpus_per_instance": "1", "device": "cpu", "python": sys.executable, **keys}
        names = instances or ", ".join(node.name for node in self.nodes)
        return f"instances: [{names}]\n" + "".join(f"{key}: {value}\n" for key, value in all_keys.items())

    def processes(self) -> dict[str, dict[int, str]]:
        """What runs on the nodes that have anything running."""
        return {node.name: found for node in self.nodes if (found := node.processes())}

    @contextmanager
    def cut(self, node: Node) -> Iterator[None]:
        """The node's cable is out."""
        _run("ip", "link", "set", node.link, "down")
        try:
            yield
        finally:
            _run("ip", "link", "set", node.link, "up")

    def slow(self, node: Node, rate: str) -> None:
        """What the node sends is no faster than that, such as 8mbit."""
        self._undo.append(lambda: node.run("tc", "qdisc", "del", "dev", "eth0", "root"))
        node.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64k", "latency", "200ms")

    def firewall(self, node: Node) -> None:
        """The node drops whatever others begin but ssh."""
        self._undo.append(lambda: node.run("iptables", "-F", "INPUT"))
        for rule in ("-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", "-p tcp --dport 22 -j ACCEPT", "-j DROP"):
            node.run("iptables", "-w", "-A", "INPUT", "-i", "eth0", *rule.split())

    def lose_large_packets(self, node: Node) -> None:
        """A switch port with a smaller MTU than what is plugged into it: no word comes back of what it drops."""
        for one in self.nodes:
            one.run("ip", "link", "set", "eth0", "gso_max_segs", "1")  # else a veth passes packets on that no cable holds
            self._undo.append(functools.partial(one.run, "ip", "link", "set", "eth0", "gso_max_segs", "65535"))
        _run("ip", "link", "set", node.link, "mtu", "1000")
        self._undo.append(lambda: _run("ip", "link", "set", node.link, "mtu", "1500"))

    def greet(self, node: Node, text: str) -> None:
        """A start-up file of the node's login shells."""
        rc = node.path(f"{_HOME}/.bashrc")
        rc.write_text(text)
        self._undo.append(rc.unlink)

    def set_clock(self, node: Node, ahead_s: int) -> None:
        """The wall clock of the node's new sessions and all that they start."""
        folder = node.path(f"{_HOME}/.ssh")
        folder.mkdir(exist_ok=True)
        (folder / "environment").write_text(f"LD_PRELOAD={_DATEFUDGE}\nDATEFUDGE={-ahead_s}\n")
        self._undo.append(lambda: shutil.rmtree(folder))

    def hide(self, node: Node) -> None:
        """The launcher's packets get no answer from the node; its neighbours' do."""
        node.run("ip", "route", "add", "blackhole", f"{self.address}/32")
        self._undo.append(lambda: node.run("ip", "route", "del", "blackhole", f"{self.address}/32"))

    def deafen(self, node: Node) -> None:
        """The launcher's packets do not arrive at the node; its neighbours' do."""
        rule = ("INPUT", "-s", self.address, "-j", "DROP")
        node.run("iptables", "-w", "-A", *rule)
        self._undo.append(lambda: node.run("iptables", "-w", "-D", *rule))

    def heal(self) -> None:
        while self._undo:
            self._undo.pop()()

    def close(self) -> None:
        for node in self.nodes:
            _run("ip", "link", "del", node.link, check=False)
        for node in self.nodes:
            node.close()
        _run("ip", "link", "del", self.bridge, check=False)

    def remains(self) -> list[str]:
        """What close() should have removed and has not."""
        ours = {self.bridge, *(node.link for node in self.nodes)}
        links = [name for name in os.listdir("/sys/class/net") if name in ours]
        return links + [f"process 1 of {node.name}" for node in self.nodes if node.init and Path(f"/proc/{node.init}").exists()]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """On this machine, a disk of its own, empty and so small, is in a folder's place."""
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", "-l", str(folder))


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot play nodes; None where it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "iptables", "tc", "unshare", "nsenter", "setpriv", "ssh-keygen") if not shutil.which(tool)]
    missing += [name for name, path in (("sshd", SSHD), ("datefudge", _DATEFUDGE)) if path is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(("unshare", "--net", "--pid", "--fork", "--mount-proc", "true"), capture_output=True, text=True)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else None


def _new_bridge() -> tuple[str, ipaddress.IPv4Network]:
    """A bridge with a number of its own, so that several test runs get along."""
    for number in range(256):
        name = f"dt{number}"
        done = subprocess.run(("ip", "link", "add", name, "type", "bridge"), capture_output=True, text=True)
        if done.returncode == 0:
            return name, ipaddress.IPv4Network(f"10.77.{number}.0/24")
        assert "File exists" in done.stderr, done.stderr
    raise AssertionError("256 bridges of tests are there already")


def _child_of(parent: int) -> int:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                return int(name)
        except OSError:  # ended meanwhile
            continue
    raise AssertionError(f"process {parent} has no child")


def _run(*argv: str, input: str | None = None, check: bool = True) -> str:
    done = subprocess.run(argv, input=input, capture_output=True, text=True, stdin=subprocess.DEVNULL if input is None else None)
    assert not check or done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout
