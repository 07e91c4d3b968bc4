"""The guard: parent of the agent, there for the one case in which the agent cannot clean up: it was killed, or stands still."""

from __future__ import annotations

import os
import select
import signal
import socket
import time

from dtrain.node import agent, gpus, procs, wire
from dtrain.node.folder import JobFolder

KILL_TIMEOUT_S = 20.0
_TICK_S = 1.0
_MOST_SILENT_TICKS = 20  # that the guard itself was awake: where a whole node stands still, nobody is to blame
_OF_A_LOGIN = ("SSH_CLIENT", "SSH2_CLIENT")  # where it has them, bash reads a person's ~/.bashrc for `bash -c` too


def main(argv: list[str]) -> int:
    """Run a job on this node: Prepare comes as a frame on stdin; one line on stdout is 0 once the agent listens, or the disk's errno.

    Args:
        argv: the job folder, the descriptor of the socket on which the agent is to hear other nodes' agents, or -1, that of the
            socket that keeps the rendezvous' port, or -1, and those of the GPUs' locks. The session has locked the folder too:
            guard and agent inherit all of it, so that the kernel lets go of it when both are gone.
    """
    folder = JobFolder(argv[0])
    watch_fd, port_fd, *gpu_locks = map(int, argv[1:])
    received = wire.read_frame(lambda size: os.read(0, size))
    if received is None:
        return 1  # the session ended before it said what to do
    order = received[0]
    assert isinstance(order, wire.Prepare)
    if order.environ is not None:  # for what we start; that we were not started in it keeps its libraries out of this Python
        os.environ.clear()
        os.environ.update(order.environ)
    for name in _OF_A_LOGIN:
        os.environ.pop(name, None)
    watch_listener = None if watch_fd < 0 else socket.socket(fileno=watch_fd)
    held_port = None if port_fd < 0 else socket.socket(fileno=port_fd)
    try:
        listener = folder.listen()
        folder.unsettle()
        folder.reserve()
    except OSError as error:
        folder.settled()
        os.write(1, f"{error.errno}\n".encode())
        return 1
    inherited = agent.Inherited(listener, watch_listener, held_port, tuple(gpu_locks))
    procs.become_subreaper()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # a job ends by its orders; SIG_IGN would be inherited by the user's process

    guard_alive, held_by_guard = os.pipe()
    beats, held_by_agent = os.pipe()
    agent_pid = os.fork()
    if agent_pid == 0:
        os.close(held_by_guard)
        os.close(beats)
        os._exit(agent.main(folder, order, inherited, agent.Guard(guard_alive, held_by_agent)))
    os.close(guard_alive)
    os.close(held_by_agent)
    inherited.listener.close()
    if watch_listener is not None:
        watch_listener.close()
    _leave_session()
    status = _wait_for(agent_pid, beats)
    survivors = procs.kill_all(lambda pid, status: None, KILL_TIMEOUT_S)
    gpus.release(inherited.gpu_locks)
    if status != 0:
        _record_death(folder, status, survivors)
        folder.settled()
    return 0


def _leave_session() -> None:
    """Let go of the pipes to the session that started us; it may end at any time."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)


def _wait_for(agent_pid: int, beats: int) -> int:
    """The agent's wait status. One that is silent for too long gets a KILL: it was stopped, or waits for a disk that does not answer."""
    num_silent = 0
    while num_silent < _MOST_SILENT_TICKS:
        ready, _, _ = select.select([beats], [], [], _TICK_S)
        if not ready:
            num_silent += 1
        elif os.read(beats, 4096):
            num_silent = 0
        else:  # it has ended
            return os.waitpid(agent_pid, 0)[1]
    os.kill(agent_pid, signal.SIGKILL)
    return int(signal.SIGKILL)  # not waited for: where it does not end, the others must


def _record_death(folder: JobFolder, status: int, survivors: list[procs.Process]) -> None:
    code = procs.exit_code(status)
    folder.append_event(
        wire.NodeEnded(
            at=time.time(),
            outcome="failed",
            reason="agent-killed",
            detail=f"dtrain's agent on this node ended with code {code}",
            survivors=procs.as_survivors(survivors),
        )
    )
