"""A session: lives as long as a connection, carries out its orders on the node, and relays to the agent.

It speaks frames on stdin and stdout. The job does not depend on it: when the connection breaks the session ends, and the
agent, which is detached, goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from typing import Optional

from dtrain.node import activation, network, preparation, probe, prune, record, remains, tail, tree, wire
from dtrain.node.folder import BUNDLE, JobFolder, NodeDir, read_plain
from dtrain.node.follow import Follower

_BUSY_POLL_S = 0.02
_IDLE_POLL_S = 0.07  # a look at the logs of eight workers takes 0.06 ms
_IDLE_AFTER_S = 5.0
_AGENT_ENDED = wire.Failed(
    "setup", "dtrain's agent there ended before the setup did", "see whether the setup, or a person or a scheduler there, kills it"
)
_LOOK_S = 1.0  # between two looks at whether the agent is there


def main(argv: list[str]) -> int:
    """Serve orders until the other side hangs up.

    Args:
        argv: nothing; every order comes over stdin.
    """
    orders, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # what a child process prints must not get between the frames
        os.dup2(null, fd)
    os.close(null)
    session = _Session(orders, replies)
    try:
        session.serve()
    except BrokenPipeError:
        return 0  # the connection is gone
    finally:
        session.close()
    return 0


class _Session:
    def __init__(self, orders: int, replies: int) -> None:
        self._orders = orders
        self._replies = replies
        self._about: wire.Open
        self._node_dir: NodeDir
        self._folder: JobFolder
        self._output_dir = ""
        self._left_over: tuple[wire.LeftOver, ...] = ()
        self._environ: Optional[dict[str, str]] = None  # that of `activate`
        self._trees: tree.Trees
        self._incoming: Optional[tree.Incoming] = None
        self._syncing: Optional[int] = None  # a lock: nobody removes what jobs do not use
        self._at_end = contextlib.ExitStack()
        self._held_port: Optional[socket.socket] = None
        self._watch_port: Optional[socket.socket] = None
        self._listener: Optional[network.Listener] = None
        self._agent: Optional[socket.socket] = None
        self._put_failed: Optional[wire.Failed] = None
        self._sending = threading.Lock()
        self._said_s = self._heard_s = time.monotonic()

    def serve(self) -> None:
        threading.Thread(target=self._stay_in_touch, daemon=True).start()
        while True:
            ready, _, _ = select.select([self._orders], [], [], wire.SAY_S)
            if ready:
                received = wire.read_frame(lambda size: os.read(self._orders, size))
                if received is None:
                    return
                self._heard_s = time.monotonic()
                try:
                    self._carry_out(*received)
                except OSError as error:
                    self._reply(self._failed(error))
                except preparation.Refused as refused:
                    self._reply(refused.failed)
                except ValueError as error:
                    self._reply(wire.Failed("setup", str(error)))
            elif time.monotonic() > self._heard_s + wire.HEAR_S:
                return

    def close(self) -> None:
        self._at_end.close()

    def _stay_in_touch(self) -> None:
        """Also while an order takes its time, such as hashing what a job has left, and while nobody takes what is sent."""
        while True:
            time.sleep(max(0.1, min(self._said_s + wire.SAY_S - time.monotonic(), wire.SAY_S)))
            now_s = time.monotonic()
            if now_s > max(self._said_s, self._heard_s) + wire.HEAR_S:
                os._exit(0)  # as behind a cut; the main thread may be in the midst of a sentence
            if now_s >= self._said_s + wire.SAY_S and self._sending.acquire(blocking=False):
                try:
                    self._write(wire.frame(wire.StillHere()))
                except OSError:  # the connection is gone; the main thread ends with its orders
                    return
                finally:
                    self._sending.release()

    def _send_streams(self, follower: Follower) -> None:
        """In a thread of its own: the other side may take nothing for a while, and still has something to say."""
        active_s, look_at_s, alive, said_end = time.monotonic(), 0.0, True, False
        with contextlib.suppress(OSError):  # the connection is gone; the main thread ends with its orders
            while True:
                now_s = time.monotonic()
                if now_s >= look_at_s and not said_end:
                    alive = self._folder.is_alive()
                    look_at_s = now_s + _LOOK_S
                    if not alive:
                        remains.settle_job(self._folder)
                if follower.send_new():
                    active_s = now_s
                    continue
                if not alive and not said_end:
                    said_end = True  # what it wrote before it ended was sent by now
                    self._reply(wire.CaughtUp(alive=False, known=True))
                time.sleep(_BUSY_POLL_S if now_s < active_s + _IDLE_AFTER_S else _IDLE_POLL_S)

    def _carry_out(self, order: wire.Message, payload: bytes) -> None:
        if isinstance(order, wire.Open):
            self._open(order)
        elif isinstance(order, wire.Probe):
            self._probe(order)
        elif isinstance(order, wire.Listen):
            self._listen(order)
        elif isinstance(order, wire.Dial):
            self._reply(wire.Dialed(network.dial(order.token, order.targets)))
        elif isinstance(order, wire.Settle):
            self._settle(order)
        elif isinstance(order, wire.OfferTree):
            self._offered(order.tree)
        elif isinstance(order, wire.PutManifest):
            self._make_room(order.tree, len(payload))
            self._trees.put_manifest(order.tree, payload)
            self._offered(order.tree)
        elif isinstance(order, wire.PutBytes):
            self._put(payload)
        elif isinstance(order, wire.Prepare):
            self._prepare(order, payload)
        elif isinstance(order, wire.Setup):
            self._tell_agent(order)
            threading.Thread(target=self._relay_setup, daemon=True).start()
        elif isinstance(order, (wire.Join, wire.Commit, wire.Stop, wire.Ping, wire.Detach)):
            self._tell_agent(order)
        elif isinstance(order, wire.Follow):
            self._follow(order)
        elif isinstance(order, wire.StillHere):
            return
        elif isinstance(order, wire.ListJobs):
            self._list_jobs()
        elif isinstance(order, wire.GetRecord):
            self._send(wire.RecordBytes(), read_plain(self._node_dir.job(order.job, order.node).record))
        elif isinstance(order, wire.GetTails):
            self._send_tails(order)
        elif isinstance(order, wire.ListOutputs):
            self._send(wire.OutputFiles(), tree.pack(tree.scan(self._output_dir)))
        elif isinstance(order, wire.GetOutputs):
            for path in order.paths:
                self._send_file(os.path.join(self._output_dir, path))
        else:
            raise ValueError(f"a session takes no {type(order).__name__}")

    def _open(self, order: wire.Open) -> None:
        self._about = order
        self._node_dir = NodeDir.at(order.dir)
        self._left_over = remains.settle(self._node_dir)
        self._folder = self._node_dir.job(order.job, order.node)
        self._output_dir = order.outputs or self._node_dir.outputs(order.name, order.node)
        self._trees = self._node_dir.trees()
        self._reply(wire.Done())

    def _probe(self, order: wire.Probe) -> None:
        if order.activate is not None:
            self._environ = activation.activated(order.activate, self._is_hung_up)
        own = {"bundle": BUNDLE, "job_folder": self._folder.path, "output_dir": self._output_dir}
        self._reply(probe.facts(order, self._environ or os.environ, self._node_dir, self._left_over, **own))

    def _is_hung_up(self) -> bool:
        """Whether the other side has gone, with or without orders that are not read yet."""
        orders = select.poll()
        orders.register(self._orders, select.POLLRDHUP)
        return bool(orders.poll(0))

    def _listen(self, order: wire.Listen) -> None:
        try:
            self._held_port = network.reserve_port(order.ports)
        except OSError as error:
            self._reply(preparation.no_port(error, order.ports))
            return
        port: int = self._held_port.getsockname()[1]
        self._listener = network.Listener(order.token, self._about.node, order.addresses, port)
        self._reply(wire.Listening(port, self._listener.failed))

    def _settle(self, order: wire.Settle) -> None:
        if self._held_port is not None and order.hold:
            network.set_free(self._held_port, False)  # before the listener leaves it; the agent sets it free for the launcher
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._held_port is not None and not order.hold:
            self._held_port.close()
            self._held_port = None
        if order.watch is not None:
            try:
                self._watch_port = network.reserve_port(order.watch)
            except OSError as error:
                self._reply(preparation.no_port(error, order.watch, is_second=True))
                return
            network.set_free(self._watch_port, False)
        self._reply(wire.Done())

    def _offered(self, name: str) -> None:
        """Say what is missing of a tree; what is here of it stays until the job has it, or this session ends."""
        self._hold_trees()
        entries = self._trees.manifest(name)
        if entries is not None:  # a job's tree is a copy
            self._make_room(name, sum(entry.size_bytes for entry in (*self._trees.missing(entries), *entries)))
        wanted = [] if entries is None else self._trees.missing(entries)
        if wanted:
            self._incoming = self._trees.receive(wanted)
            self._at_end.callback(self._incoming.close)
        self._reply(wire.WantFiles(entries is None, tuple(entry.digest for entry in wanted)))

    def _hold_trees(self) -> None:
        if self._syncing is None:
            self._syncing = self._node_dir.lock_trees(shared=True)

    def _release_trees(self) -> None:
        if self._syncing is not None:
            os.close(self._syncing)
            self._syncing = None

    def _make_room(self, name: str, size_bytes: int) -> None:
        """Where so much is not free, remove what neither a job nor this tree uses."""
        disk = os.statvfs(self._node_dir.root)
        if disk.f_bavail * disk.f_frsize < size_bytes:
            self._release_trees()
            prune.prune(self._node_dir, name)
            self._hold_trees()

    def _give_up(self) -> None:
        """Remove what came for a job that cannot be: it would be in the way of one that can."""
        self._at_end.close()
        self._release_trees()
        prune.prune(self._node_dir)

    def _put(self, payload: bytes) -> None:
        """Keep the first failure for the end: the other side reads no answer before it has sent all."""
        assert self._incoming is not None
        try:
            self._incoming.take(payload)
        except OSError as error:
            self._put_failed = self._failed(error)
        except ValueError as error:
            self._put_failed = wire.Failed("setup", str(error), "name it in .dtrainignore, or launch again")
        if not self._incoming.left_bytes:
            if self._put_failed is not None and self._put_failed.kind == "no-space":
                self._give_up()
            self._reply(self._put_failed or wire.Done())

    def _prepare(self, order: wire.Prepare, kept: bytes) -> None:
        order = record.replace(order, environ=self._environ)
        if self._watch_port is not None:
            self._watch_port.close()  # the agent's listener takes it
            self._watch_port = None
        try:
            prepared = preparation.prepare(order, kept, self._about, self._trees, self._held_port)
        except OSError:  # of a full disk above all
            self._give_up()
            raise
        if self._held_port is not None:
            self._held_port.close()
            self._held_port = None
        self._agent = self._folder.connect()
        self._agent.sendall(wire.frame(wire.Hold()))
        self._reply(prepared)
        self._release_trees()
        threading.Thread(target=prune.prune, args=(self._node_dir,)).start()  # nobody waits for it; what it does not come to, the next does

    def _tell_agent(self, order: wire.Message) -> None:
        try:
            if self._agent is None:
                self._agent = self._folder.connect()
            self._agent.sendall(wire.frame(order))
            if isinstance(order, (wire.Join, wire.Commit)):
                received = wire.read_frame(self._agent.recv)
                if received is None:
                    raise ConnectionResetError
                self._reply(received[0])
        except (ConnectionError, FileNotFoundError):
            self._agent = None  # the agent has ended; its events say how
            if isinstance(order, (wire.Join, wire.Commit)):
                self._reply(self._folder_gone() or wire.Failed("no-job", "the job's agent is gone"))

    def _relay_setup(self) -> None:
        """In a thread of its own: it may take long, and a Stop or the end of the connection comes first."""
        agent, follower, ended = self._agent, Follower(self._folder, {}, self._send, logs=True), None
        with contextlib.suppress(OSError):  # the connection is gone; the main thread ends with its orders
            if agent is not None:
                while not select.select([agent], [], [], _IDLE_POLL_S)[0]:
                    follower.send_some(wire.SETUP_LOG)
                with contextlib.suppress(ConnectionError):
                    ended = wire.read_frame(agent.recv)
            while follower.send_some(wire.SETUP_LOG):
                pass
            self._reply(ended[0] if ended is not None else self._folder_gone() or _AGENT_ENDED)

    def _folder_gone(self) -> Optional[wire.Failed]:
        """What to say where somebody, such as the job's setup, has removed what the agent needs."""
        if os.path.isdir(self._folder.path):
            return None
        return wire.Failed("setup", f"the job's folder was deleted there: {self._folder.path}", "see whether the job's setup removes it")

    def _follow(self, order: wire.Follow) -> None:
        known = os.path.isdir(self._folder.path)
        alive = known and self._folder.is_alive()  # before reading: what an ended job wrote is complete
        follower = Follower(self._folder, order.offsets, self._send, logs=order.logs)
        if not order.once:
            threading.Thread(target=self._send_streams, args=(follower,), daemon=True).start()
            return
        if known:
            follower.send_all()
        self._reply(wire.CaughtUp(alive, known))

    def _list_jobs(self) -> None:
        """Without those of which nobody could say more, as of an older dtrain."""
        for folder in self._node_dir.all_folders():
            if os.path.exists(folder.record):
                alive, fault, events = False, "", b""
                try:
                    alive = folder.is_alive()  # before reading: what an ended job wrote is complete
                    events = read_plain(folder.stream(wire.EVENTS))
                except FileNotFoundError:
                    continue
                except OSError as error:  # of one job says nothing of the others
                    fault = f"{error.strerror}: {error.filename}"
                self._send(wire.JobHere(folder.job, folder.node, alive, fault), events)
        self._reply(wire.Done())

    def _send_tails(self, order: wire.GetTails) -> None:
        text = None if order.text is None else order.text.encode("utf-8", "surrogateescape")
        for name in order.streams:
            with contextlib.suppress(FileNotFoundError):
                lines, _ = tail.last_lines(self._folder.stream(name), order.num_lines, text)
                for start in range(0, max(1, len(lines)), wire.CHUNK_BYTES):
                    self._send(wire.TailBytes(name), lines[start : start + wire.CHUNK_BYTES])
        self._reply(wire.Done())

    def _send_file(self, path: str) -> None:
        try:
            left = os.stat(path).st_size
            for part in tree.read_parts(path, left):
                left -= len(part)
                self._send(wire.FileBytes(last=False), part)
            self._send(wire.FileBytes(last=True), b"")
        except FileNotFoundError:  # a job that runs removes its old checkpoints
            self._send(wire.FileBytes(last=True, gone=True), b"")

    def _reply(self, message: wire.Message) -> None:
        self._send(message, b"")

    def _send(self, message: wire.Message, payload: bytes) -> None:
        with self._sending:
            self._write(wire.frame(message, payload))

    def _write(self, frame: bytes) -> None:
        data = memoryview(frame)
        while data:
            data = data[os.write(self._replies, data) :]
            self._said_s = time.monotonic()

    def _failed(self, error: OSError) -> wire.Failed:
        if isinstance(error, BrokenPipeError):
            raise error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or self._node_dir.root
            return wire.Failed("no-space", f"{error.strerror}: {where}", "make room there, or choose another dir: in the cluster file")
        text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        return wire.Failed("setup", text, "choose another dir: in the cluster file" if error.errno in (errno.EROFS, errno.EACCES) else None)
