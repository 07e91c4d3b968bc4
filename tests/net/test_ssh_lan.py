"""What ssh has to hold out on real machines: silence, cuts, strange disks, and other users who look."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.link import LOGIN_S
from dtrain.spec.cluster import SshOptions
from dtrain.transport import Channel
from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh.config import resolve
from tests.cluster import HOSTILE, Workspace
from tests.lan import DIR, Lan, Node

pytestmark = [pytest.mark.net, pytest.mark.root]

SECRET = "s3cr3t-0f-th3-t3st"
NOBODY = 65534

# Says which files below some folders, and which commands and environments of processes, hold a text that stdin names.
LOOK = """
import os, sys
wanted = sys.stdin.buffer.read()
paths = [f"/proc/{pid}/{name}" for pid in os.listdir("/proc") if pid.isdigit() for name in ("cmdline", "environ")]
for top in sys.argv[1:]:
    paths += [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
for path in paths:
    try:
        with open(path, "rb") as file:
            found = wanted in file.read()
    except OSError:
        continue
    if found:
        print(path)
"""


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that other users may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def look(folders: Sequence[str | Path], *, node: Node | None = None, uid: int = NOBODY) -> list[str]:
    """Where somebody finds the secret."""
    enter = () if node is None else ("nsenter", "--pid", "--mount", "--target", str(node.init))
    argv = (*enter, "setpriv", f"--reuid={uid}", "--clear-groups", "/usr/bin/python3", "-I", "-c", LOOK, *map(str, folders))
    return subprocess.run(argv, input=SECRET, capture_output=True, text=True, check=True).stdout.splitlines()


def test_no_other_user_sees_a_secret(lan: Lan, workspace: Workspace, readable: Path) -> None:
    """Neither in a command, an environment or a file, on either side; its own user, in the environment of the workers alone."""
    values = {"HARD": "".join(HOSTILE), "EMPTY": "", "LONG": "é" * 50_000, "ALSO_LONG": "'$x\n" * 25_000}
    secrets = {"TOKEN": SECRET, **{f"S_{name}": value for name, value in values.items()}}
    digests = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in {**values, **secrets}.items()}
    workspace.write(
        "use.py",
        "import hashlib, json, os, time\n"
        f"print(json.dumps({{name: hashlib.sha256(os.environb[name.encode()]).hexdigest() for name in {list(digests)}}}), flush=True)\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists('{DIR}/go'): time.sleep(0.05)\n",
    )
    text = {"name": "used", "script": "use.py", "cluster": "lan.yaml", "secrets": list(secrets), "env": values}
    home = {"XDG_STATE_HOME": str(readable / "state")}
    launch = workspace.start("launch", workspace.write("job.yaml", json.dumps(text, ensure_ascii=False)), env={**secrets, **home})
    workspace.until(lambda: launch.poll() or workspace.dtrain("logs", env=home).out.count("ready") == 3, "the workers")
    assert launch.poll() is None, workspace.wait(launch).err

    (readable / "control").write_text(SECRET)
    assert look([readable]) == [str(readable / "control")]
    assert [line for line in look([readable, workspace.root], uid=0) if not re.fullmatch(r"/proc/\d+/environ", line)] == [
        str(readable / "control")
    ]
    for node in lan.nodes:
        folders = ("/tmp", "/var/tmp", "/run", "/dev/shm")
        node.path("/tmp/control").write_text(SECRET)
        assert look(folders, node=node) == ["/tmp/control"]
        seen = [line for line in look(folders, node=node, uid=0) if line != "/tmp/control"]
        commands = {node.processes()[int(line.split("/")[2])] for line in seen}
        assert all(line.endswith("/environ") for line in seen) and all("use.py" in command for command in commands), commands
        node.path("/tmp/control").unlink()
        node.path(f"{DIR}/go").touch()
    result = workspace.wait(launch)
    assert result.code == 0, result.err
    told = [json.loads(line[4:]) for line in workspace.dtrain("logs", env=home).out.splitlines() if line[4:5] == "{"]
    assert told == [digests] * 3


def test_a_node_that_is_gone_behind_a_bastion_is_named_and_holds_up_no_other(lan: Lan, workspace: Workspace) -> None:
    bastion, gone, well = lan.nodes
    workspace.write("train.py", "print('started')\n")
    workspace.write("behind.yaml", lan.cluster("n2, n3", ssh="{proxy_jump: n1}"))
    gone.run("ip", "route", "add", "blackhole", f"{bastion.address}/32")
    try:
        began = time.monotonic()
        launch = workspace.start("launch", workspace.write("job.yaml", "script: train.py\ncluster: behind.yaml\n"))
        workspace.until(lambda: well.processes(), "the session of the other")
        result = workspace.wait(launch)
        assert result.code == 69, result.err
        assert f"n2: the bastion n1 does not get through to {gone.address} port 22: " in result.err and "n3: " not in result.err
        assert time.monotonic() - began < 40
    finally:
        gone.run("ip", "route", "del", "blackhole", f"{bastion.address}/32")
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)


# Becomes a machine whose name server, on 127.0.0.1, takes questions and never answers. $1: resolv.conf. $2: nsswitch.conf. $3: a script.
SILENT_NAMES = """
set -e
[ ! -e /etc/resolv.conf ] || mount --bind "$1" "$(readlink -f /etc/resolv.conf)"
[ ! -e /etc/nsswitch.conf ] || mount --bind "$2" /etc/nsswitch.conf
exec "$0" -c "$3"
"""
ASK = """
import socket, sys
from dtrain.spec.cluster import SshOptions
from dtrain.transport.ssh import SshTransport
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
SshTransport("gpu1", "gpu1.lab", SshOptions(), sys.executable).open(2.0)
"""


def test_a_name_server_that_is_silent_keeps_to_the_deadline(lan: Lan, workspace: Workspace) -> None:
    names = workspace.write("resolv.conf", "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    ways = workspace.write("nsswitch.conf", "passwd: files\nhosts: files dns\n")
    argv = ("unshare", "--mount", "sh", "-c", SILENT_NAMES, sys.executable, str(names), str(ways), ASK)
    ran = subprocess.run(lan.nodes[0].inside(*argv), env=workspace.env, capture_output=True, text=True, timeout=60, check=False)
    assert "gpu1: no name server has said within 2 s what the name gpu1.lab means" in ran.stderr


def test_a_peer_that_is_gone_is_noticed(lan: Lan, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from it: by what we say, which nobody acknowledges; behind a bastion, by what it does not say."""
    monkeypatch.setenv("HOME", str(workspace.root / "home"))
    resolve.cache_clear()
    options = (("n2", SshOptions()), ("n3", SshOptions(proxy_jump="n1")))
    channels = [SshTransport(node, node, ssh, sys.executable).open(LOGIN_S) for node, ssh in options]

    def noticed_after_s(channel: Channel) -> float:
        channel.write(b"7")  # as a link says something every 10 s
        with contextlib.suppress(OSError):
            assert channel.read(1) == b""
        return time.monotonic() - began

    with lan.cut(lan.nodes[1]), lan.cut(lan.nodes[2]), ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        direct_s, behind_s = pool.map(noticed_after_s, channels)
    assert direct_s < 22 and behind_s < 32
    for channel in channels:
        channel.close()
    for node in lan.nodes:
        node.wipe()  # the connection of the bastion, and what has not heard of the end


def test_a_home_that_takes_nothing_and_a_folder_that_executes_nothing(lan: Lan, workspace: Workspace) -> None:
    """Nothing of dtrain is in the home, and nothing below `dir` has to be executable."""
    node = lan.nodes[0]
    enter = ("nsenter", "--mount", "--target", str(node.init))
    node.path("/var/tmp/noexec").mkdir()
    subprocess.run((*enter, "mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", "/var/tmp/noexec"), check=True)
    subprocess.run((*enter, "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/run/root"), check=True)
    try:
        workspace.write("train.py", "import os\nprint('home', os.access(os.environ['HOME'], os.W_OK))\n")
        workspace.write("one.yaml", lan.cluster("n1", dir="/var/tmp/noexec/dtrain"))
        job = workspace.write("job.yaml", "script: train.py\ncluster: one.yaml\n")
        result = workspace.dtrain("launch", job)
        assert result.code == 0 and "[0] home False" in result.err, result.err
        workspace.write("one.yaml", lan.cluster("n1", dir="/run/root/dtrain"))
        result = workspace.dtrain("launch", job)
        assert result.code == 78 and "Traceback" not in result.err, result.err
        assert "n1: Read-only file system: /run/root/dtrain" in result.err and "hint: choose another dir: in the cluster file" in result.err
    finally:
        for folder in ("/run/root", "/var/tmp/noexec"):
            subprocess.run((*enter, "umount", folder), check=True)
        shutil.rmtree(node.path("/var/tmp/noexec"))


def test_the_first_node_takes_more_agents_than_a_process_has_files_and_the_worker_keeps_its_limit(lan: Lan, workspace: Workspace) -> None:
    node = lan.nodes[0]
    lan.greet(node, "ulimit -Sn 200\n")
    workspace.write(
        "agent.py",
        "import resource, glob, time\n"
        "print('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    if b'\\0guard\\0' in open(path, 'rb').read():\n"
        "        line = [line for line in open(path.replace('cmdline', 'limits')) if 'open files' in line][0]\n"
        "        print('guard or agent', *line.split()[3:5], flush=True)\n",
    )
    result = workspace.dtrain("launch", workspace.write("job.yaml", "script: agent.py\ncluster: lan.yaml\n"))
    assert result.code == 0, result.err
    assert "[0] limit 200\n" in result.err
    limits = [line.split()[-2:] for line in result.err.splitlines() if line.startswith("[0] guard or agent")]
    assert len(limits) == 2 and sorted(soft == hard for soft, hard in limits) == [False, True], limits
