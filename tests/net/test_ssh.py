"""Who is let in, and by which keys: a real sshd on loopback, started by whoever runs the tests."""

from __future__ import annotations

import io
import os
import pty
import queue
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from dtrain.errors import NodeUnreachable
from dtrain.follower import Connected, Follower
from dtrain.link import Target
from dtrain.render.live import LiveView
from dtrain.render.stop import StopView
from dtrain.spec.cluster import Instance, SshOptions
from dtrain.transport.ssh import SshTransport
from tests.cluster import Result, Workspace, num_ranks
from tests.ssh import Host, Sshd, make_key, write_user_files

pytestmark = pytest.mark.net


def launch(workspace: Workspace, script: str, *args: str, ssh: str = "{}") -> Result:
    """Run a script on `box`."""
    return workspace.dtrain("launch", job(workspace, script, ssh=ssh), *args)


def job(workspace: Workspace, script: str, *, ssh: str = "{}") -> Path:
    workspace.write("train.py", script)
    cluster = f"{{instances: [box], gpus_per_instance: 1, device: cpu, python: {sys.executable}, dir: {workspace.nodes}, ssh: {ssh}}}"
    return workspace.write("job.yaml", f"name: boxed\nlauncher: none\nscript: train.py\ngrace: 1\ncluster: {cluster}\n")


def known_hosts(workspace: Workspace) -> Path:
    return workspace.root / "home/.ssh/known_hosts"


def shown(public_key: str) -> str:
    """Its fingerprint, as ssh-keygen has it."""
    return subprocess.run(("ssh-keygen", "-l", "-f", "-"), input=public_key, capture_output=True, text=True, check=True).stdout.split()[1]


def admit(workspace: Workspace, sshd: Sshd, host: Host) -> None:
    write_user_files(workspace.root / "home", sshd.user_key, [host])


def test_a_host_alias_is_an_instance(workspace: Workspace, sshd: Sshd) -> None:
    """HostName, Port, User and IdentityFile come from ~/.ssh/config; the worker's own exit code comes back."""
    result = launch(workspace, "import os\nprint('SSH' in str(os.environ), os.getcwd())\nos._exit(3)\n")
    assert result.code == 3, result.err
    assert f"[0] True {workspace.nodes}" in result.err
    assert "rank 0 on box failed with exit code 3" in result.err
    assert workspace.status("boxed")["nodes"][0]["node"] == "box"


def test_a_host_key_that_is_not_known_is_refused_until_it_is_accepted(workspace: Workspace, sshd: Sshd) -> None:
    admit(workspace, sshd, sshd.host(known=False))
    result = launch(workspace, "print('started')\n")
    assert result.code == 77, result.err
    assert "box: " in result.err and "hint: " in result.err and "accept-new" in result.err and "started" not in result.err
    assert not workspace.nodes.exists()
    accepted = launch(workspace, "print('started')\n", ssh="{host_keys: accept-new}")
    assert accepted.code == 0
    kept = f"{sshd.host().known_as}: a new host key was accepted, and is kept in {known_hosts(workspace)}: ssh-ed25519"
    assert f"{kept} {shown(sshd.public_key)}" in accepted.err
    assert sshd.public_key.split()[1] in known_hosts(workspace).read_text()
    assert launch(workspace, "print('started')\n").code == 0


@pytest.mark.parametrize("host_keys", ["strict", "accept-new"])
@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_a_changed_host_key_is_refused(workspace: Workspace, sshd: Sshd, host_keys: str, kind: str) -> None:
    """Also where the server has no key any more of the type that is known."""
    other = make_key(workspace.root / "other", kind)
    known_hosts(workspace).write_text(f"{sshd.host().known_as} {other}")
    result = launch(workspace, "print('started')\n", ssh=f"{{host_keys: {host_keys}}}")
    assert result.code == 77, result.err
    assert "box: " in result.err and "ssh-keygen -R" in result.err and "Traceback" not in result.err
    assert f"it shows ssh-ed25519 {shown(sshd.public_key)}" in result.err
    assert f"{known_hosts(workspace)}:1 has ssh-{kind} {shown(other)}" in result.err
    assert known_hosts(workspace).read_text() == f"{sshd.host().known_as} {other}"
    assert not workspace.nodes.exists()


def test_a_user_key_that_the_host_does_not_take(workspace: Workspace, sshd: Sshd) -> None:
    make_key(sshd.user_key)
    result = launch(workspace, "print('started')\n")
    assert result.code == 77, result.err
    assert "box: " in result.err and "hint: " in result.err and "Traceback" not in result.err
    key = workspace.root / "right_key"
    (sshd.folder / "authorized_keys").write_text(make_key(key))
    assert launch(workspace, "print('started')\n", ssh=f"{{identity_file: {key}}}").code == 0


def test_only_the_host_key_that_is_known_counts(workspace: Workspace) -> None:
    """The server has two; known_hosts, written years ago, has its RSA key alone."""
    folder = workspace.root / "second"
    folder.mkdir()
    rsa = make_key(folder / "rsa", "rsa")
    sshd = Sshd(workspace.root / "sshd", extra=(f"HostKey {folder}/rsa",))
    try:
        host = sshd.host()
        admit(workspace, sshd, Host(host.alias, host.address, host.port, host.user, rsa))
        result = launch(workspace, "print('started')\n")
        assert result.code == 0, result.err
    finally:
        sshd.close()


def test_a_server_that_allows_one_session_and_no_sftp(workspace: Workspace) -> None:
    sshd = Sshd(workspace.root / "sshd", extra=("MaxSessions 1", "Subsystem sftp /bin/false", "PermitTTY no", "AllowTcpForwarding no"))
    try:
        admit(workspace, sshd, sshd.host())
        result = launch(workspace, "print('started')\n")
        assert result.code == 0, result.err
    finally:
        sshd.close()


@pytest.mark.parametrize(
    "start_up_file",
    [
        "echo 'Last login: today'; echo careful >&2; cd /nowhere; set -u; alias sh=false\n",
        "head -c 3000000 /dev/urandom\n",
        "(for i in $(seq 300); do echo news; sleep 0.001; done) &\n",
    ],
    ids=["habits", "garbage", "chatter"],
)
def test_a_noisy_start_up_file_changes_nothing(workspace: Workspace, sshd: Sshd, start_up_file: str) -> None:
    for name in (".bashrc", ".zshenv", ".profile"):
        (sshd.home / name).write_text(start_up_file)
    result = launch(workspace, "print('started')\n")
    assert result.code == 0, result.err
    assert "[0] started" in result.err


def test_a_start_up_file_that_prints_later(workspace: Workspace, sshd: Sshd) -> None:
    """What it left behind prints into the session; no line of the job is lost or changed by it."""
    (sshd.home / ".bashrc").write_text("(for i in 1 2 3 4 5 6 7 8; do sleep 0.3; echo news $i; done) &\n")
    result = launch(workspace, "import time\nfor i in range(30): print('line', i, flush=True); time.sleep(0.05)\n")
    assert result.code == 0, result.err
    assert [line for line in result.err.splitlines() if line.startswith("[0] ")] == [f"[0] line {i}" for i in range(30)]


COUNT = """
import os, time
number = 0
while not os.path.exists(os.environ["DTRAIN_OUTPUT_DIR"] + "/go"):
    number += 1
    print("line", number, flush=True)
    time.sleep(0.01)
"""


def test_a_connection_that_dies_is_made_anew(workspace: Workspace, sshd: Sshd) -> None:
    """The job knows nothing of it, and no line is lost or told twice."""
    process = workspace.start("launch", job(workspace, COUNT))
    lines = _lines_of(workspace)
    workspace.until(lambda: lines() > 10, "the first lines")
    sshd.drop_connections()
    before = lines()
    workspace.until(lambda: lines() > before + 100, "lines after the new connection")
    next(workspace.nodes.glob("outputs/*/*")).joinpath("go").touch()
    result = workspace.wait(process)
    assert result.code == 0, result.err
    written = next(workspace.nodes.glob("jobs/*/box/logs/rank0.log")).read_text().splitlines()
    assert written == [f"line {number}" for number in range(1, len(written) + 1)]
    assert [line for line in result.err.splitlines() if line.startswith("[0] ")] == [f"[0] {line}" for line in written]


def _lines_of(workspace: Workspace) -> Callable[[], int]:
    """How many lines have arrived here."""
    logs = workspace.root / "state/dtrain/jobs"
    return lambda: sum(path.read_bytes().count(b"\n") for path in logs.rglob("rank0.log"))


def test_a_passphrase_is_asked_for_once(workspace: Workspace, sshd: Sshd) -> None:
    """By the terminal, for all nodes, and after a slip of the fingers again."""
    write_user_files(workspace.root / "home", sshd.user_key, [sshd.host(), sshd.host("box2"), sshd.host("box3")])
    key = str(sshd.user_key)
    subprocess.run(("ssh-keygen", "-q", "-p", "-P", "", "-N", "secret words", "-f", key), check=True, capture_output=True)
    file = job(workspace, "print('started')\n")
    file.write_text(file.read_text().replace("[box]", "[box, box2, box3]"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workspace.workdir)
        os.execve(sys.executable, [sys.executable, "-m", "dtrain", "launch", file.name], {**workspace.env, "SSH_AUTH_SOCK": ""})
    said, answers = b"", [b"sekret words\n", b"secret words\n"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and said.count(b"passphrase of") < 3:
        try:
            part = os.read(terminal, 4096) if select.select([terminal], [], [], 1.0)[0] else b""
        except OSError:  # it has ended
            break
        said += part
        if answers and said.count(b"passphrase of") == 3 - len(answers):
            os.write(terminal, answers.pop(0))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said.decode()
    assert said.count(f"passphrase of {key}: ".encode()) == 2 and b"words" not in said
    assert b"that does not open it" in said and num_ranks("started", said.decode()) == 3


def test_more_nodes_than_this_machine_allows_open_files(workspace: Workspace, sshd: Sshd) -> None:
    """Said before the first connection; a soft limit is raised."""
    file = job(workspace, "import resource\nprint('files', *resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    limited = ("prlimit", "--nofile=64:256", sys.executable, "-m", "dtrain", "launch", file.name)
    ran = subprocess.run(limited, cwd=workspace.workdir, env=workspace.env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    before = (sshd.folder / "sshd.log").read_text()
    file.write_text(file.read_text().replace("[box]", "['node[1-100].lab']"))
    ran = subprocess.run(limited, cwd=workspace.workdir, env=workspace.env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == 78, ran.stderr
    assert "100 nodes take up to 328 open files at once, and this machine allows a process 256" in ran.stderr
    assert "hint: raise the limit here" in ran.stderr and (sshd.folder / "sshd.log").read_text() == before


def test_a_server_that_talks_garbage_prints_no_traceback(workspace: Workspace) -> None:
    """Neither ours nor one of paramiko's threads."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        file = job(workspace, "print('started')\n", ssh=f"{{port: {server.getsockname()[1]}}}")
        file.write_text(file.read_text().replace("[box]", "[127.0.0.1]"))
        process = workspace.start("launch", file)
        client, _ = server.accept()
        with client:
            client.sendall(b"SSH-2.0-x\r\n" + bytes(range(256)) * 8)
            result = workspace.wait(process)
    assert result.code == 69
    assert [line.partition(": ")[0] for line in result.err.splitlines()][-2:] == ["error", "hint"] and "Traceback" not in result.err


def test_a_server_that_is_gone(workspace: Workspace, sshd: Sshd) -> None:
    sshd.close()
    result = launch(workspace, "print('started')\n")
    assert result.code == 69, result.err
    assert "box: " in result.err and "refused" in result.err and "hint: " in result.err


def test_a_node_that_is_not_reached_again_is_named_once(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        target = Target(Instance("b1", host="127.0.0.1", ssh=SshOptions(port=port)), "auto", "j0b", "named")
        inbox: queue.SimpleQueue[Connected] = queue.SimpleQueue()
        follower = Follower(target, None, {}, inbox)
        follower.start()
        said = inbox.get(timeout=20).error
        follower.stop()
        follower.join()
    assert said == f"b1: 127.0.0.1 port {port}: connection refused"
    console = Console(file=io.StringIO(), width=200)
    LiveView(console).disconnected("b1", said)
    StopView(console, ["b1"], 1.0).disconnected("b1", said)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"{said}; the job goes on there, connecting again\n{said}; trying again\n"


def test_a_node_that_says_nothing_is_told_with_how_long_it_was_waited_for() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]  # the kernel takes no more
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        with pytest.raises(NodeUnreachable, match=r"b1: no answer from 127\.0\.0\.1 port \d+ within [23] s"):
            SshTransport("b1", "127.0.0.1", SshOptions(port=full.getsockname()[1]), sys.executable).open(3.0)
        for each in waiting:
            each.close()
