"""The agent: runs one job on one node, detached from every connection, and writes what happens as events."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from typing import Optional

from dtrain.node import gpus, mpi, network, procs, wire
from dtrain.node.folder import FOLDER_VARIABLE, JobFolder, peer_uid
from dtrain.node.launcher import Launcher
from dtrain.node.setup import Setup
from dtrain.node.tripwire import Tripwire

ARMED_S = 60.0  # a prepared job that hears no Commit ends by itself, or sooner with the session that prepared it
KILL_TIMEOUT_S = 15.0
SETTLE_S = 1.0  # how long after a worker that lost another one: what it lost may still be ending, and tells why when it is let
LAST_WORDS_S = 2.0  # how long worker.py may take to report after the launcher ended
OOM_SCORE = 500
_POLL_S = 0.05  # while stopping
_LOOK_S = 3.0  # between two looks at whether the job's folder is still there

_SHARED = ("stop", "ctrl-c", "failure", "lease-over")  # causes that are the whole job's
_STOPPED = (*_SHARED, "peer-lost")  # no fault of this node's


@dataclass(frozen=True)
class Inherited:
    """What the session hands down to guard and agent besides the order."""

    listener: socket.socket  # for sessions and workers
    watch_listener: Optional[socket.socket]  # for other agents, on the first of several nodes
    held_port: Optional[socket.socket]  # of the rendezvous, on the first node; guard and agent keep it as long as they live
    gpu_locks: tuple[int, ...]  # descriptors


@dataclass(frozen=True)
class Guard:
    """The pipes to the guard."""

    alive: int  # to read: it ends with the guard
    beats: int  # to write: the guard ends an agent that writes nothing for too long


def main(folder: JobFolder, order: wire.Prepare, inherited: Inherited, guard: Guard) -> int:
    """Run the job to its end. Everything but our own bugs is told in events; those go to agent.log."""
    os.setsid()
    try:
        Agent(folder, order, inherited, guard).run()
    except Exception:  # outer edge: the guard sees the code, cleans up and records it
        with open(folder.stream("logs/agent.log"), "a") as log:
            log.write(traceback.format_exc())
        return 70
    return 0


class Agent:
    """One thread, one selector: orders of sessions, words of workers and other agents, ends of children, the guard's pipe."""

    def __init__(self, folder: JobFolder, order: wire.Prepare, inherited: Inherited, guard: Guard) -> None:
        self._folder = folder
        self._order = order
        self._gpu_locks = inherited.gpu_locks
        self._held_port = inherited.held_port
        self._launcher = Launcher(folder, order.launcher_env, is_mpi=order.mpi is not None)
        self._setup = Setup(folder, order)
        self._setup_for: Optional[socket.socket] = None  # the session that waits for its end
        self._daemons_wanted: set[str] = set()  # hosts
        self._connections: dict[socket.socket, Optional[wire.WorkerHello]] = {}  # None: a session
        self._held_by: Optional[socket.socket] = None  # until Commit
        self._heard_of: set[int] = set()  # ranks
        self._ended: dict[int, int] = {}  # rank -> exit code
        self._unwritten: list[wire.Message] = []  # events for which the disk has no room
        self._others_done: set[str] = set()  # on the first node: nodes whose workers have all ended
        self._cause = ""  # why the node is stopping; "" while it is not
        self._sweeping = False
        self._is_cleared = False  # nothing of the job is left here
        self._settled_at_s = float("inf")  # when a worker's end that is a symptom stops the node
        self._kill_at_s = float("inf")
        self._is_committed = False
        self._lease_s = order.lease_s  # None too once the job is detached
        self._armed_until_s = time.monotonic() + ARMED_S
        self._workers_until_s = float("inf")  # all have to be there by then
        self._heard_s = time.monotonic()  # the launching side's last word
        self._selector = selectors.DefaultSelector()
        self._child_ended = self._watch_children()
        self._selector.register(inherited.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(guard.alive, selectors.EVENT_READ, self._guard_ended)
        self._beats = guard.beats
        os.set_blocking(self._beats, False)
        self._tripwire = Tripwire(
            order.watch, self._selector, self._peer_said, self._peer_lost, self._clock_compared, self._launcher_silent_s
        )
        if inherited.watch_listener is not None:
            self._tripwire.listen(inherited.watch_listener)

    def run(self) -> None:
        procs.become_subreaper()
        me = procs.look(os.getpid())
        assert me is not None
        try:
            self._folder.append_event(wire.AgentStarted(time.time(), me.pid, me.start_ticks, procs.boot_id()))
        except OSError as error:
            self._folder.settled()
            os.write(1, f"{error.errno}\n".encode())
            return
        os.write(1, b"0\n")
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        os.close(null)
        while not self._is_over():
            self._wait()
        self._end()

    def _wait(self, timeout_s: Optional[float] = None) -> None:
        for key, _ in self._selector.select(self._wait_s() if timeout_s is None else timeout_s):
            key.data(key.fileobj)
        self._check_time()

    # ---- what the agent hears on its node ----

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if peer_uid(connection) not in (os.getuid(), 0):
            connection.close()
            return
        self._connections[connection] = None
        self._selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self, connection: socket.socket) -> None:
        try:
            received = wire.read_frame(connection.recv)
        except OSError:  # reset: the process at the other end was killed
            received = None
        if received is None:
            self._hang_up(connection)
            return
        message = received[0]
        if isinstance(message, wire.WorkerHello):
            if self._cause:
                self._hang_up(connection)  # it came after our TERM, and ends by itself
                return
            self._connections[connection] = message
            self._heard_of.add(message.rank)
            self._answer(connection, self._worker_order(message))
        elif isinstance(message, wire.WorkerStarted):
            self._event(message)
        elif isinstance(message, wire.DaemonWanted):
            self._answer(connection, self._daemon_wanted(message))
        elif isinstance(message, wire.WorkerEnded):
            self._worker_ended(message)
        elif isinstance(message, wire.Hold):
            self._held_by = connection
            self._heard_s = time.monotonic()
        elif isinstance(message, wire.Setup):
            self._setup_for = connection
            self._setup.start()
        elif isinstance(message, wire.Join):
            self._answer(connection, self._join(message))
        elif isinstance(message, wire.Commit):
            self._heard_s = time.monotonic()
            self._answer(connection, self._commit())
        elif isinstance(message, wire.Ping):
            self._heard_s = time.monotonic()
        elif isinstance(message, wire.Detach):
            self._lift_lease()
        elif isinstance(message, wire.Stop):
            self._stop(message.cause, message.grace_s)
        else:
            raise ValueError(f"the agent takes no {type(message).__name__}")

    def _answer(self, connection: socket.socket, message: wire.Message) -> None:
        with contextlib.suppress(OSError):  # it was killed: the end of its connection says so next
            connection.sendall(wire.frame(message))

    def _hang_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        if connection is self._held_by and not self._is_committed:
            self._stop("never-committed", self._order.grace_s if self._setup.is_running else 0.0)
        worker = self._connections.pop(connection)
        if worker is not None and worker.rank not in self._ended:  # worker.py was killed before it could report
            if self._launcher.is_ending:  # and it was, by its death signal, because its launcher was
                self._stop("launcher-failed", self._order.grace_s)
            self._worker_ended(
                wire.WorkerEnded(time.time(), worker.rank, worker.local_rank, 128 + signal.SIGKILL, signal.SIGKILL, "", bool(self._cause))
            )

    def _worker_ended(self, event: wire.WorkerEnded) -> None:
        failed_first = event.failed_first and self._cause in ("worker-failed", "failure")
        if self._cause and not event.symptom and event.exit_code != 0 and not failed_first:
            event = wire.WorkerEnded(**{**vars(event), "symptom": True})  # our own stop ended it
        self._ended[event.rank] = event.exit_code
        self._event(event)
        if event.exit_code != 0 and event.symptom and not self._cause:
            self._settled_at_s = min(self._settled_at_s, time.monotonic() + SETTLE_S)
        elif event.exit_code != 0:
            self._stop("worker-failed", self._order.grace_s)
        if self._have_all_ended() and not self._tripwire.is_first:
            self._tripwire.tell(wire.WorkersDone())
        self._finish_if_all_have_ended()

    def _guard_ended(self, guard_alive: int) -> None:
        self._selector.unregister(guard_alive)
        self._stop("guard-killed", self._order.grace_s)

    def _watch_children(self) -> socket.socket:
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda number, stack: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ, self._reap)
        return woken

    def _reap(self, woken: socket.socket) -> None:
        woken.recv(4096)
        procs.reap(self._exited)

    def _exited(self, pid: int, status: int) -> None:
        self._launcher.exited(pid, status)
        self._setup.exited(pid, status)

    def _look_after_setup(self) -> None:
        """A stop ends it like everything below us, and its session hears of our own end."""
        if self._setup_for is None or self._cause:
            return
        if time.monotonic() >= self._setup.try_at_s:
            self._setup.start()
        if self._setup.exit_code is None:
            return
        procs.kill_all(self._exited, KILL_TIMEOUT_S)  # what it left running: nothing else runs yet
        self._setup.close()
        ended = wire.SetupEnded(self._setup.exit_code, self._setup.last_words())
        self._answer(self._setup_for, ended)
        self._setup_for = None
        if ended.exit_code != 0:
            self._stop("setup-failed", 0.0)

    # ---- what the agent hears of other nodes ----

    def _peer_said(self, node: str, message: wire.Message) -> None:
        if isinstance(message, wire.Beat):
            self._heard_s = max(self._heard_s, time.monotonic() - message.launcher_silent_s)
        elif isinstance(message, (wire.WorkersDone, wire.Bye)):
            self._others_done.add(node)
            self._finish_if_all_have_ended()
        elif isinstance(message, wire.Finish):
            self._finish()
        elif isinstance(message, wire.StartDaemon):
            self._start_daemon(message)
        elif isinstance(message, wire.Stop):
            self._stop(message.cause, message.grace_s)
        elif isinstance(message, wire.Detach):
            self._lift_lease()

    def _peer_lost(self, node: str, how: str, silent_s: float) -> None:
        self._event(wire.PeerLost(time.time(), node, how, silent_s))
        self._stop("peer-lost", self._order.grace_s)

    def _clock_compared(self, offset_s: float) -> None:
        self._event(wire.ClockOffset(time.time(), offset_s))

    def _launcher_silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def _lift_lease(self) -> None:
        """On all nodes: of those that the launching side does not reach too."""
        if self._lease_s is not None:
            self._lease_s = None
            self._event(wire.LeaseLifted(time.time()))
            self._tripwire.tell(wire.Detach())

    def _finish_if_all_have_ended(self) -> None:
        watch = self._order.watch
        others = {*watch.nodes} - {watch.node} if watch is not None else set()
        if self._have_all_ended() and (watch is None or self._tripwire.is_first) and self._others_done >= others:
            self._tripwire.tell(wire.Finish())
            self._finish()

    # ---- what the agent does ----

    def _event(self, event: wire.Message) -> None:
        self._unwritten.append(event)
        try:
            while self._unwritten:
                self._folder.append_event(self._unwritten[0])
                del self._unwritten[0]
        except OSError:  # the folder was deleted or its disk is full: nobody can be told, so the job must not go on unseen
            if not self._cause:
                self._cause = "folder-gone"
                procs.terminate(self._below_launcher())
                self._tripwire.tell(wire.Stop("failure", self._order.grace_s))
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._order.grace_s)

    def _join(self, order: wire.Join) -> wire.Message:
        watch = self._order.watch
        assert watch is not None
        try:
            self._tripwire.join(watch.address, order.port)
        except OSError as error:
            where = f"{watch.first} ({watch.address}, port {order.port})"
            return wire.Failed("setup", f"{where} is not reached from here: {error}", "let the nodes connect to each other, or set ports:")
        return wire.Done()

    def _commit(self) -> wire.Message:
        if self._is_committed:
            return wire.Done()  # told twice
        if self._cause:
            return wire.Failed("setup", f"the job was stopped before it began ({self._cause})")
        if self._tripwire.missing:
            return wire.Failed("setup", f"{', '.join(sorted(self._tripwire.missing))} did not join")
        self._is_committed = True
        if self._held_port is not None:
            network.set_free(self._held_port, True)
        if self._order.mpi is not None:
            self._workers_until_s = time.monotonic() + self._order.mpi.start_timeout_s
        if self._order.launcher_argv:
            self._start(self._order.launcher_argv)
        return wire.Done()

    def _start(self, argv: tuple[str, ...]) -> None:
        try:
            self._launcher.start(argv)
        except OSError as error:
            self._launcher_failed(f"cannot start {argv[0]}: {error.strerror}")
            return
        assert self._launcher.pid is not None
        self._event(wire.LauncherStarted(time.time(), self._launcher.pid))

    def _daemon_wanted(self, wanted: wire.DaemonWanted) -> wire.Message:
        """mpirun asks for a daemon on another node."""
        here = self._order.mpi
        if here is None or here.node_rank != 0 or self._cause:
            return wire.Failed("setup", "no mpirun is at work here")
        if wanted.host in self._daemons_wanted:
            return wire.Failed("setup", "it was asked for before")
        node = here.hosts.get(wanted.host, "")
        if node not in self._tripwire.nodes:
            return wire.Failed("setup", "it is no node of this job")
        self._daemons_wanted.add(wanted.host)
        self._tripwire.tell(wire.StartDaemon(wanted.argv), node)
        return wire.Done()

    def _start_daemon(self, order: wire.StartDaemon) -> None:
        node = self._order.mpi
        if self._launcher.was_started or self._cause or node is None:
            return  # told twice, or too late
        try:
            self._start(mpi.daemon_argv(node, order.argv))
        except ValueError as error:
            self._launcher_failed(str(error))

    def _finish(self) -> None:
        """The launcher has nothing left to wait for; torchrun, where it does not end by itself, is not to be killed with a failure."""
        if self._order.mpi is not None or self._succeeded():
            self._launcher.finish()

    def _launcher_failed(self, why: str) -> None:
        self._launcher.complain(why)
        self._stop("launcher-failed", self._order.grace_s)

    def _worker_order(self, worker: wire.WorkerHello) -> wire.WorkerOrder:
        env = {**self._order.worker_env, **self._order.secrets, FOLDER_VARIABLE: self._folder.path}
        return wire.WorkerOrder(argv=self._order.worker_argv, env=env, cwd=self._order.workdir or self._folder.tree, oom_score=OOM_SCORE)

    def _stop(self, cause: str, grace_s: float) -> None:
        """TERM to all but the launcher now, KILL to all after the grace, sooner when only the launcher is left. On all nodes."""
        kill_at_s = time.monotonic() + grace_s
        if not self._cause:
            self._cause = cause
            self._event(wire.NodeStopping(time.time(), cause))
            procs.terminate(self._below_launcher())
        elif kill_at_s >= self._kill_at_s:
            return  # nothing new; so a Stop that goes round among the agents comes to its end
        self._kill_at_s = min(self._kill_at_s, kill_at_s)
        self._tripwire.tell(wire.Stop(cause if cause in _SHARED else "failure", grace_s))

    def _below_launcher(self) -> list[procs.Process]:
        return [process for process in procs.descendants(os.getpid()) if process.pid != self._launcher.pid]

    # ---- when it is over ----

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        until_s = [now_s + _LOOK_S, now_s + self._tripwire.wait_s(), self._settled_at_s]
        if self._is_cleared:
            return max(0.0, min(until_s[:2]) - now_s)
        if self._cause or self._launcher.ended_s is not None:
            return _POLL_S
        if self._is_committed:
            lease_s = float("inf") if self._lease_s is None else self._lease_s
            until_s += [self._heard_s + lease_s, self._workers_until_s, self._launcher.until_s]
        else:
            until_s += [self._armed_until_s, self._setup.try_at_s]
        return max(0.0, min(until_s) - now_s)

    def _check_time(self) -> None:
        now_s = time.monotonic()
        with contextlib.suppress(OSError):  # the guard was killed, or stands still
            os.write(self._beats, b".")
        self._tripwire.check()
        if not self._cause and not os.path.exists(self._folder.stream("lock")):
            self._stop("folder-gone", self._order.grace_s)
        if not self._is_committed and now_s >= self._armed_until_s and self._held_by is None:
            self._stop("never-committed", 0.0)
        if self._is_committed and self._lease_s is not None and now_s >= self._heard_s + self._lease_s:
            self._stop("lease-over", self._order.grace_s)
        if not self._cause and now_s >= self._settled_at_s:
            self._stop("worker-failed", self._order.grace_s)
        if now_s >= self._workers_until_s:
            self._workers_until_s = float("inf")
            self._workers_missing()
        self._launcher.check()
        self._look_after_setup()

    def _workers_missing(self) -> None:
        """mpirun waits for a daemon, its daemon for mpirun, or we for the order to start one: each would do so for ever."""
        if self._cause or self._order.mpi is None or len(self._heard_of) == self._order.num_workers:
            return
        waited = "for mpirun" if self._launcher.was_started else "to be told to start mpirun's daemon"
        self._launcher.complain(
            f"waited {self._order.mpi.start_timeout_s:g} s {waited}; {len(self._heard_of)} of {self._order.num_workers} workers started"
        )
        self._stop("start-timeout", self._order.grace_s)

    def _is_over(self) -> bool:
        if self._launcher.ended_s is not None and not self._cause and not self._sweeping:
            reporting = any(worker is not None for worker in self._connections.values())
            if (reporting and time.monotonic() < self._launcher.ended_s + LAST_WORDS_S) or self._settled_at_s < float("inf"):
                return False
            if self._succeeded():
                self._sweep()
            else:
                self._stop("launcher-failed", self._order.grace_s)
        if not self._cause and not self._sweeping:
            return False
        # Without a launcher worker.py stands in its place: it is above what it started, and has its last words still to say.
        is_heard = all(worker is None for worker in self._connections.values())
        return time.monotonic() >= self._kill_at_s or (is_heard and not self._below_launcher() and not self._is_launcher_needed())

    def _is_launcher_needed(self) -> bool:
        """Without one of its daemons mpirun kills the workers of all other nodes, whatever grace they still have.

        Not while workers start: mpirun waits for ever for one that our TERM met before it could report, and none has run yet.
        """
        is_up = self._order.mpi is not None and len(self._heard_of) == self._order.num_workers
        return is_up and self._launcher.is_running

    def _sweep(self) -> None:
        """All went well: end what the workers left behind."""
        self._sweeping = True
        self._kill_at_s = time.monotonic() + self._order.grace_s
        procs.terminate(self._below_launcher())

    def _have_all_ended(self) -> bool:
        return len(self._ended) == self._order.num_workers

    def _succeeded(self) -> bool:
        """The exit records decide, never the launcher's own code."""
        return self._have_all_ended() and not any(self._ended.values())

    def _end(self) -> None:
        if not self._tripwire.is_first:
            self._tripwire.leave()
        survivors = procs.kill_all(self._exited, KILL_TIMEOUT_S, pause=self._wait)  # what hears nothing of us takes us for lost
        gpus.release(self._gpu_locks)  # before the end is told: whoever hears of it may launch the next job at once
        while self._drain():
            pass
        self._is_cleared = True
        while self._tripwire.nodes:  # the first node sees the others off: who dies now is lost, and somebody must know
            self._wait()
        self._tripwire.leave()
        outcome: wire.Outcome = "succeeded" if self._succeeded() else "stopped" if self._cause in _STOPPED else "failed"
        detail = self._launcher.last_words() if self._cause in ("launcher-failed", "start-timeout") else ""
        if self._cause == "setup-failed":
            detail = self._setup.last_words()
        if self._cause == "launcher-failed":  # by itself: where it did not start in time, the KILL was ours
            detail += self._launcher.ending
        self._event(
            wire.NodeEnded(time.time(), outcome, "" if outcome == "succeeded" else self._cause, detail, procs.as_survivors(survivors))
        )
        self._folder.settled()

    def _drain(self) -> bool:
        """Take what workers said before they ended. Whether there was anything."""
        ready = [key for key, _ in self._selector.select(0) if key.fileobj in self._connections]
        for key in ready:
            key.data(key.fileobj)
        return bool(ready)
