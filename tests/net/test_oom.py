"""Lack of memory is named where the kernel says so, and not claimed where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import Result, Workspace

pytestmark = [pytest.mark.net, pytest.mark.root]

HOG = "memory = b'x' * (512 << 20)\n"
LOADER = """
import os, sys, torch

class Hog(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), 9)
        open(sys.argv[1], "w").write(str(os.getpid()))
        return b"x" * (512 << 20)

for batch in torch.utils.data.DataLoader(Hog(), num_workers=1):
    pass
"""


@contextmanager
def memory_limit(size_bytes: int) -> Iterator[Path | None]:
    """A cgroup whose processes are killed above so much memory: its cgroup.procs. None where this machine does not let us make one."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (v1, "memory.limit_in_bytes") if (v1 / "cgroup.procs").exists() else (v2, "memory.max")
    folder = root / f"dtrain-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(size_bytes))
    except OSError:
        if folder.exists():
            folder.rmdir()
        yield None
        return
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def is_kernel_log_readable() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY))
    except OSError:
        return False
    return os.stat("/dev/kmsg").st_rdev == os.makedev(1, 11)


def without_kernel_log(workspace: Workspace, job: Path, procs: Path | None = None) -> Result:
    """Launch as in a container that sees no kernel log, within a cgroup of its own."""
    into = "true" if procs is None else f"echo $$ > {procs}"
    script = f'mount --bind /dev/null /dev/kmsg; {into}; exec "$@"'
    argv = ("unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "dtrain", "launch", str(job))
    done = subprocess.run(argv, cwd=workspace.workdir, env=workspace.env, capture_output=True, text=True, timeout=60, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("through_shell", [False, True])
def test_a_worker_that_the_kernel_killed_for_its_memory(workspace: Workspace, through_shell: bool) -> None:
    """Itself, and below a shell that ends with 137 for it."""
    workspace.write("hog.py", HOG)
    run = f"{sys.executable} hog.py"
    with memory_limit(64 << 20) as procs:
        hog = "kill -KILL $$" if procs is None else f"echo $$ > {procs}; {run + '; exit $?' if through_shell else 'exec ' + run}"
        command = f"if [ $NODE_RANK = 1 ]; then {hog}; else sleep 600; fi"
        result = workspace.dtrain("launch", workspace.job(f"name: hog\nlauncher: none\ncommand: |\n  {command}\n"), timeout_s=60)
    assert result.code == 137, result.err
    ended = "exit code 137" if through_shell and procs else "SIGKILL (exit code 137)"
    if procs is not None and is_kernel_log_readable():
        assert f"rank 1 on node1 failed with {ended}: out-of-memory\n" in result.err
        assert "kernel log: Memory cgroup out of memory: Killed process" in result.err
    else:
        assert f"rank 1 on node1 failed with {ended}: killed\nhint: out of memory is the usual cause" in result.err
    assert workspace.status("hog")["first_failure"]["exit_code"] == 137


def test_the_cgroup_says_it_where_the_kernel_log_cannot_be_read(workspace: Workspace) -> None:
    workspace.write("hog.py", HOG)
    with memory_limit(256 << 20) as procs:
        hog = "kill -KILL $$" if procs is None else f"exec {sys.executable} hog.py"
        result = without_kernel_log(workspace, workspace.job(f"launcher: none\ncommand: {hog}\n", instances=1), procs)
    assert result.code == 137, result.err
    if procs is not None:
        assert "rank 0 on node0 failed with SIGKILL (exit code 137): out-of-memory\n" in result.err
        assert f"cgroup /{procs.parent.name} (limit 256 MiB): 1 killed for lack of memory while the worker ran" in result.err
    else:
        assert "rank 0 on node0 failed with SIGKILL (exit code 137): killed\n" in result.err
        assert "the kernel log cannot be read" in result.err


def test_a_kill_by_hand_is_not_called_a_lack_of_memory(workspace: Workspace) -> None:
    job = workspace.job("launcher: none\ncommand: kill -KILL $$\n", instances=1)
    result = workspace.dtrain("launch", job)
    assert result.code == 137, result.err
    assert "rank 0 on node0 failed with SIGKILL (exit code 137): killed\nhint: out of memory is the usual cause of SIGKILL" in result.err
    if is_kernel_log_readable():
        assert "; neither the kernel log nor its cgroup shows it\n" in result.err or "; the kernel log does not show it, and" in result.err
    result = without_kernel_log(workspace, job)
    assert (": killed\n" in result.err and "the kernel log can" in result.err) or "kernel log nor its cgroup can be read" in result.err


def test_a_killed_dataloader_worker_ends_its_worker_for_lack_of_memory(workspace: Workspace) -> None:
    """The worker itself raises; what was killed is its child."""
    workspace.write("loader.py", LOADER)
    with memory_limit(512 << 20) as procs:
        command = f"exec {sys.executable} loader.py {procs or 'kill'}"
        result = workspace.dtrain("launch", workspace.job(f"launcher: none\ncommand: {command}\n", instances=1), timeout_s=60)
    assert result.code == 1, result.err
    assert "is killed by signal: Killed" in result.err
    expected = "out-of-memory" if procs is not None and is_kernel_log_readable() else "killed"
    assert f"rank 0 on node0 failed with exit code 1: {expected}\n" in result.err
