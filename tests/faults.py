"""The fault matrix: what can happen to a job on three machines, and how it has to end then.

The table is FAULTS. `measure` starts a job, does to it what a fault says, and measures; `differences` says what is not as it has
to be. tests/net/test_faults.py, benchmarks/faults.py and benchmarks/soak.py run it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.cluster import Workspace
from tests.lan import DIR, Lan, Node
from tests.scene import GRACE_S, START_S, Failure, Measured, Scene, enter_processes

STOP_S = 5.0 + GRACE_S  # from a wrong end to no process on any reachable node
NOTICE_S = 20.0  # until a node that falls silent is noticed
LOADED_S = 15.0  # what a loaded machine may take on top
LEASE_S = 4
HANGS_UP_S = 30  # either end of a connection of which the other says nothing

LAUNCHERS = ("torchrun", "mpirun")
MODES = ("foreground", "detached")
N1, N2, N3 = "n1", "n2", "n3"
RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True)
class Cause:
    """A root cause. What is None must be None."""

    nodes: tuple[str, ...]  # one of these: where two have lost each other, each may be the one that is named
    rank: int | None
    exit_code: int
    signal: int | None
    reason: str

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        return f"{' or '.join(self.nodes)}{rank}: {self.reason}"


@dataclass(frozen=True, slots=True)
class End:
    """How a job has to end, in the words of `status --json`. RUNNING: it goes on, and ends by the `dtrain stop` that comes next."""

    state: str
    exit_code: int | None
    cause: Cause | None = None


GOES_ON = End(RUNNING, None)
SUCCEEDED = End("SUCCEEDED", 0)
STOPPED = End("STOPPED", 143)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a running job."""

    name: str
    hurt: Callable[[Scene], None]
    end: Callable[[Case], End]
    target: str = N2  # the node to which it happens
    args: str = ""  # of the worker
    lease_s: int | None = None
    silent: bool = False  # nothing tells of it but silence
    away: bool = False  # the target is not reachable until all is measured
    needs_contact: bool = False  # what is left on the target is ended by the next contact, which only a launcher makes by itself
    while_starting: bool = False
    lasts_s: int = 0  # as its name says
    short_s: int = 0  # where there is no time for that


@dataclass(frozen=True, slots=True)
class Case:
    """A fault under one launcher, in one mode."""

    fault: Fault
    launcher: str
    mode: str
    is_short: bool = False

    @property
    def lasts_s(self) -> int:
        return self.fault.short_s if self.is_short else self.fault.lasts_s

    @property
    def is_detached(self) -> bool:
        return self.mode == "detached"

    @property
    def end(self) -> End:
        return self.fault.end(self)

    @property
    def stop_s(self) -> float:
        """How long it may take from the fault until no reachable node has a process of the job."""
        lease_s = self.fault.lease_s or 0 if self.end.state != RUNNING else 0
        return STOP_S + lease_s + (NOTICE_S if self.fault.silent else 0.0)

    def __str__(self) -> str:
        shorter = f", {self.lasts_s} s" if self.lasts_s != self.fault.lasts_s else ""
        return f"{self.fault.name} ({self.launcher}, {self.mode}{shorter})"


# ---- the table ----


def _worker(code: int, reason: str, *, node: str = N2, number: int | None = None) -> Callable[[Case], End]:
    rank = (N1, N2, N3).index(node)
    return lambda case: End("FAILED", code, Cause((node,), rank, code, number, reason))


def _node(code: int, reason: str, *, state: str = "FAILED", nodes: tuple[str, ...] = (N2,)) -> Callable[[Case], End]:
    return lambda case: End(state, code, Cause(nodes, None, code, None, reason))


def _always(end: End) -> Callable[[Case], End]:
    return lambda case: end


def _by_mode(foreground: End, detached: End) -> Callable[[Case], End]:
    return lambda case: detached if case.is_detached else foreground


def _order(python: str) -> Callable[[Scene], None]:
    return lambda scene: scene.order(scene.target, python)


def _all_end(scene: Scene) -> None:
    for node in scene.lan.nodes:
        scene.order(node, "sys.exit(0)")


def _kill_worker(scene: Scene) -> None:
    scene.signal(scene.target, [scene.worker(scene.target)])


def _kill_worker_py(scene: Scene) -> None:
    scene.signal(scene.target, [scene.worker_py(scene.target)])


def _kill_launcher_there(scene: Scene) -> None:
    scene.signal(scene.target, [scene.mpi_or_torchrun(scene.target)])


def _kill_agent(scene: Scene) -> None:
    scene.signal(scene.target, [scene.agent(scene.target)])


def _kill_guard(scene: Scene) -> None:
    scene.signal(scene.target, [scene.guard(scene.target)])


def _kill_both(scene: Scene) -> None:
    scene.kill_at_once(scene.target, [scene.agent(scene.target), scene.guard(scene.target)])


def _kill_all_above_workers(scene: Scene) -> None:
    node = scene.target
    scene.kill_at_once(node, [scene.agent(node), scene.guard(node), scene.mpi_or_torchrun(node), *scene.sessions(node)])


def _kill_everything(scene: Scene) -> None:
    scene.signal(scene.target, [-1])


def _reboot(scene: Scene) -> None:
    """Another boot id, and nothing runs. Whoever has an old id by now, even with the old variable, is not the job's."""
    node = scene.target
    boot_id = node.path("/run/etc/boot_id")
    boot_id.write_text("11111111-2222-3333-4444-555555555555\n")
    enter_processes(node, "mount", "--bind", "/run/etc/boot_id", "/proc/sys/kernel/random/boot_id")
    scene.undo.callback(enter_processes, node, "umount", "/proc/sys/kernel/random/boot_id")
    enter = ("nsenter", "--pid", "--mount", "--target", str(node.init))
    scene.signal(node, [-1])
    variable = f"DTRAIN_JOB_FOLDER={DIR}/jobs/{scene.job}/{node.name}"
    innocent = subprocess.Popen((*enter, "env", variable, "sleep", "601"), stdin=subprocess.DEVNULL)

    def still_there() -> None:
        was_there = innocent.poll() is None
        enter_processes(node, "pkill", "-KILL", "-f", "^sleep 601$", check=False)
        innocent.wait()
        assert was_there, "a process that is not the job's was ended"

    scene.undo.callback(still_there)


def _cut(scene: Scene) -> None:
    scene.hit()
    scene.undo.enter_context(scene.lan.cut(scene.target))


def _freeze(scene: Scene) -> None:
    """Nothing on the node moves, as with a disk that does not answer."""
    node = scene.target
    assert node.init is not None
    scene.signal(node, [-1], signal.SIGSTOP)
    os.kill(node.init, signal.SIGSTOP)  # its sshd

    def thaw() -> None:
        assert node.init is not None
        os.kill(node.init, signal.SIGCONT)
        enter_processes(node, "kill", "-CONT", "--", "-1")

    scene.undo.callback(thaw)


def _stop_agent(scene: Scene) -> None:
    scene.signal(scene.target, [scene.agent(scene.target)], signal.SIGSTOP)


def _part(scene: Scene) -> None:
    """A firewall comes up between two nodes."""
    first, node = scene.lan.nodes[0], scene.target
    scene.hit()
    for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
        rule = (chain, side, first.address, "-j", "DROP")
        node.run("iptables", "-w", "-A", *rule)
        scene.undo.callback(node.run, "iptables", "-w", "-D", *rule)


def _delete_folder(scene: Scene) -> None:
    scene.hit()
    enter_processes(scene.target, "rm", "-rf", f"{DIR}/jobs/{scene.job}")


def _fill_disk(scene: Scene) -> None:
    node = scene.target
    status = os.statvfs(node.path("/var/tmp"))
    used_kb = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
    scene.hit()
    enter_processes(node, "mount", "-o", f"remount,size={used_kb}k", "/var/tmp")
    scene.undo.callback(enter_processes, node, "mount", "-o", "remount,size=50%", "/var/tmp")


def _cut_sessions(scene: Scene) -> None:
    """sshd's processes for the connections there are, and ours behind them. A detached job has one where somebody looks."""
    node = scene.target
    if scene.detached:
        scene.until(lambda: not scene.sessions(node), "the sessions of the launch to end")
        logs = scene.workspace.start("logs", "--follow", log=scene.workspace.root / "logs.log")
        scene.undo.callback(logs.kill)
        scene.until(lambda: scene.sessions(node), "logs --follow to connect")
    scene.signal(node, scene.sessions(node), check=False)  # one may end with another


def _signal_agents(scene: Scene) -> None:
    node = scene.target
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        scene.signal(node, [scene.agent(node), scene.guard(node)], number)


def _hide(*names: str) -> Callable[[Scene], None]:
    def hide(scene: Scene) -> None:
        """The launching machine and these nodes do not hear each other for a while, in which `status` says what is true."""
        scene.follow()
        hidden = [node for node in scene.lan.nodes if node.name in names]
        scene.hit()
        for node in hidden:
            scene.lan.hide(node)
        hidden_at, until_s = time.time(), time.monotonic() + scene.lasts_s
        while time.monotonic() < until_s:
            _status_is_true(scene, hidden, hidden_at)
        if scene.lasts_s > HANGS_UP_S + LOADED_S:
            for node in hidden:
                assert re.search(rf"^{node.name}: .*; the job goes on there, connecting again$", scene.said(), re.MULTILINE), scene.said()
        scene.lan.heal()

    return hide


def _status_is_true(scene: Scene, hidden: Sequence[Node], hidden_at: float) -> None:
    """All runs. Of a node that does not answer it says that, and when it was heard last."""
    status = scene.workspace.status("hurt")
    assert (status["state"], status["exit_code"], status["first_failure"]) == (RUNNING, None, None), status
    assert [(node["state"], *(rank["state"] for rank in node["ranks"])) for node in status["nodes"]] == [(RUNNING, RUNNING)] * 3, status
    seen_at = {node["node"]: node["last_seen_at"] for node in status["nodes"]}
    assert all(seen_at[node.name] < hidden_at + 1 for node in hidden), (status, hidden_at)
    shown = scene.workspace.dtrain("status", "hurt")
    assert shown.code == 0 and RUNNING in shown.out and not re.search("FAILED|LOST|SUCCEEDED|STOPPED", shown.out), shown.out
    for node in hidden:
        silent = re.search(rf"^{node.name} was not asked: no answer within 3 s; last seen (\d+)\.\d s ago$", shown.out, re.MULTILINE)
        assert silent is not None, shown.out
        assert int(silent[1]) >= time.time() - hidden_at - LOADED_S, shown.out


def _hide_beyond_lease(scene: Scene) -> None:
    scene.hit()
    for node in scene.lan.nodes:
        scene.lan.hide(node)
    if scene.detached:
        time.sleep(LEASE_S + 1)  # it has none
        scene.lan.heal()
    else:
        scene.until(lambda: any("NodeEnded" in str(scene.events(node)) for node in scene.lan.nodes), "the lease to end")
        scene.lan.heal()


def _leave(scene: Scene) -> None:
    """The launcher of a foreground job is killed; that of a detached one has ended before."""
    scene.hit()
    scene.kill_launcher()
    if scene.detached:
        time.sleep(LEASE_S + 1)  # it has no lease


def _close_terminal(scene: Scene) -> None:
    """The launcher hears of it by HUP, and detaches; a detached job has neither."""
    scene.hit()
    if scene.launch is not None:
        scene.launch.send_signal(signal.SIGHUP)
        assert scene.ended() == 0, scene.said()
    time.sleep(LEASE_S + 1)


def _kill_and_attach(scene: Scene) -> None:
    """Two follow the job from then on, to its end."""
    scene.hit()
    scene.kill_launcher()
    logs = [scene.attach() for _ in range(2)]
    scene.until(lambda: all(log.read_text().count("line") > 10 for log in logs), "both to show lines")


def _stand_still(scene: Scene) -> None:
    """The launcher; where there is none, who attaches in its place."""
    follower = scene.follow()
    scene.hit()
    follower.send_signal(signal.SIGSTOP)
    time.sleep(scene.lasts_s)
    follower.send_signal(signal.SIGCONT)


def _stop(*options: str) -> Callable[[Scene], None]:
    def stop(scene: Scene) -> None:
        scene.dtrain("stop", "hurt", *options)

    return stop


def _ctrl_c(scene: Scene) -> None:
    """In the launch; a detached job has none, and there it is a stop that hears it and leaves what it ordered to take its course."""
    if scene.launch is not None:
        scene.hit()
        scene.launch.send_signal(signal.SIGINT)
    else:
        stop = scene.dtrain("stop", "hurt")
        scene.until(lambda: any("NodeStopping" in str(scene.events(node)) for node in scene.lan.nodes), "a node to stop")
        stop.send_signal(signal.SIGINT)


def _fails_at_once(scene: Scene) -> None:
    scene.until(lambda: "WorkerEnded" in str(scene.events(scene.target)), "the worker to end", START_S)
    scene.hit()


KILLED = signal.SIGKILL
FAULTS = (
    Fault("all workers end with 0", _all_end, _always(SUCCEEDED)),
    Fault("a worker ends with 7", _order("sys.exit(7)"), _worker(7, "exit-code")),
    Fault("a worker raises", _order("raise RuntimeError('broken')"), _worker(1, "exception")),
    Fault("a worker segfaults", _order("os.kill(os.getpid(), 11)"), _worker(139, "segfault", number=11)),
    Fault("a worker is killed", _kill_worker, _worker(137, "killed", number=KILLED)),
    Fault("the first node's worker is killed", _kill_worker, _worker(137, "killed", node=N1, number=KILLED), target=N1),
    Fault("a worker kills its process group", _order("os.killpg(0, 9)"), _worker(137, "killed", number=KILLED)),
    Fault("a worker ends with 7, all ignore TERM", _order("os._exit(7)"), _worker(7, "exit-code"), args="--deaf"),
    Fault("a worker ends with 7, the others then with 9", _order("os._exit(7)"), _worker(7, "exit-code"), args="--last-word 9"),
    Fault("a worker ends before the others begin", _fails_at_once, _worker(7, "exit-code"), args="--fails-at-once", while_starting=True),
    Fault("a worker ends among fork-respawners", _order("os._exit(7)"), _worker(7, "exit-code"), args="--respawn"),
    Fault("worker.py is killed", _kill_worker_py, _worker(137, "killed", number=KILLED)),
    Fault("torchrun or mpirun is killed", _kill_launcher_there, _node(78, "launcher-failed", nodes=(N1,)), target=N1),
    Fault("torchrun or an MPI daemon is killed", _kill_launcher_there, _node(78, "launcher-failed")),
    Fault("the agent is killed", _kill_agent, _node(69, "agent-killed")),
    Fault("the first node's agent is killed", _kill_agent, _node(69, "agent-killed", nodes=(N1,)), target=N1),
    Fault("the agent is killed among fork-respawners", _kill_agent, _node(69, "agent-killed"), args="--respawn"),
    Fault("the guard is killed", _kill_guard, _node(69, "guard-killed")),
    Fault("the first node's guard is killed", _kill_guard, _node(69, "guard-killed", nodes=(N1,)), target=N1),
    Fault(
        "agent and guard are killed at once", _kill_both, _node(69, "all-killed", state="LOST"),
        args="--no-clean-daemon", needs_contact=True,
    ),
    Fault(
        "the first node's agent and guard are killed", _kill_both, _node(69, "all-killed", state="LOST", nodes=(N1,)), target=N1,
        args="--no-clean-daemon", needs_contact=True,
    ),
    Fault(
        "all but the workers is killed on a node", _kill_all_above_workers, _node(69, "all-killed", state="LOST"),
        args="--no-clean-daemon", needs_contact=True,
    ),
    Fault("all is killed on a node", _kill_everything, _node(69, "all-killed", state="LOST")),
    Fault("a node restarts", _reboot, _node(69, "rebooted", state="LOST"), away=True),
    Fault("a node's link is cut", _cut, _node(69, "node-lost", state="LOST"), silent=True, away=True),
    Fault("the first node's link is cut", _cut, _node(69, "node-lost", state="LOST", nodes=(N1,)), target=N1, silent=True, away=True),
    Fault("a node freezes", _freeze, _node(69, "node-lost", state="LOST"), silent=True, away=True),
    Fault("the agent stands still", _stop_agent, _node(69, "agent-killed"), silent=True),
    Fault("two nodes hear nothing of each other", _part, _node(69, "node-lost", nodes=(N1, N2)), silent=True),
    Fault("the job's folder is deleted", _delete_folder, _node(69, "node-lost", state="LOST")),
    Fault("the disk is full", _fill_disk, _worker(1, "no-space")),  # the traceback that names it finds no room either
    Fault("the launcher is killed", _leave, _by_mode(STOPPED, GOES_ON), lease_s=LEASE_S),
    Fault("the launcher is cut off beyond its lease", _hide_beyond_lease, _by_mode(STOPPED, GOES_ON), lease_s=LEASE_S),
    Fault("the launcher is cut off for 60 s", _hide(N1, N2, N3), _always(GOES_ON), lasts_s=60, short_s=5),
    Fault("a session and its sshd are killed", _cut_sessions, _always(GOES_ON)),
    Fault("a node is cut off from the launcher for 60 s", _hide(N2), _always(GOES_ON), lasts_s=60, short_s=20),  # > 15 s
    Fault("TERM, INT, HUP to agent and guard", _signal_agents, _always(GOES_ON)),
    Fault("dtrain stop", _stop(), _always(STOPPED)),
    Fault("dtrain stop --grace 0", _stop("--grace", "0"), _always(STOPPED), args="--deaf"),
    Fault("dtrain stop among fork-respawners", _stop(), _always(STOPPED), args="--respawn"),
    Fault("Ctrl-C", _ctrl_c, _by_mode(End("STOPPED", 130), STOPPED)),
    Fault("the launcher's terminal closes", _close_terminal, _always(GOES_ON), lease_s=LEASE_S),
    Fault("the launcher is killed, and two attach", _kill_and_attach, _always(GOES_ON)),
    Fault("the launcher stands still for 120 s", _stand_still, _always(GOES_ON), lasts_s=120, short_s=HANGS_UP_S + 5),
    Fault(
        "the launcher stands still beyond its lease", _stand_still, _by_mode(STOPPED, GOES_ON), lease_s=LEASE_S,
        lasts_s=LEASE_S + 3, short_s=LEASE_S + 3,
    ),
)  # fmt: skip


# ---- running it ----


def measure(case: Case, lan: Lan, workspace: Workspace, delay_s: float = 0.0) -> Measured:
    """Start a job on the nodes, which have to be empty, let the fault happen, and see how it ends.

    Args:
        delay_s: from the workers' first words to the fault.

    Raises:
        AssertionError: it did not come as far as that.
    """
    fault = case.fault
    target = next(node for node in lan.nodes if node.name == fault.target)
    scene = Scene(
        lan,
        workspace,
        case.launcher,
        detached=case.is_detached,
        target=target,
        args=fault.args,
        lease_s=fault.lease_s,
        lasts_s=case.lasts_s,
    )
    try:
        scene.start()
        if not fault.while_starting:
            scene.await_workers()
            time.sleep(delay_s)
        fault.hurt(scene)
        return _went_on(scene) if case.end.state == RUNNING else _ended(case, scene)
    finally:
        scene.heal()
        scene.kill_launcher()


def _ended(case: Case, scene: Scene) -> Measured:
    fault, nodes = case.fault, scene.lan.nodes
    reachable = [node for node in nodes if not (fault.away and node is scene.target)]
    unattended = fault.needs_contact and case.is_detached
    stop_s = scene.await_none([node for node in reachable if not (unattended and node is scene.target)], case.stop_s + LOADED_S)
    launch_code = None if scene.launch is None else scene.ended()
    if case.is_detached:
        launch_code = None  # it has all workers running, or one that has failed by then
    status = scene.status(over=True)
    lost = scene.lost_bytes(reachable)
    scene.heal()
    return _measured(scene, status, launch_code, stop_s, lost)


def _went_on(scene: Scene) -> Measured:
    """All workers go on, the launching side hears of it, and a stop ends them."""
    nodes, launch_log = scene.lan.nodes, scene.workspace.root / "launch.log"
    is_followed = scene.launch is not None
    sizes = {node.name: len(scene.rank_log(node)) for node in nodes}
    scene.until(lambda: all(len(scene.rank_log(node)) > sizes[node.name] + 1000 for node in nodes), "the workers to go on")
    if scene.launch is not None:
        scene.until(lambda: all(len(scene.copied_log(node)) > sizes[node.name] for node in nodes), "the launcher to hear of it")
        assert scene.launch.poll() is None
    status = scene.status(over=False)
    scene.began_s = time.monotonic()
    stop = scene.workspace.start("stop", "hurt")
    stop_s = scene.await_none(nodes, STOP_S + LOADED_S)
    result = scene.workspace.wait(stop)
    assert result.code == 0, result.err
    after = scene.status(over=True)
    assert (after["state"], after["exit_code"], after["first_failure"]) == ("STOPPED", 143, None), after
    assert scene.launch is None or scene.ended() == 143
    lost = scene.lost_bytes(nodes)
    scene.followers_ended(STOPPED.exit_code, STOP_S + LOADED_S)
    scene.logs_are_whole(launch_log.read_text() if is_followed else None)
    scene.heal()
    return _measured(scene, status, None, stop_s, lost)


def _measured(scene: Scene, status: dict[str, object], launch_code: int | None, stop_s: float | None, lost: tuple[int, int]) -> Measured:
    told = status["first_failure"]
    failure = None
    if isinstance(told, dict):
        failure = Failure(told["node"], told["rank"], told["exit_code"], told["signal"], told["reason"])
    # Also where a node was away, and the sessions of who asked. An sshd whose connection was cut is the system's, and ends when TCP,
    # which asks less and less often, has found that out.
    deadline = time.monotonic() + STOP_S + LOADED_S + scene.lasts_s
    while scene.lan.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = tuple(f"{node}: {command}" for node, found in scene.lan.processes().items() for command in found.values())
    state, exit_code = status["state"], status["exit_code"]
    assert isinstance(state, str) and (exit_code is None or isinstance(exit_code, int))
    return Measured(state, exit_code, launch_code, failure, stop_s, left, *lost)


def differences(case: Case, measured: Measured, slack_s: float = LOADED_S) -> list[str]:
    """What is not as it has to be."""
    end, found = case.end, []
    if (measured.state, measured.exit_code) != (end.state, end.exit_code):
        found.append(f"{measured.state} with {measured.exit_code}, not {end.state} with {end.exit_code}")
    if measured.launch_code not in (None, end.exit_code):
        found.append(f"the launch ended with {measured.launch_code}, not {end.exit_code}")
    if not _is(measured.failure, end.cause):
        found.append(f"the root cause is {measured.failure}, not {end.cause}")
    if measured.stop_s is None or measured.stop_s > case.stop_s + slack_s:
        found.append(f"stopped after {measured.stop_s} s, not within {case.stop_s:g} s")
    if measured.left:
        found.append(f"left running: {', '.join(measured.left)}")
    if measured.log_bytes_lost or not measured.log_bytes:
        found.append(f"{measured.log_bytes_lost} of {measured.log_bytes} bytes of logs are lost")
    return found


def _is(failure: Failure | None, cause: Cause | None) -> bool:
    if failure is None or cause is None:
        return failure is None and cause is None
    told = (failure.rank, failure.exit_code, failure.signal, failure.reason)
    return failure.node in cause.nodes and told == (cause.rank, cause.exit_code, cause.signal, cause.reason)
