"""A job on three machines that is there to be hurt, and what is measured of its end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import hostile_worker
from tests.cluster import Workspace
from tests.lan import DIR, Lan, Node

GRACE_S = 1
START_S = 120.0
LOOKS = 3  # at /proc, all empty: one alone may miss what forks while it is read
LOOK_S = 0.02

# How the session of a launching side looks in /proc; it is no process of the job and ends with its connection.
_SESSION = ("sshd", "/bin/sh -c IFS= read", " -I -S -c import os,sys;")


@dataclass(frozen=True, slots=True)
class Failure:
    """What `status --json` says of the root cause."""

    node: str
    rank: int | None
    exit_code: int
    signal: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """How a job ended after a fault, or went on."""

    state: str
    exit_code: int | None
    launch_code: int | None  # of `dtrain launch`; None where it was killed or had ended before
    failure: Failure | None
    stop_s: float | None  # from the fault, or where the job went on from the stop, to no process on any reachable node; None: never
    left: tuple[str, ...]  # processes on reachable nodes at the end of all
    log_bytes: int  # on the reachable nodes, in the logs of their ranks
    log_bytes_lost: int  # of these, missing or different in the launching machine's copy


class Scene:
    """One job with one worker on each node, and ways to hurt it. What they do is undone by heal()."""

    def __init__(
        self,
        lan: Lan,
        workspace: Workspace,
        launcher: str,
        *,
        detached: bool,
        target: Node,
        args: str = "",
        lease_s: int | None = None,
        grace_s: int = GRACE_S,
        lasts_s: int = 0,
    ) -> None:
        self.lan = lan
        self.workspace = workspace
        self.launcher = launcher
        self.detached = detached
        self.target = target
        self.launch: subprocess.Popen[str] | None = None  # the launcher, while there is one
        self.began_s = 0.0  # of the fault, by time.monotonic()
        self.undo = contextlib.ExitStack()
        self.lasts_s = lasts_s  # the fault
        self._attached: list[subprocess.Popen[str]] = []
        self._lease_s = lease_s
        workspace.write("hostile_worker.py", Path(hostile_worker.__file__).read_text())
        workspace.write(
            "job.yaml",
            f"name: hurt\nscript: hostile_worker.py\nargs: {args!r}\ncluster: lan.yaml\ngrace: {grace_s}\nlauncher: {launcher}\n",
        )

    # ---- a job that runs ----

    def start(self) -> None:
        lease = () if self._lease_s is None or self.detached else ("--lease", str(self._lease_s))
        detach = ("--detach",) if self.detached else ()
        self.launch = self.workspace.start("launch", "job.yaml", *lease, *detach, log=self.workspace.root / "launch.log")

    def await_workers(self) -> None:
        """Until each has printed, and the launching side is where it stays."""
        log = self.rank_log if self.detached else self.copied_log
        launch = self.launch
        assert launch is not None

        def are_there() -> bool:
            assert launch.poll() in (None, 0), f"the launch ended with {launch.returncode}: {self.said()}"
            return all(b"line" in log(node) for node in self.lan.nodes)

        self.until(are_there, "the workers", START_S)
        if self.detached:
            assert self.ended() == 0, self.said()

    def attach(self) -> Path:
        """Follow the job until its end. What that shows."""
        log = self.workspace.root / f"attach{len(self._attached)}.log"
        self._attached.append(self.workspace.start("attach", "hurt", log=log))
        return log

    def follow(self) -> subprocess.Popen[str]:
        """Who follows the job: the launcher; of a detached one that is gone, and one attaches in its place."""
        if self.launch is not None:
            return self.launch
        shown = self.attach()
        self.until(lambda: shown.read_text().count("line") > 10, "the attach to show lines")
        return self._attached[-1]

    def followers_ended(self, code: int | None, timeout_s: float) -> None:
        """Those that attached, with the job's own code."""
        assert [attached.wait(timeout_s) for attached in self._attached] == [code] * len(self._attached)

    def ended(self, timeout_s: float = START_S) -> int:
        """The launcher's exit code, once it has ended."""
        assert self.launch is not None
        launch, self.launch = self.launch, None
        return launch.wait(timeout_s)

    def said(self) -> str:
        """What the launcher has said so far, or who attached in its place."""
        return (self.workspace.root / ("attach0.log" if self._attached else "launch.log")).read_text()

    @property
    def job(self) -> str:
        return next((path.name for path in self.workspace.root.glob("state/dtrain/jobs/*")), "none yet")

    def folder(self, node: Node) -> Path:
        """The job's own on a node."""
        return node.path(f"{DIR}/jobs/{self.job}/{node.name}")

    def rank_of(self, node: Node) -> int:
        return self.lan.nodes.index(node)

    def rank_log(self, node: Node) -> bytes:
        return _read(self.folder(node) / f"logs/rank{self.rank_of(node)}.log")

    def copied_log(self, node: Node) -> bytes:
        """The launching machine's copy of it."""
        return _read(self.workspace.root / f"state/dtrain/jobs/{self.job}/{node.name}/logs/rank{self.rank_of(node)}.log")

    def events(self, node: Node) -> list[dict[str, Any]]:
        return [json.loads(line) for line in _read(self.folder(node) / "events.jsonl").splitlines() if line.endswith(b"}")]

    # ---- who is who on a node, as the node numbers them ----

    def agent(self, node: Node) -> int:
        return self._pid(node, "AgentStarted")

    def guard(self, node: Node) -> int:
        return _parent(node, self.agent(node))

    def mpi_or_torchrun(self, node: Node) -> int:
        return self._pid(node, "LauncherStarted")

    def worker(self, node: Node) -> int:
        return self._pid(node, "WorkerStarted")

    def worker_py(self, node: Node) -> int:
        return _parent(node, self.worker(node))

    def sessions(self, node: Node) -> list[int]:
        return [pid for pid, command in node.processes().items() if is_session(command)]

    def _pid(self, node: Node, event: str) -> int:
        pid = next(each["pid"] for each in self.events(node) if each["type"] == event)
        assert isinstance(pid, int)
        return pid

    # ---- ways to hurt it; each starts the clock ----

    def hit(self) -> None:
        """The clock starts, unless it runs."""
        self.began_s = self.began_s or time.monotonic()

    def signal(self, node: Node, pids: Iterable[int], number: int = signal.SIGKILL, *, check: bool = True) -> None:
        self.hit()
        enter_processes(node, "kill", f"-{int(number)}", "--", *map(str, pids), check=check)

    def kill_at_once(self, node: Node, pids: list[int]) -> None:
        """None of them does anything after the death of another, as it may between two signals of signal()."""
        self.signal(node, pids, signal.SIGSTOP)
        self.until(lambda: all(_state(node, pid) == "T" for pid in pids), "all to stand still")
        self.signal(node, pids)

    def order(self, node: Node, python: str) -> None:
        """Let a worker do something, at its next line."""
        tree = self.folder(node) / "tree"
        (tree / "new").write_text(python + "\n")
        self.hit()
        os.replace(tree / "new", tree / hostile_worker.ORDER)

    def dtrain(self, *args: str) -> subprocess.Popen[str]:
        """A command that is not waited for."""
        self.hit()
        return self.workspace.start(*args)

    def kill_launcher(self) -> None:
        if self.launch is not None:
            self.hit()
            self.launch.kill()
            self.ended()

    def heal(self) -> None:
        for attached in self._attached:
            attached.kill()
        self.undo.close()
        self.lan.heal()

    # ---- what is left of it ----

    def processes(self, nodes: Iterable[Node]) -> list[str]:
        """The job's, without the sessions of whoever asks about it."""
        return [f"{node.name}: {command}" for node in nodes for command in node.processes().values() if not is_session(command)]

    def await_none(self, nodes: Iterable[Node], timeout_s: float) -> float | None:
        """Seconds from the fault until the nodes had none of it; None: they still had after timeout_s."""
        nodes = tuple(nodes)
        deadline = self.began_s + timeout_s
        num_empty, since_s = 0, 0.0
        while num_empty < LOOKS:
            now_s = time.monotonic()
            if self.processes(nodes):
                num_empty = 0
                if now_s > deadline:
                    return None
            else:
                since_s = since_s if num_empty else now_s
                num_empty += 1
            time.sleep(LOOK_S)
        return since_s - self.began_s

    def status(self, *, over: bool) -> dict[str, Any]:
        """What the nodes say now, where it has to be over the last word; a node that is slow to let us in is asked again."""
        deadline = time.monotonic() + START_S
        while True:
            status = self.workspace.status("hurt")
            if not over or status["ended_at"] is not None or time.monotonic() >= deadline:
                return status

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        self.workspace.until(condition, what, timeout_s)

    def lost_bytes(self, nodes: Iterable[Node]) -> tuple[int, int]:
        """How many bytes the ranks' logs have there, and how many of them the copies do not have."""
        logs = [(self.rank_log(node), self.copied_log(node)) for node in nodes]
        return sum(len(there) for there, _ in logs), sum(len(there) - _common(there, here) for there, here in logs)

    def logs_are_whole(self, shown: str | None) -> None:
        """What `dtrain logs` has of all ranks is what they wrote, and they wrote what they do when nothing happens to them.

        Args:
            shown: by a launch from the start to the end, in the order of arrival.
        """
        wanted, written = [], []
        for rank, node in enumerate(self.lan.nodes):
            log = self.rank_log(node).decode()
            written += [f"[{rank}] {line}\n" for line in log.splitlines()]
            lines = [line for number in range(log.count("\n") // 10) for line in hostile_worker.lines(number + 1, rank)]
            wanted += [f"[{rank}] {line}\n" for line in ("ready", *lines)]
        logs = self.workspace.dtrain("logs", "hurt")
        assert logs.code == 0, logs.err
        assert _hash(logs.out) == _hash("".join(written)) == _hash("".join(wanted))
        if shown is not None:
            by_rank = sorted(re.findall(r"^\[\d\] (?:ready|line).*\n", shown, re.MULTILINE), key=lambda line: line[:3])
            assert _hash("".join(by_rank)) == _hash(logs.out)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def three_machines() -> Iterator[tuple[Lan, Path]]:
    """Nodes for a script, and a folder. Ctrl-C and TERM leave nothing of either."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        lan = Lan(Path(folder) / "lan", num_nodes=3)
        try:
            yield lan, Path(folder)
        finally:
            lan.close()


@contextlib.contextmanager
def new_workspace(lan: Lan, folder: Path, *, wipe: bool) -> Iterator[Workspace]:
    """A place of its own to launch one job from, outside of pytest.

    Args:
        wipe: empty the nodes after it.

    Raises:
        AssertionError: the job has left a process on the launching machine, or a file outside of dtrain's folder on a node.
    """
    folder.mkdir()
    workspace = Workspace(folder)
    lan.admit(folder / "home")
    workspace.write("lan.yaml", lan.cluster())
    try:
        yield workspace
    finally:
        left = workspace.close()
        files = {node.name: found for node in lan.nodes if (found := node.files())}
        for node in lan.nodes if wipe else ():
            node.wipe()
    assert not left, f"still running here: {left}"
    assert not files, f"left on the nodes: {files}"


def is_session(command: str) -> bool:
    return command.startswith(_SESSION[:2]) or _SESSION[2] in command


def enter_processes(node: Node, *argv: str, check: bool = True) -> None:
    """Run a command among the processes and files of a node."""
    subprocess.run(("nsenter", "--pid", "--mount", "--net", "--target", str(node.init), *argv), check=check, stdin=subprocess.DEVNULL)


def _parent(node: Node, pid: int) -> int:
    return int(_stat(node, pid)[1])


def _state(node: Node, pid: int) -> str:
    return _stat(node, pid)[0]


def _stat(node: Node, pid: int) -> list[str]:
    """What stands behind the name: state, parent, ..."""
    return node.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _common(there: bytes, here: bytes) -> int:
    """Bytes at the same place in both."""
    if here[: len(there)] == there:
        return len(there)
    return sum(a == b for a, b in zip(there, here, strict=False))
