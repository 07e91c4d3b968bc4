"""A place for one test to launch jobs from: its own state, its own node folder, and a check that nothing is left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 120.0

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="not installed: mpirun")

# A worker that says where it is, once all have met: host name, sum of all ranks, then these variables.
PLACE = """
import json, os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()
print(json.dumps([socket.gethostname(), total.item(), *(os.environ.get(name) for name in names)]))
dist.destroy_process_group()
"""

WAIT = "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.05)\n"

# Texts that a shell, YAML or a careless split would change.
HOSTILE = [
    "", " ", "a b", "'", '"', "'\"'\"'", "$HOME", "$(touch x)", "`id`", "new\nline", "\r\n", "\\", "\\\\n", "*", "ünï 🚀", "--flag=1",
    "-- x", "64(x2)", "!!", "!$;", "; touch x", "&& false #", "#no", "%s%n", "~root", "\x1b[31m", "{a,b}",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


def _as_from_a_terminal() -> None:
    """The commands that a script's shell starts in the background, such as these tests, ignore Ctrl-C, and those of nohup HUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def num_ranks(word: str, said: str) -> int:
    """How many have printed it, some of them as one on a terminal."""
    return sum(int(number or 1) for number in re.findall(rf"\[(?:(\d+) ranks)?[^\[\]\n]*\] {word}", said))


class Terminal:
    """A process on a terminal of its own, which this is the other end of."""

    def __init__(self, argv: tuple[str, ...], cwd: Path, env: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        self.before = termios.tcgetattr(slave)
        self._said = b""
        self.process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=slave, stdout=slave, stderr=slave, text=True, preexec_fn=_as_session_on_terminal
        )
        self._slave = slave

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def said(self) -> str:
        """All that it has shown so far."""
        while select.select([self._master], [], [], 0)[0]:
            self._said += os.read(self._master, 1 << 16)
        return self._said.decode(errors="replace")

    def ended(self, timeout_s: float = TIMEOUT_S) -> int:
        """Its exit code, and with that the terminal as it was before."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.said()
            self.said()  # so that there is room for more
            time.sleep(0.05)
        assert termios.tcgetattr(self._slave) == self.before
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self._slave)
        os.close(self._master)


def _as_session_on_terminal() -> None:
    _as_from_a_terminal()
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Workspace:
    """Runs the real command line in processes of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes = root / "nodes"
        self.workdir = root / "work"
        for folder in (self.workdir, root / "home", root / "tmp"):
            folder.mkdir()
        self.env = {
            **os.environ,
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "XDG_STATE_HOME": str(root / "state"),
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._processes: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> Path:
        path = self.workdir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def job(self, text: str, *, instances: int = 2, gpus: int = 1, name: str = "job.yaml") -> Path:
        """A job file on instances of this machine; `text` is the rest of it."""
        cluster = f"cluster: {{instances: {instances}, gpus_per_instance: {gpus}, device: cpu, dir: {self.nodes}}}\n"
        return self.write(name, cluster + text)

    def waiting_job(self, name: str, *, instances: int = 2, gpus: int = 1, launcher: str = "none") -> Path:
        """A job whose workers say that they are ready and end when there is a file `go` in the root."""
        self.write("wait.py", WAIT)
        text = f"name: {name}\nlauncher: {launcher}\nscript: wait.py\nenv: {{GO: {self.root / 'go'}}}\n"
        return self.job(text, instances=instances, gpus=gpus, name=f"{name}.yaml")

    def dtrain(
        self, *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> Result:
        """Run `dtrain ARGS` to its end, in the working directory or another folder."""
        process = self._begin(("-m", "dtrain", *map(str, args)), env, cwd=cwd)
        return self.wait(process, timeout_s)

    def start(self, *args: str | Path, env: Mapping[str, str] | None = None, log: Path | None = None) -> subprocess.Popen[str]:
        """Run `dtrain ARGS` beside the test.

        Args:
            log: takes what it says, in place of pipes: it stands still when a pipe is full.
        """
        return self._begin(("-m", "dtrain", *map(str, args)), env, log)

    def python(self, script: str) -> subprocess.Popen[str]:
        """Run a script beside the test, as from a notebook."""
        return self._begin(("-c", script))

    def on_terminal(self, *args: str | Path) -> Terminal:
        """Run `dtrain ARGS` beside the test on a terminal of its own."""
        terminal = Terminal((sys.executable, "-m", "dtrain", *map(str, args)), self.workdir, {**self.env, "TERM": "xterm"})
        self._processes.append(terminal.process)
        return terminal

    def _begin(
        self, arguments: tuple[str, ...], env: Mapping[str, str] | None = None, log: Path | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        with contextlib.ExitStack() as files:
            output = subprocess.PIPE if log is None else files.enter_context(log.open("wb"))
            process = subprocess.Popen(
                (sys.executable, *arguments),
                cwd=cwd or self.workdir,
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                preexec_fn=_as_from_a_terminal,
            )
        self._processes.append(process)
        return process

    def wait(self, process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> Result:
        out, err = process.communicate(timeout=timeout_s)
        return Result(process.returncode, out, err)

    def status(self, job: str | None = None) -> dict[str, Any]:
        """The newest job, or the one named, as `status --json` gives it."""
        result = self.dtrain("status", *([job] if job else []), "--json")
        assert result.code == 0, result.err
        newest = json.loads(result.out)["jobs"][0]
        assert isinstance(newest, dict)
        return newest

    def printed(self, word: str) -> int:
        """How often the workers have printed it, by the copies that the launchers of here keep. To ask `dtrain logs` over and over
        would take from the workers the CPU that they need to get there."""
        return sum(log.read_text(errors="replace").count(word) for log in self.root.glob("state/dtrain/jobs/*/*/logs/rank*.log"))

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        """Wait for something that another process does."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            time.sleep(0.05)

    def leftovers(self) -> dict[int, str]:
        """Processes that belong to this workspace, by the folder that their command, variables or cwd name."""
        marker = str(self.root).encode()
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                told = command + Path(f"/proc/{name}/environ").read_bytes() + os.readlink(f"/proc/{name}/cwd").encode()
            except OSError:  # ended meanwhile
                continue
            if marker in told:
                found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def close(self) -> dict[int, str]:
        """End what the test left, and say what that was."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()
        deadline = time.monotonic() + 5.0
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return left
