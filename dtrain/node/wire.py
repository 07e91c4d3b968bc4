"""The protocol between the launching side and the nodes, defined once: imported there, shipped here.

A frame is a mark, two lengths and a checksum (4 bytes each, big-endian), a message as JSON, and a payload of raw bytes. What
stands between two frames is passed over: a login shell may have left something behind that prints. Everything that a job
writes on a node is an append-only file in its job folder, called a stream; a session sends streams by name and byte offset,
so following again from an offset has no gap and no repeat. Events are the lines of the stream `events`.
"""

from __future__ import annotations

import binascii
import functools
import json
import math
import re
import struct
import typing
from typing import Any, Callable, ClassVar, Literal, Optional, Union

from dtrain.node.record import dataclass

MAGIC = b"\0DTRAIN1\0\n"  # what a node says first; whatever its shell printed before that is noise
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
LAUNCHER_LOG = "logs/launcher.log"
SETUP_LOG = "logs/setup.log"
SAY_S = 10.0  # each end of a connection says that it is there at least so often
HEAR_S = 30  # and takes it for cut when it has heard nothing for so long
CHUNK_BYTES = 256 * 1024  # largest payload of one frame
LOG = re.compile(r"[a-z0-9]+\.log")  # in logs/

_MARK = b"\0dt\x01"
_HEAD = struct.Struct("!III")  # length of the message, length of the payload, CRC-32 of both
_NOISE_BYTES = 64 * 1024  # between two frames


def rank_log(rank: int) -> str:
    """Name of the stream that holds what a worker printed."""
    return f"logs/rank{rank}.log"


class Message:
    """Base of everything that is sent; the JSON carries the class name under `type`."""

    types: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.types[cls.__name__] = cls


# ---- orders: launching side -> session --------------------------------------------------------------------------


@dataclass(frozen=True)
class Open(Message):
    """First order of every session: which job on which node it is about."""

    dir: str  # "auto" or an absolute path
    job: str
    name: str  # job name: outputs persist under it
    node: str
    outputs: str = ""  # an absolute path where they lie instead


@dataclass(frozen=True)
class Probe(Message):
    """Asks for NodeFacts."""

    python: str  # a path or a name on PATH
    mpi: bool  # ask for mpirun too
    activate: Optional[str] = None  # for bash; the job runs in the environment that this leaves behind
    workdir: Optional[str] = None  # an absolute path that has to be there already
    script: Optional[str] = None  # has to be there already, in workdir or by an absolute path


@dataclass(frozen=True)
class Ports(Message):
    """Which ports may be used, both ends included; 0 and 0: one that the kernel chooses."""

    first: int
    last: int


@dataclass(frozen=True)
class Listen(Message):
    """Keep a free port, and answer on it to whoever knows the token: Listening."""

    token: str  # of this start; never stored
    addresses: tuple[str, ...]
    ports: Ports


@dataclass(frozen=True)
class DialTarget(Message):
    """Where another node is to be reached."""

    node: str  # that has to answer there
    address: str
    port: int


@dataclass(frozen=True)
class Dial(Message):
    """Reach other nodes that listen: Dialed."""

    token: str
    targets: tuple[DialTarget, ...]


@dataclass(frozen=True)
class Settle(Message):
    """The proof is over: listen no more."""

    hold: bool  # keep the port until the job has it; else it is free again
    watch: Optional[Ports] = None  # keep one of these too, for the agents' watch (Watch.ports)


@dataclass(frozen=True)
class OfferTree(Message):
    """The whole working directory by content: WantFiles."""

    tree: str  # hash of its list of files (tree.py)


@dataclass(frozen=True)
class PutManifest(Message):
    """The list of files of a tree as payload: WantFiles."""

    tree: str


@dataclass(frozen=True)
class PutBytes(Message):
    """The next bytes of the contents that are wanted, one after the other, as payload. Only the last is answered: Done."""


@dataclass(frozen=True)
class MpiNode(Message):
    """A node's place under mpirun, which runs on the first node and wants a daemon on each of the others."""

    daemon: str  # path on this node
    node_rank: int
    num_nodes: int
    first_address: str  # where mpirun is to be reached
    start_timeout_s: float  # from Commit to the last worker's first word
    hosts: dict[str, str]  # on the first node: the nodes by the names under which mpirun knows them


@dataclass(frozen=True)
class Watch(Message):
    """How the agents of a job watch each other (tripwire.py): all are connected to the first node's."""

    token: str  # of this job; kept in memory alone
    node: str  # that this goes to
    first: str
    address: str  # of the first node
    ports: Ports  # one of these is the first node's for it
    nodes: tuple[str, ...]  # all, on the first node


@dataclass(frozen=True)
class Prepare(Message):
    """Everything that a node needs to run its part of a job; answered with Prepared. Nothing runs before Setup and Commit.

    The payload is what the launching side keeps of the job, for other machines to find it by; GetRecord brings it back.
    """

    launcher_argv: tuple[str, ...]  # empty: the launcher is a daemon of mpirun, which StartDaemon brings
    launcher_env: dict[str, str]
    worker_argv: tuple[str, ...]
    worker_env: dict[str, str]
    secrets: dict[str, str]  # kept in memory alone
    num_workers: int
    gpus: tuple[int, ...]  # indices, reserved for the job until it has ended; empty on CPUs
    tree: Optional[str]  # hash of the tree that was offered
    workdir: Optional[str]  # an absolute path that is there already, instead of the tree
    outputs: str  # folder in the tree that persists per job name; an absolute path: Open has it
    grace_s: float  # from TERM to KILL
    lease_s: Optional[float]  # the job stops when its launcher is silent for longer; None: never
    mpi: Optional[MpiNode]  # None under other launchers
    watch: Optional[Watch]  # None where the job has one node
    setup: Optional[str] = None  # lines for bash, which Setup runs
    python: str = ""  # absolute path, whose folder comes first on their PATH
    environ: Optional[dict[str, str]] = None  # that of `activate`, which only the node knows; None: the session's own


@dataclass(frozen=True)
class Hold(Message):
    """The session that prepared the job says so to its agent: until Commit, the agent ends with that session."""


@dataclass(frozen=True)
class Setup(Message):
    """Run the job's setup; what it prints comes meanwhile, as StreamBytes, and at its end SetupEnded."""


@dataclass(frozen=True)
class Join(Message):
    """Connect to the first node's agent: Done."""

    port: int


@dataclass(frozen=True)
class Commit(Message):
    """Start what was prepared."""


@dataclass(frozen=True)
class Ping(Message):
    """The launcher is there: renews the lease."""


@dataclass(frozen=True)
class Detach(Message):
    """The job goes on without a launcher: it has no lease any more. The agents pass it on, and each has an event of it."""


@dataclass(frozen=True)
class StillHere(Message):
    """Somebody is at this end of a connection that has nothing to say; sent both ways. Renews no lease."""


@dataclass(frozen=True)
class Stop(Message):
    """End the node's part of the job: TERM, grace_s, KILL."""

    cause: str  # ctrl-c | stop | failure; between agents also lease-over
    grace_s: float


@dataclass(frozen=True)
class Follow(Message):
    """Send the job's streams from these offsets on; a stream that is not named starts at 0."""

    offsets: dict[str, int]
    once: bool  # stop at the present end and say CaughtUp
    logs: bool = True  # False: no logs before those of a node that has ended


@dataclass(frozen=True)
class ListJobs(Message):
    """Asks for the jobs that the node knows: for each a JobHere, then Done."""


@dataclass(frozen=True)
class GetRecord(Message):
    """Asks for what the launching side keeps of one of them: RecordBytes."""

    job: str
    node: str


@dataclass(frozen=True)
class GetTails(Message):
    """Asks for the ends of some of the job's logs: TailBytes for each that is there, in parts, then Done."""

    streams: tuple[str, ...]
    num_lines: int
    text: Optional[str]  # of those lines that hold it; bytes that are no UTF-8 as surrogates


@dataclass(frozen=True)
class ListOutputs(Message):
    """Asks for the files that the job name keeps on the node: OutputFiles."""


@dataclass(frozen=True)
class GetOutputs(Message):
    """Asks for the contents of some of them: for each in turn FileBytes with the payload, in parts."""

    paths: tuple[str, ...]


# ---- replies: session -> launching side -------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuHolder(Message):
    """A process that computes on a GPU."""

    pid: int  # 0 where it is not told
    user: str  # "" where the node does not see the process, as from within a container
    memory_bytes: Optional[int]  # None where it is not told
    command: str


@dataclass(frozen=True)
class Gpu(Message):
    index: int
    name: str
    memory_bytes: Optional[int]  # None where it is not told
    memory_used_bytes: Optional[int]  # by a desktop too, which holds nothing
    job: str = ""  # name and id of the dtrain job that has reserved it
    holders: tuple[GpuHolder, ...] = ()


@dataclass(frozen=True)
class Address(Message):
    """An IP address of a node."""

    interface: str  # that holds it; "" where the node cannot tell
    address: str
    prefix_length: int
    speed_mbit: int  # of the link; 0: unknown


@dataclass(frozen=True)
class Interface(Message):
    name: str
    state: str  # as the kernel says: up, down, unknown, ...
    mtu: int
    speed_mbit: int  # 0: unknown


@dataclass(frozen=True)
class Limits(Message):
    """Of what this user starts; None: no limit."""

    memlock_bytes: Optional[int]
    nofile: Optional[int]
    nproc: Optional[int]


@dataclass(frozen=True)
class LeftOver(Message):
    """What a job whose agent and guard were both killed had left running, and a session has ended."""

    job: str
    num_processes: int
    survivors: tuple[int, ...] = ()  # pids that are still there


@dataclass(frozen=True)
class Machine(Message):
    """What a node says of the machine that it is."""

    system: str
    kernel: str
    memory_bytes: int
    container: str  # docker, podman, ...; "" for none that shows itself
    name_means: tuple[str, ...]  # addresses that its own name has there; none where nobody answers
    interfaces: tuple[Interface, ...]  # in the kernel's order
    has_infiniband: bool
    limits: Limits
    shm_bytes: int  # size of /dev/shm
    free_bytes: int  # where dtrain's folder lies
    gpu_driver: str  # version; "" without one
    clock_s: float  # when it was asked
    time_zone: str  # +0100
    ends_at_logout: Optional[bool]  # what runs on once its user has left; None where nobody says
    jobs: tuple[str, ...]  # of dtrain, that run there
    left_over: tuple[LeftOver, ...] = ()  # found by this session


@dataclass(frozen=True)
class NodeFacts(Message):
    """What a node says of itself."""

    host_name: str
    cores: int  # that this user may run on
    gpus: tuple[Gpu, ...]
    gpu_fault: str  # why not all of them, or none, are told; "" where nothing is wrong with that
    python: str  # absolute path of the workers' interpreter
    python_version: str
    torch_version: str  # "" when torch is not installed there
    cuda_version: str  # that torch was built for; "" for none
    nccl_version: str  # of the package that torch brings; "" for none
    addresses: tuple[Address, ...]  # of interfaces that are up
    bundle: str  # folder of dtrain's own code there
    node_dir: str  # that holds all of dtrain there
    job_folder: str
    output_dir: str  # what persists per job name
    mpirun: str  # path, "" where there is none or nobody asked; so are the next two
    mpi_daemon: str
    mpi_version: str  # first line of what mpirun says of itself
    missing: str  # what of the job's files is not there and should be, in words; "" for nothing
    machine: Machine


@dataclass(frozen=True)
class Listening(Message):
    port: int  # the same on every address
    failed: dict[str, str]  # addresses that cannot be listened on, and why


@dataclass(frozen=True)
class Dialed(Message):
    causes: tuple[str, ...]  # one for each target, "" where the right node answered


@dataclass(frozen=True)
class WantFiles(Message):
    manifest: bool  # nothing is known of the tree: its list of files is wanted first
    digests: tuple[str, ...]  # contents that are not there, in the order in which they are wanted


@dataclass(frozen=True)
class Prepared(Message):
    agent_pid: int
    watch_port: int  # on which the first node's agent hears the others; 0 elsewhere


@dataclass(frozen=True)
class SetupEnded(Message):
    exit_code: int  # 128+n for signal n
    last_words: str  # of its log


@dataclass(frozen=True)
class Done(Message):
    """The order was carried out and there is nothing to tell."""


@dataclass(frozen=True)
class Failed(Message):
    """The order was not carried out."""

    kind: str  # no-space | setup | busy | no-job
    text: str
    hint: Optional[str] = None
    finding: Optional[str] = None  # what `check` calls it; None: as all of its kind


@dataclass(frozen=True)
class StreamBytes(Message):
    """Bytes of a stream, as payload."""

    stream: str
    offset: int


@dataclass(frozen=True)
class TailBytes(Message):
    """Of the end of a log, as payload."""

    stream: str


@dataclass(frozen=True)
class CaughtUp(Message):
    """Everything that the streams held was sent."""

    alive: bool  # the job's agent or guard is there
    known: bool  # the node has a folder of this job


@dataclass(frozen=True)
class JobHere(Message):
    """A job of which the node has a folder, with the events that are in it as payload."""

    job: str
    node: str  # by which name the job knows this node
    alive: bool  # its agent or guard is there
    fault: str = ""  # why its events cannot be read


@dataclass(frozen=True)
class RecordBytes(Message):
    """With what came with Prepare as payload."""


@dataclass(frozen=True)
class OutputFiles(Message):
    """With the list of files (tree.py) as payload."""


@dataclass(frozen=True)
class FileBytes(Message):
    last: bool  # of this file
    gone: bool = False  # it is there no more


# ---- worker.py <-> agent, over the unix socket in the job folder --------------------------------------------------


@dataclass(frozen=True)
class WorkerHello(Message):
    """A worker.py is there and asks for its WorkerOrder."""

    rank: int
    local_rank: int


@dataclass(frozen=True)
class WorkerOrder(Message):
    argv: tuple[str, ...]
    env: dict[str, str]  # on top of what the launcher set
    cwd: str
    oom_score: int  # oom_score_adj: the kernel shall take a worker before the agent


# ---- mpirun -> agent of the first node ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DaemonWanted(Message):
    """mpirun wants its daemon on another node: Done."""

    host: str  # as mpirun knows the node
    argv: tuple[str, ...]


# ---- agent <-> agent, over the tripwire ---------------------------------------------------------------------------
# `at` is the sender's own clock. Stop and Detach go both ways too.


@dataclass(frozen=True)
class Hello(Message):
    """First word of a node to the first one: Welcome."""

    node: str
    at: float


@dataclass(frozen=True)
class Welcome(Message):
    at: float


@dataclass(frozen=True)
class Beat(Message):
    """This node is there. The first node answers each with its own."""

    at: float
    of: float  # `at` of the Beat that this one answers; 0 in others
    launcher_silent_s: float  # since anyone known to this node heard of the launching side


@dataclass(frozen=True)
class WorkersDone(Message):
    """To the first node: all workers of this one have ended."""


@dataclass(frozen=True)
class Finish(Message):
    """Every worker of the whole job has ended: the launcher has nothing left to wait for."""


@dataclass(frozen=True)
class StartDaemon(Message):
    """mpirun on the first node wants this daemon here. A second one is not started."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Bye(Message):
    """This node is over. Whose connection ends without it was killed."""


# ---- events: the lines of events.jsonl --------------------------------------------------------------------------
# `at` is the node's own clock, seconds since the epoch.


@dataclass(frozen=True)
class AgentStarted(Message):
    at: float
    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat: with pid and boot_id it names one process for ever
    boot_id: str


@dataclass(frozen=True)
class LauncherStarted(Message):
    at: float
    pid: int


@dataclass(frozen=True)
class WorkerStarted(Message):
    at: float
    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True)
class MemoryFinding(Message):
    """What the kernel says of the end of a worker that ended as one does for lack of memory."""

    is_shown: bool
    text: str  # "kernel log: ..." or "cgroup ...", or why neither shows it


@dataclass(frozen=True)
class WorkerEnded(Message):
    at: float
    rank: int
    local_rank: int
    exit_code: int  # 128+n for signal n
    signal: Optional[int]
    traceback: str  # the one that ended it, the text of a C++ abort, or why it could not be started, from its output; "" without one
    symptom: bool  # ended because of another worker's end or our own stop; never a root cause
    failed_first: bool = False  # its own exception was out before anybody told it to end
    memory: Optional[MemoryFinding] = None  # only where nobody told it to end, and lack of memory may have ended it


@dataclass(frozen=True)
class LeaseLifted(Message):
    """The job was detached from its launcher."""

    at: float


@dataclass(frozen=True)
class NodeStopping(Message):
    at: float
    cause: str  # that of a Stop, or what NodeEnded gives as its reason


@dataclass(frozen=True)
class ClockOffset(Message):
    """This node's clock compared with the first node's."""

    at: float
    offset_s: float  # ahead


@dataclass(frozen=True)
class PeerLost(Message):
    """Another node of the job has gone without a word, as the agents see it."""

    at: float
    node: str
    how: str
    silent_s: float  # for so long nothing had been heard of it


@dataclass(frozen=True)
class Survivor(Message):
    """A process that KILL did not end."""

    pid: int
    state: str  # as in /proc/PID/stat
    command: str


Outcome = Literal["succeeded", "failed", "stopped", "lost"]


@dataclass(frozen=True)
class NodeEnded(Message):
    """Last event of a node: none of the job's processes is left there but the survivors."""

    at: float
    outcome: Outcome
    # "" | worker-failed | launcher-failed | start-timeout | agent-killed | guard-killed | folder-gone | never-committed | peer-lost
    # | lease-over | rebooted | all-killed | setup-failed, or the cause of a Stop
    reason: str
    detail: str  # the last lines of the launcher, or of the setup, where it failed by itself
    survivors: tuple[Survivor, ...]


Event = Union[AgentStarted, LauncherStarted, WorkerStarted, WorkerEnded, ClockOffset, PeerLost, LeaseLifted, NodeStopping, NodeEnded]


# ---- encoding -----------------------------------------------------------------------------------------------------


def to_json(message: Message) -> str:
    return json.dumps({"type": type(message).__name__, **vars(message)}, default=vars)


def from_json(text: Union[str, bytes]) -> Message:
    """Rebuild a message.

    Raises:
        ValueError: the text is not a message of this protocol.
    """
    try:
        values = json.loads(text)
        message: Message = _build(Message.types[values.pop("type")], values)
        if isinstance(message, StreamBytes) and not _is_stream(message.stream):  # it becomes a file on the launching machine
            raise ValueError(f"no stream of a job: {message.stream!r}")
        if isinstance(message, StreamBytes) and not 0 <= message.offset < 1 << 62:
            raise ValueError(f"no offset in {message.stream}: {message.offset}")
        return message
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a dtrain message: {text[:200]!r}") from error


def _is_stream(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return name in (EVENTS, METRICS) or (folder == "logs" and LOG.fullmatch(file) is not None)


def _build(cls: type, values: dict[str, Any]) -> Any:
    return cls(**{name: _value(hint, values[name]) for name, hint in _hints(cls).items() if name in values})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if typing.get_origin(hint) is not ClassVar}


def _value(hint: Any, value: Any) -> Any:
    """Raises TypeError: the value is of another type, or a number that is none, or takes more than 64 bits."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union:  # an Optional
        return None if value is None else _value(args[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(args[0], part) for part in value)
    if origin is dict and isinstance(value, dict):
        return {key: _value(args[1], each) for key, each in value.items()}
    if isinstance(hint, type) and issubclass(hint, Message) and isinstance(value, dict):
        return _build(hint, value)
    is_number = type(value) is int and -(2**63) <= value < 2**63
    is_fit = {str: isinstance(value, str), bool: isinstance(value, bool), int: is_number}
    is_fit[float] = is_number or (isinstance(value, float) and math.isfinite(value))
    if not (value in args if origin is Literal else is_fit.get(hint, False)):
        raise TypeError(f"{value!r:.50} is no {hint}")
    return value


def frame(message: Message, payload: bytes = b"") -> bytes:
    head = to_json(message).encode()
    return _MARK + _HEAD.pack(len(head), len(payload), binascii.crc32(payload, binascii.crc32(head))) + head + payload


def read_frame(read: Callable[[int], bytes]) -> Optional[tuple[Message, bytes]]:
    """Next message and payload, or None where the other side ended.

    Args:
        read: returns up to n bytes, b"" at the end.

    Raises:
        ValueError: something else was written into the frame, or too much stands before it.
    """
    mark = _read_exactly(read, len(_MARK))
    num_passed_over = 0
    while mark is not None and mark != _MARK:
        num_passed_over += 1
        if num_passed_over > _NOISE_BYTES:
            raise ValueError("no frame of dtrain's, but something else")
        byte = _read_exactly(read, 1)
        mark = None if byte is None else mark[1:] + byte
    lengths = None if mark is None else _read_exactly(read, _HEAD.size)
    if lengths is None:
        return None
    head_size, payload_size, checksum = _HEAD.unpack(lengths)
    head = _read_exactly(read, head_size)
    payload = _read_exactly(read, payload_size)
    if head is None or payload is None:
        return None
    if binascii.crc32(payload, binascii.crc32(head)) != checksum:
        raise ValueError("something else was written into a frame of dtrain's")
    return from_json(head), payload


def _read_exactly(read: Callable[[int], bytes], size: int) -> Optional[bytes]:
    parts = []
    while size > 0:
        part = read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
