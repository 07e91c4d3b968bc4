"""The agent: runs one job on one node, detached from every connection, and writes what happens as events."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
import traceback
from typing import Optional

from dtrain.node import mpi, procs, wire
from dtrain.node.folder import JobFolder, peer_uid

ARMED_S = 60.0  # a prepared job that hears no Commit ends by itself
KILL_TIMEOUT_S = 15.0
SETTLE_S = 1.0  # how long after a worker that lost another one: what it lost may still be ending, and tells why when it is let
LAST_WORDS_S = 2.0  # how long worker.py may take to report after the launcher ended
OOM_SCORE = 500
_POLL_S = 0.05  # while stopping
_LOOK_S = 5.0  # between two looks at whether the job's folder is still there


def main(folder: JobFolder, order: wire.Prepare, listener: socket.socket, guard_alive: int) -> int:
    """Run the job to its end. Everything but our own bugs is told in events; those go to agent.log."""
    os.setsid()
    try:
        Agent(folder, order, listener, guard_alive).run()
    except Exception:  # outer edge: the guard sees the code, cleans up and records it
        with open(folder.stream("logs/agent.log"), "a") as log:
            log.write(traceback.format_exc())
        return 70
    return 0


def as_survivors(left: list[procs.Process]) -> tuple[wire.Survivor, ...]:
    return tuple(wire.Survivor(process.pid, process.state, procs.command_line(process.pid)) for process in left)


class Agent:
    """One thread, one selector: orders of sessions, words of workers, ends of children, the guard's pipe."""

    def __init__(self, folder: JobFolder, order: wire.Prepare, listener: socket.socket, guard_alive: int) -> None:
        self._folder = folder
        self._order = order
        self._listener = listener
        self._launcher: Optional[subprocess.Popen[bytes]] = None
        self._launcher_status: Optional[int] = None
        self._launcher_ended_s = 0.0
        self._launcher_until_s = float("inf")  # it has nothing left to wait for after this
        self._daemons_wanted: set[str] = set()  # hosts
        self._connections: dict[socket.socket, Optional[wire.WorkerHello]] = {}  # None: a session
        self._heard_of: set[int] = set()  # ranks
        self._ended: dict[int, int] = {}  # rank -> exit code
        self._cause = ""  # why the node is stopping; "" while it is not
        self._sweeping = False
        self._settled_at_s = float("inf")  # when a worker's end that is a symptom stops the node
        self._kill_at_s = float("inf")
        self._is_committed = False
        self._armed_until_s = time.monotonic() + ARMED_S
        self._workers_until_s = float("inf")  # all have to be there by then
        self._heard_s = time.monotonic()  # the launching side's last word
        self._selector = selectors.DefaultSelector()
        self._child_ended = self._watch_children()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(guard_alive, selectors.EVENT_READ, self._guard_ended)

    def run(self) -> None:
        procs.become_subreaper()
        me = procs.look(os.getpid())
        assert me is not None
        self._event(wire.AgentStarted(time.time(), me.pid, me.start_ticks, procs.boot_id()))
        os.write(1, b"listening\n")
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        os.close(null)
        while not self._is_over():
            for key, _ in self._selector.select(self._wait_s()):
                key.data(key.fileobj)
            self._check_time()
        self._end()

    # ---- what the agent hears ----

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
        elif isinstance(message, wire.StartDaemon):
            self._start_daemon(message)
        elif isinstance(message, wire.WorkerEnded):
            self._worker_ended(message)
        elif isinstance(message, wire.Commit):
            self._heard_s = time.monotonic()
            self._commit()
            self._answer(connection, wire.Done())
        elif isinstance(message, wire.Ping):
            self._heard_s = time.monotonic()
        elif isinstance(message, wire.Finish):
            self._finish()
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
        worker = self._connections.pop(connection)
        if worker is not None and worker.rank not in self._ended:  # worker.py was killed before it could report
            if self._launcher is not None and (self._launcher_status is not None or procs.is_ending(self._launcher.pid)):
                # and it was, by its death signal, because its launcher was
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
        procs.reap(self._on_exit)

    def _on_exit(self, pid: int, status: int) -> None:
        if self._launcher is not None and pid == self._launcher.pid:
            self._launcher.returncode = self._launcher_status = procs.exit_code(status)
            self._launcher_ended_s = time.monotonic()

    # ---- what the agent does ----

    def _event(self, event: wire.Message) -> None:
        try:
            self._folder.append_event(event)
        except OSError:  # the folder was deleted or its disk is full: nobody can be told, so the job must not go on unseen
            if not self._cause:
                self._cause = "folder-gone"
                procs.terminate(self._below_launcher())
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._order.grace_s)

    def _commit(self) -> None:
        if self._is_committed or self._cause:
            return  # told twice, or too late
        self._is_committed = True
        if self._order.mpi is not None:
            self._workers_until_s = time.monotonic() + self._order.mpi.start_timeout_s
        if self._order.launcher_argv:
            self._start(self._order.launcher_argv)

    def _start(self, argv: tuple[str, ...]) -> None:
        environ = os.environ if self._order.mpi is None else mpi.environment(os.environ, self._folder)
        with open(self._folder.stream(wire.LAUNCHER_LOG), "ab") as log:
            try:
                self._launcher = subprocess.Popen(
                    argv,
                    cwd=self._folder.path,  # not the user's tree: a torch/ folder there would be imported instead of torch
                    env={**environ, **self._order.launcher_env, "DTRAIN_JOB_FOLDER": self._folder.path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # own group: a stop signals the workers' groups and leaves the launcher to see it
                    preexec_fn=procs.die_with_parent,
                )
            except OSError as error:
                self._launcher_failed(f"cannot start {argv[0]}: {error.strerror}")
                return
        self._event(wire.LauncherStarted(time.time(), self._launcher.pid))

    def _daemon_wanted(self, event: wire.DaemonWanted) -> wire.Message:
        """mpirun asks for a daemon; whoever follows this node's events passes that on."""
        node = self._order.mpi
        if node is None or node.node_rank != 0 or self._cause:
            return wire.Failed("setup", "no mpirun is at work here")
        if event.host in self._daemons_wanted:
            return wire.Failed("setup", "it was asked for before")
        self._daemons_wanted.add(event.host)
        self._event(event)
        return wire.Done()

    def _start_daemon(self, order: wire.StartDaemon) -> None:
        node = self._order.mpi
        if self._launcher is not None or self._cause or node is None or not self._is_committed:
            return  # told twice, or too late
        try:
            self._start(mpi.daemon_argv(node, order.argv))
        except ValueError as error:
            self._launcher_failed(str(error))

    def _launcher_failed(self, why: str) -> None:
        self._complain(why)
        self._stop("launcher-failed", self._order.grace_s)

    def _complain(self, text: str) -> None:
        with open(self._folder.stream(wire.LAUNCHER_LOG), "a") as log:
            log.write(f"dtrain: {text}\n")

    def _finish(self) -> None:
        """End torchrun's wait for its peers (an exit barrier of up to 300 s); what it would return decides nothing.

        mpirun and its daemons end by themselves, unless a worker.py was killed.
        """
        if self._order.mpi is not None:
            self._launcher_until_s = time.monotonic() + mpi.LINGER_S
        elif self._succeeded():
            self._launcher_until_s = 0.0

    def _worker_order(self, worker: wire.WorkerHello) -> wire.WorkerOrder:
        env = {**self._order.worker_env, **self._order.secrets, "DTRAIN_JOB_FOLDER": self._folder.path}
        return wire.WorkerOrder(argv=self._order.worker_argv, env=env, cwd=self._order.workdir or self._folder.tree, oom_score=OOM_SCORE)

    def _stop(self, cause: str, grace_s: float) -> None:
        """TERM to all but the launcher now, KILL to all after the grace, sooner when only the launcher is left."""
        if not self._cause:
            self._cause = cause
            self._event(wire.NodeStopping(time.time(), cause))
            procs.terminate(self._below_launcher())
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + grace_s)

    def _below_launcher(self) -> list[procs.Process]:
        launcher_pid = self._launcher.pid if self._launcher is not None else None
        return [process for process in procs.descendants(os.getpid()) if process.pid != launcher_pid]

    # ---- when it is over ----

    def _wait_s(self) -> float:
        if self._cause or self._launcher_status is not None:
            return _POLL_S
        now_s = time.monotonic()
        if not self._is_committed:
            return max(0.0, self._armed_until_s - now_s)
        lease_until_s = self._heard_s + (float("inf") if self._order.lease_s is None else self._order.lease_s)
        return max(0.0, min(now_s + _LOOK_S, lease_until_s, self._workers_until_s, self._launcher_until_s, self._settled_at_s) - now_s)

    def _check_time(self) -> None:
        now_s = time.monotonic()
        if not self._cause and not os.path.exists(self._folder.stream("lock")):
            self._stop("folder-gone", self._order.grace_s)
        if not self._is_committed and now_s >= self._armed_until_s:
            self._stop("never-committed", 0.0)
        lease_s = self._order.lease_s
        if self._is_committed and lease_s is not None and now_s >= self._heard_s + lease_s:
            self._stop("lease-over", self._order.grace_s)
        if not self._cause and now_s >= self._settled_at_s:
            self._stop("worker-failed", self._order.grace_s)
        if now_s >= self._workers_until_s:
            self._workers_until_s = float("inf")
            self._workers_missing()
        if now_s >= self._launcher_until_s:
            self._launcher_until_s = float("inf")
            if self._launcher is not None and self._launcher_status is None:
                os.kill(self._launcher.pid, signal.SIGKILL)  # our own child, not reaped yet: the pid is its

    def _workers_missing(self) -> None:
        """mpirun waits for a daemon, its daemon for mpirun, or we for the order to start one: each would do so for ever."""
        if self._cause or self._order.mpi is None or len(self._heard_of) == self._order.num_workers:
            return
        waited = "for mpirun" if self._launcher is not None else "to be told to start mpirun's daemon"
        self._complain(
            f"waited {self._order.mpi.start_timeout_s:g} s {waited}; {len(self._heard_of)} of {self._order.num_workers} workers started"
        )
        self._stop("start-timeout", self._order.grace_s)

    def _is_over(self) -> bool:
        if self._launcher_status is not None and not self._cause and not self._sweeping:
            reporting = any(worker is not None for worker in self._connections.values())
            if (reporting and time.monotonic() < self._launcher_ended_s + LAST_WORDS_S) or self._settled_at_s < float("inf"):
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
        return is_up and self._launcher is not None and self._launcher_status is None

    def _sweep(self) -> None:
        """All went well: end what the workers left behind."""
        self._sweeping = True
        self._kill_at_s = time.monotonic() + self._order.grace_s
        procs.terminate(self._below_launcher())

    def _succeeded(self) -> bool:
        """The exit records decide, never the launcher's own code."""
        return len(self._ended) == self._order.num_workers and not any(self._ended.values())

    def _end(self) -> None:
        survivors = procs.kill_all(self._on_exit, KILL_TIMEOUT_S)
        while self._drain():
            pass
        outcome = (
            "succeeded" if self._succeeded() else "stopped" if self._cause in ("stop", "ctrl-c", "failure", "lease-over") else "failed"
        )
        detail = _tail(self._folder.stream(wire.LAUNCHER_LOG)) if self._cause in ("launcher-failed", "start-timeout") else ""
        self._event(wire.NodeEnded(time.time(), outcome, "" if outcome == "succeeded" else self._cause, detail, as_survivors(survivors)))

    def _drain(self) -> bool:
        """Take what workers said before they ended. Whether there was anything."""
        ready = [key for key, _ in self._selector.select(0) if key.fileobj in self._connections]
        for key in ready:
            key.data(key.fileobj)
        return bool(ready)


def _tail(path: str, size: int = 4000) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
