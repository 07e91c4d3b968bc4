"""Who is let in, and by which keys: a real sshd on loopback, started by whoever runs the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Result, Workspace
from tests.ssh import Host, Sshd, make_key, write_user_files

pytestmark = pytest.mark.net


def launch(workspace: Workspace, script: str, *args: str, ssh: str = "{}") -> Result:
    """Run a script on `box`."""
    return workspace.dtrain("launch", job(workspace, script, ssh=ssh), *args)


def job(workspace: Workspace, script: str, *, ssh: str = "{}") -> Path:
    workspace.write("train.py", script)
    cluster = f"{{instances: [box], gpus_per_instance: 1, device: cpu, python: {sys.executable}, dir: {workspace.nodes}, ssh: {ssh}}}"
    return workspace.write("job.yaml", f"name: boxed\nscript: train.py\ngrace: 1\ncluster: {cluster}\n")


def known_hosts(workspace: Workspace) -> Path:
    return workspace.root / "home/.ssh/known_hosts"


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
    assert launch(workspace, "print('started')\n", ssh="{host_keys: accept-new}").code == 0
    assert sshd.public_key.split()[1] in known_hosts(workspace).read_text()
    assert launch(workspace, "print('started')\n").code == 0


@pytest.mark.parametrize("host_keys", ["strict", "accept-new"])
def test_a_changed_host_key_is_refused(workspace: Workspace, sshd: Sshd, host_keys: str) -> None:
    other = make_key(workspace.root / "other")
    known_hosts(workspace).write_text(f"{sshd.host().known_as} {other}")
    result = launch(workspace, "print('started')\n", ssh=f"{{host_keys: {host_keys}}}")
    assert result.code == 77, result.err
    assert "box: " in result.err and "ssh-keygen -R" in result.err and "Traceback" not in result.err
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
    ["echo 'Last login: today'; echo careful >&2; cd /nowhere; set -u; alias sh=false\n", "head -c 30000 /dev/urandom\n"],
    ids=["habits", "garbage"],
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


def test_a_server_that_is_gone(workspace: Workspace, sshd: Sshd) -> None:
    sshd.close()
    result = launch(workspace, "print('started')\n")
    assert result.code == 69, result.err
    assert "box: " in result.err and "refused" in result.err and "hint: " in result.err
