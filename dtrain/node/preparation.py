"""PREPARE: takes what a job needs on this node and starts its guard, which starts the agent. Nothing of the user's runs yet."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import tempfile
from typing import Optional

from dtrain.node import gpus, logout, tree, tripwire, wire
from dtrain.node.folder import BUNDLE, JobFolder, NodeDir

_START_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S = 2.0


class Refused(Exception):
    """This node cannot have the job."""

    def __init__(self, failed: wire.Failed) -> None:
        super().__init__(failed)
        self.failed = failed


def prepare(order: wire.Prepare, record: bytes, about: wire.Open, trees: tree.Trees, held_port: Optional[socket.socket]) -> wire.Prepared:
    """Start guard and agent of a job.

    Args:
        record: what the launching side keeps of the job.
        held_port: a port of the rendezvous; guard and agent keep it as long as they live.

    Raises:
        Refused: and nothing of the job is left.
        OSError: of the disk.
    """
    node_dir = NodeDir.at(about.dir)
    folder = node_dir.job(about.job, about.node)
    with contextlib.ExitStack() as held:  # guard and agent inherit all of it, and what is left here is let go of
        try:
            gpu_locks = gpus.reserve(node_dir, order.gpus, about)
            for lock in gpu_locks:
                held.callback(os.close, lock)
            folder.make()
            job_lock = folder.lock(_LOCK_TIMEOUT_S)
            held.callback(os.close, job_lock)
        except gpus.Taken as taken:
            raise Refused(_taken(taken, about)) from None
        except BlockingIOError:
            raise Refused(_runs_already(about)) from None
        try:
            _lay_out(order, folder, trees, _output_folder(about, node_dir))
            with open(folder.record, "wb") as file:
                file.write(record)
            watch_port, watch_fd = 0, -1
            port_fd = -1 if held_port is None else held_port.fileno()
            if order.watch is not None and order.watch.node == order.watch.first:
                watch_listener = held.enter_context(_watch_listener(order.watch))
                watch_port, watch_fd = watch_listener.getsockname()[1], watch_listener.fileno()
        except BaseException:
            _remove(folder)
            raise
        kept = [job_lock, *gpu_locks, *(fd for fd in (watch_fd, port_fd) if fd >= 0)]
        try:
            pid = _start_guard(order, folder, [str(watch_fd), str(port_fd), *map(str, gpu_locks)], kept)
        except (OSError, Refused):
            _remove(folder)
            raise
    return wire.Prepared(pid, watch_port)


def no_port(error: OSError, ports: wire.Ports, *, is_second: bool = False) -> wire.Failed:
    """What to say where no port is free.

    Args:
        is_second: the one for the agents' watch, beside that of the rendezvous.

    Raises:
        OSError: the error, if it is another one.
    """
    if error.errno != errno.EADDRINUSE or not ports.last:
        raise error
    problem = f"no port of {ports.first}-{ports.last} is free"
    if is_second:
        problem = (
            f"only one port of {ports.first}-{ports.last} is free, and the first of several nodes takes two:"
            " one for the rendezvous, one on which the agents watch each other"
        )
    return wire.Failed("setup", problem, "widen ports: in the cluster file, or end what has them", "no-port")


def _lay_out(order: wire.Prepare, folder: JobFolder, trees: tree.Trees, output_dir: str) -> None:
    if order.tree is not None:
        entries = trees.manifest(order.tree)
        assert entries is not None
        folder.use_tree(order.tree)
        trees.make_tree(entries, folder.tree)
        if not os.path.isabs(order.outputs):
            tree.link_outputs(folder.tree, order.outputs, output_dir)


def _output_folder(about: wire.Open, node_dir: NodeDir) -> str:
    """Where the job's outputs persist, made and tried where the user has named it."""
    if not about.outputs:
        folder = node_dir.outputs(about.name, about.node)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder
    try:
        os.makedirs(about.outputs, exist_ok=True)  # as open to others as the user makes folders
        tempfile.TemporaryFile(dir=about.outputs).close()
    except OSError as error:
        kind = "no-space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "setup"
        problem = f"the folder {about.outputs} for outputs cannot be made or written: {error.strerror}"
        raise Refused(wire.Failed(kind, problem, "make it there, or name another one with outputs:")) from error
    return about.outputs


def _watch_listener(watch: wire.Watch) -> socket.socket:
    try:
        return tripwire.listening_socket(watch.address, watch.ports)
    except OSError as error:
        raise Refused(no_port(error, watch.ports, is_second=True)) from error


def _remove(folder: JobFolder) -> None:
    """Make room on a full disk above all."""
    tree.remove(folder.path)
    with contextlib.suppress(OSError):  # another node of the job is this machine too
        os.rmdir(os.path.dirname(folder.path))


def _start_guard(order: wire.Prepare, folder: JobFolder, descriptors: list[str], kept: list[int]) -> int:
    """Process id of the guard, once its agent listens.

    Raises:
        OSError: the disk has no room for what they write first.
    """
    argv, environ = logout.staying([sys.executable, "-I", "-S", BUNDLE, "guard", folder.path, *descriptors], f"dtrain job {folder.job}")
    with open(folder.stream("logs/agent.log"), "ab") as log:
        guard = subprocess.Popen(
            argv,
            cwd="/",
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=kept,
            start_new_session=True,  # out of the connection's session: its end does not reach the job
        )
    assert guard.stdin is not None and guard.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and its log says why
        guard.stdin.write(wire.frame(order))
    with contextlib.suppress(BrokenPipeError):
        guard.stdin.close()
    ready, _, _ = select.select([guard.stdout], [], [], _START_TIMEOUT_S)
    said = guard.stdout.readline() if ready else b""
    if not said:
        guard.kill()
        guard.wait()
        with open(folder.stream("logs/agent.log")) as file:
            last = file.read().rstrip().rpartition("\n")[2]
        raise Refused(wire.Failed("setup", f"the agent did not start: {last or f'it said nothing for {_START_TIMEOUT_S:g} s'}"))
    guard.returncode = 0  # it outlives this process; nobody here waits for it
    if int(said):
        raise OSError(int(said), os.strerror(int(said)), folder.path)
    return guard.pid


def _taken(error: gpus.Taken, about: wire.Open) -> wire.Failed:
    by = error.by
    if by == about:
        return _runs_already(about)
    if by is not None and by.job == about.job:
        return wire.Failed(
            "setup", f"GPU {error.index} is {by.node}'s already: both are one machine", "name each machine once in instances"
        )
    job = "another job" if by is None else f"job {by.name} {by.job}"
    return wire.Failed("busy", f"GPU {error.index} was just taken by {job}", "dtrain launch --wait waits until it is free")


def _runs_already(about: wire.Open) -> wire.Failed:
    return wire.Failed("setup", f"job {about.job} runs there already", f"dtrain status {about.job} shows it")
