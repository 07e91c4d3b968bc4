"""Where dtrain's files lie on a node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import struct
import time

from dtrain.node import disk, wire
from dtrain.node.record import dataclass
from dtrain.node.tree import Trees

SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # of a job or a node: one component of a path, on every file system
BUNDLE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # of dtrain's own code
FOLDER_VARIABLE = "DTRAIN_JOB_FOLDER"  # in the environment of every process of a job: its folder on the node
_UNSETTLED = "unsettled"
_TREES_TIMEOUT_S = 60.0
_MOST_BYTES = 64 * 1024 * 1024  # of a record, or of the events of a job
_EVENTS_BYTES = 64 * 1024  # some tracebacks long
_UCRED = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class NodeDir:
    """The one folder that holds all of dtrain on a node: 0700, node-local."""

    root: str

    @classmethod
    def at(cls, configured: str) -> NodeDir:
        """Resolve `dir:` of the cluster file ("auto": a folder of this user under /var/tmp) and make it.

        Raises:
            PermissionError: the folder belongs to somebody else or is a symlink.
        """
        root = root_of(configured)
        os.makedirs(root, mode=0o700, exist_ok=True)
        status = os.lstat(root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(errno.EACCES, f"{os.strerror(errno.EACCES)}, for it is a symlink or another user's", root)
        os.chmod(root, 0o700)
        return cls(root)

    @property
    def blobs(self) -> str:
        """Contents of synced files, each named by its digest."""
        return os.path.join(self.root, "blobs")

    def trees(self) -> Trees:
        return Trees(self.blobs, os.path.join(self.root, "manifests"))

    def lock_trees(self, *, shared: bool, timeout_s: float = _TREES_TIMEOUT_S) -> int:
        """Shared by those who bring trees or lay them out, against one who removes what no job uses.

        Raises:
            BlockingIOError: it is taken.
        """
        return lock(os.path.join(self.root, "trees.lock"), timeout_s, shared=shared)

    @property
    def jobs(self) -> str:
        return os.path.join(self.root, "jobs")

    @property
    def removed(self) -> str:
        """What is about to be deleted."""
        return os.path.join(self.root, "removed")

    def outputs(self, job_name: str, node: str) -> str:
        """What jobs of that name keep on the node; never removed by dtrain."""
        return os.path.join(self.root, "outputs", job_name, node)

    def gpu_lock(self, index: int) -> str:
        """Locked as long as a job has that GPU; names the job."""
        return os.path.join(self.root, "gpus", f"{index}.lock")

    def job(self, job: str, node: str) -> JobFolder:
        return JobFolder(os.path.join(self.jobs, job, node))

    def unsettled(self) -> list[JobFolder]:
        """Jobs that began here, and whose last event nobody has written yet."""
        try:
            names = os.listdir(os.path.join(self.root, _UNSETTLED))
        except FileNotFoundError:
            return []
        return [self.job(*name.split(".", 1)) for name in sorted(names) if "." in name]

    def folders(self, job: str) -> list[JobFolder]:
        """Of a job, one for each node that this machine is."""
        return [self.job(job, node) for node in names_in(os.path.join(self.jobs, job))]

    def all_folders(self) -> list[JobFolder]:
        return [folder for job in names_in(self.jobs) for folder in self.folders(job)]

    def running(self) -> tuple[str, ...]:
        """Ids of the jobs that run here."""
        return tuple(dict.fromkeys(folder.job for folder in self.unsettled() if folder.is_alive()))


@dataclass(frozen=True)
class JobFolder:
    """One job on one node. Its streams are files that only grow."""

    path: str

    @property
    def job(self) -> str:
        """Its id."""
        return os.path.basename(os.path.dirname(self.path))

    @property
    def tree(self) -> str:
        """The job's own copy of the working directory."""
        return os.path.join(self.path, "tree")

    def use_tree(self, name: str) -> None:
        """Note which tree the job has: as long as the job's folder is there, so are the contents of that tree's files."""
        with open(self._tree_name, "w") as file:
            file.write(name)

    def used_tree(self) -> str:
        """ "" where that is none."""
        try:
            with open(self._tree_name) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    @property
    def _tree_name(self) -> str:
        return os.path.join(self.path, "tree-name")

    @property
    def node(self) -> str:
        """By which name the job knows this node."""
        return os.path.basename(self.path)

    @property
    def record(self) -> str:
        """What the launching side keeps of the job."""
        return os.path.join(self.path, "record")

    def stream(self, name: str) -> str:
        return os.path.join(self.path, name)

    def stream_names(self) -> list[str]:
        """Names of the streams there are now; events come first."""
        names = [name for name in (wire.EVENTS, wire.METRICS) if os.path.exists(self.stream(name))]
        try:
            logs = sorted(os.listdir(os.path.join(self.path, "logs")))
        except FileNotFoundError:
            logs = []
        return names + [f"logs/{log}" for log in logs if wire.LOG.fullmatch(log)]

    def unsettle(self) -> None:
        """Mark the job as begun, so that the next session finds it if everything of it is killed."""
        os.makedirs(os.path.dirname(self._mark), mode=0o700, exist_ok=True)
        os.close(os.open(self._mark, os.O_WRONLY | os.O_CREAT, 0o600))

    def settled(self) -> None:
        """The job is over on this node and has said so."""
        with contextlib.suppress(OSError):
            os.unlink(self._mark)

    @property
    def setup_lock(self) -> str:
        """Locked while a job of this machine is being set up."""
        return os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(self.path))), "setup.lock")

    @property
    def is_unsettled(self) -> bool:
        return os.path.exists(self._mark)

    @property
    def _mark(self) -> str:
        above, node = os.path.split(self.path)
        jobs, job = os.path.split(above)
        return os.path.join(os.path.dirname(jobs), _UNSETTLED, f"{job}.{node}")

    def make(self) -> None:
        os.makedirs(os.path.join(self.path, "logs"), mode=0o700, exist_ok=True)

    def lock(self, timeout_s: float = 0.0) -> int:
        """Take the job on this node.

        Raises:
            BlockingIOError: the job is running already.
        """
        return lock(os.path.join(self.path, "lock"), timeout_s)

    def is_alive(self) -> bool:
        """Whether the agent or the guard of the job is there."""
        if not os.path.exists(os.path.join(self.path, "lock")):
            return False
        try:
            os.close(self.lock())
        except BlockingIOError:
            return True
        return False

    def append_event(self, event: wire.Message) -> None:
        """Add a line; one write, so a reader sees whole lines or the start of one.

        Raises:
            OSError: the disk took none of it, or not all: what it took is a line of its own, which says nothing.
        """
        fd = os.open(self.stream(wire.EVENTS), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            line = (b"\n" if is_torn else b"") + wire.to_json(event).encode() + b"\n"
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def reserve(self) -> None:
        """Keep room for what has to be said at the job's end, however full its disk is by then.

        Raises:
            OSError: the disk has none.
        """
        fd = os.open(self.stream(wire.EVENTS), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            disk.reserve(fd, _EVENTS_BYTES)
        finally:
            os.close(fd)

    def listen(self) -> socket.socket:
        """The socket on which the agent takes orders."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _ShortPath(self.path) as folder:
            listener.bind(f"{folder}/sock")
        listener.listen(256)
        return listener

    def connect(self) -> socket.socket:
        """A connection to the agent.

        Raises:
            OSError: no agent is there.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _ShortPath(self.path) as folder:
            connection.connect(f"{folder}/sock")
        return connection


def read_plain(path: str) -> bytes:
    """What a record holds, or a job's events.

    Raises:
        OSError: it is not there, too large to be one, or something else, such as a pipe that nobody ever writes into.
    """
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a file", path)
        if status.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return file.read(_MOST_BYTES)


def names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def root_of(configured: str) -> str:
    """The folder that `dir:` of the cluster file means on this machine."""
    return f"/var/tmp/dtrain-{os.getuid()}" if configured == "auto" else configured


def lock(path: str, timeout_s: float = 0.0, *, shared: bool = False) -> int:
    """Lock a file; the lock lives as long as a process that holds the descriptor, or a copy that it inherited.

    Args:
        timeout_s: how long to try; a session that only looks whether the lock is free holds it for an instant.

    Raises:
        BlockingIOError: somebody else has it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                raise
            time.sleep(0.01)


class _ShortPath:
    """A name for a folder that fits the 108 bytes of a unix socket address, however deep the folder lies."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> str:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._fd}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def peer_uid(connection: socket.socket) -> int:
    """User on the other end of a unix socket, as the kernel says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])
