"""What is known of jobs on the launching machine: rows in SQLite, and a folder for each job.

    $XDG_STATE_HOME/dtrain/store.db            jobs, events, metrics
    $XDG_STATE_HOME/dtrain/jobs/JOB/plan.json  what was launched, without secrets
                                   /job.yaml   the job with its cluster, to launch it again
                                   /NODE/logs/rank0.log ...  copies of the nodes' streams, byte for byte
    $XDG_STATE_HOME/dtrain/digests/            of the files of working directories; may be deleted at any time

An event is kept with its byte offset in the node's stream, so taking the same bytes twice changes nothing.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import secrets
import socket
import sqlite3
import time
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dtrain.errors import LogGap, NoSpace, NoSuchJob
from dtrain.jobstate import LAUNCHING_SIDE, Event, JobState, NodeLost, StartFailed, State, StopAsked
from dtrain.metrics import read_metric
from dtrain.node import procs, wire
from dtrain.node.folder import SAFE_NAME

if TYPE_CHECKING:  # a list of jobs needs neither, and they take longer to load than the list takes
    from pydantic import TypeAdapter

    from dtrain.plan import LaunchPlan
    from dtrain.spec import ClusterSpec

JOB_FILE = "job.yaml"  # in a job's folder
_BUSY_TIMEOUT_S = 10.0  # in which Python runs no signal handler
_MOST_BYTES = 64 * 1024 * 1024  # of a record
_LATEST = 1e11  # s since the epoch: calendars go no further than the year 9999
_NODES_EVENTS = typing.get_args(wire.Event)
_OWN_EVENTS = (StopAsked, StartFailed, NodeLost)
_LOOK = "see that store.db there is whole"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    job TEXT PRIMARY KEY, name TEXT, created_at REAL, launched_by TEXT, workdir TEXT, outputs TEXT,
    git_commit TEXT, workdir_hash TEXT, plan TEXT, cluster TEXT, state TEXT, exit_code INTEGER
);
CREATE TABLE IF NOT EXISTS events (
    job TEXT, node TEXT, offset INTEGER, next_offset INTEGER, event TEXT, PRIMARY KEY (job, node, offset)
);
CREATE TABLE IF NOT EXISTS metrics (
    job TEXT, node TEXT, offset INTEGER, next_offset INTEGER, metric TEXT, PRIMARY KEY (job, node, offset)
);
CREATE TABLE IF NOT EXISTS contacts (job TEXT, node TEXT, seen_at REAL, PRIMARY KEY (job, node));
CREATE TABLE IF NOT EXISTS overrides (job TEXT PRIMARY KEY, overrides TEXT);
CREATE TABLE IF NOT EXISTS launchers (job TEXT PRIMARY KEY, pid INTEGER, start_ticks INTEGER, boot_id TEXT);
CREATE TABLE IF NOT EXISTS summaries (job TEXT PRIMARY KEY, cluster_size INTEGER, started_at REAL, ended_at REAL, git_changed INTEGER);
CREATE INDEX IF NOT EXISTS newest ON jobs (created_at);
"""


@functools.cache
def _plans() -> TypeAdapter[LaunchPlan]:
    from pydantic import TypeAdapter

    from dtrain.plan import LaunchPlan

    return TypeAdapter(LaunchPlan)


@functools.cache
def _clusters() -> TypeAdapter[ClusterSpec]:
    from pydantic import TypeAdapter

    from dtrain.spec import ClusterSpec

    return TypeAdapter(ClusterSpec)


@functools.cache
def _records() -> TypeAdapter[JobRecord]:
    from pydantic import TypeAdapter

    return TypeAdapter(JobRecord)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it was launched, and its state when this was read."""

    job: str  # id
    name: str
    created_at: float
    launched_by: str  # user@host
    workdir: Path
    outputs: str
    git_commit: str | None
    git_changed: bool | None  # since that commit; None: nobody knows
    workdir_hash: str | None  # of the files that went to the nodes
    state: State
    exit_code: int | None
    plan_json: str
    cluster_json: str
    overrides: tuple[str, ...]  # of the command line: "--set trainer.epochs=3"

    def exported(self) -> bytes:
        """The job as it was launched, for its nodes to keep. It has no secrets; how the nodes are reached is each machine's own."""
        kept = {**asdict(self), "workdir": str(self.workdir), "cluster_json": "", "state": State.PENDING.value, "exit_code": None}
        return zlib.compress(json.dumps(kept).encode())

    @classmethod
    def imported(cls, exported: bytes) -> JobRecord:
        """Raises ValueError: it is of another version of dtrain, or something else."""
        from pydantic import ValidationError

        inflater = zlib.decompressobj()
        try:
            text = inflater.decompress(exported, _MOST_BYTES)
            if not inflater.eof:
                raise ValueError("it is cut off, or larger than any")
            record = _records().validate_json(text, strict=True)
            record._check(record.plan)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(": ".join((*map(str, first["loc"]), first["msg"]))) from error
        return record

    def _check(self, plan: LaunchPlan) -> None:
        """Raises ValueError: it names what becomes a folder here and must not, or what nobody could show."""
        nodes = [node.name for node in plan.nodes]
        names = (self.job, self.name, *nodes)
        if not all(SAFE_NAME.fullmatch(name) for name in names):
            raise ValueError(f"{names!r} are no names of dtrain's")
        if not nodes or len(set(nodes)) < len(nodes) or any(worker.node != node.name for node in plan.nodes for worker in node.workers):
            raise ValueError("its nodes and workers are no plan")
        if not 0 <= self.created_at < _LATEST:
            raise ValueError(f"created_at: {self.created_at} is no time")
        if not f"{self.launched_by}{self.git_commit}".isprintable() or "\0" in f"{self.workdir}{self.outputs}":
            raise ValueError("it has characters that cannot be in it")

    def reached_by(self, cluster: ClusterSpec) -> JobRecord:
        return replace(self, cluster_json=_clusters().dump_json(cluster).decode())

    @property
    def plan(self) -> LaunchPlan:
        return _plans().validate_json(self.plan_json)

    @property
    def cluster(self) -> ClusterSpec:
        return _clusters().validate_json(self.cluster_json)


@dataclass(frozen=True, slots=True)
class JobSummary:
    """What a list of jobs says of one."""

    job: str  # id
    name: str
    launched_by: str  # user@host
    git_commit: str | None
    git_changed: bool | None
    overrides: tuple[str, ...]
    state: State
    cluster_size: int | None
    exit_code: int | None
    started_at: float | None
    ended_at: float | None

    @classmethod
    def of(cls, record: JobRecord, state: JobState) -> JobSummary:
        return cls(
            record.job,
            record.name,
            record.launched_by,
            record.git_commit,
            record.git_changed,
            record.overrides,
            state.state,
            record.plan.cluster_size,
            state.exit_code,
            state.started_at,
            state.ended_at,
        )


class Store:
    """One process's view. Every write is a transaction of its own; a reader may come at any time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(root / "store.db", timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=DELETE")  # homes may be on NFS, where a write-ahead log does not work
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.DatabaseError) as error:
            hint = _cure(error, "set XDG_STATE_HOME to a folder you can write")
            raise NoSpace(f"{root}: the job store cannot be opened: {error}", hint=hint) from error

    @classmethod
    def default(cls, environ: Mapping[str, str] = os.environ) -> Store:
        home = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return cls(Path(home) / "dtrain")

    # ---- jobs ----

    def new_job_id(self) -> str:
        while True:
            job = secrets.token_hex(4)
            if not self._rows("SELECT 1 FROM jobs WHERE job = ?", job):
                return job

    def add(
        self,
        job: str,
        plan: LaunchPlan,
        cluster: ClusterSpec,
        *,
        workdir: Path,
        outputs: str,
        git_commit: str | None,
        workdir_hash: str | None,
        git_changed: bool | None = None,
        overrides: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
    ) -> JobRecord:
        """Take a new job up. `files` are texts for its folder, by name."""
        record = JobRecord(
            job,
            plan.name,
            time.time(),
            this_user(),
            workdir,
            outputs,
            git_commit,
            git_changed,
            workdir_hash,
            State.PENDING,
            None,
            _plans().dump_json(plan).decode(),
            _clusters().dump_json(cluster).decode(),
            tuple(overrides),
        )
        folder = self.folder(job)
        with self._writing():
            self._insert(record)
            self._db.execute("INSERT INTO launchers VALUES (?, ?, ?, ?)", (job, os.getpid(), _start_ticks(os.getpid()), _boot_id()))
        with self._writing():  # whoever sees the folder finds the job, even if this process is killed now
            folder.mkdir(mode=0o700, parents=True)
            for name, text in (files or {}).items():
                _write_own(folder / name, text)
        return record

    def adopt(self, record: JobRecord) -> None:
        """Take up a job that was launched elsewhere; of one that is here already only how its nodes are reached, if even that."""
        with self._writing():
            self._insert(replace(record, state=State.UNKNOWN, exit_code=None))  # until its events say more
            moved = "UPDATE jobs SET cluster = ? WHERE job = ? AND launched_by != ?"
            self._db.execute(moved, (record.cluster_json, record.job, this_user()))

    def _insert(self, record: JobRecord) -> None:
        where = (str(record.workdir), record.outputs, record.git_commit, record.workdir_hash)
        texts = (record.plan_json, record.cluster_json, record.state.value, record.exit_code)
        row = (record.job, record.name, record.created_at, record.launched_by, *where, *texts)
        self._db.execute("INSERT OR IGNORE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._db.execute("INSERT OR IGNORE INTO overrides VALUES (?, ?)", (record.job, json.dumps(record.overrides)))
        summary = (record.job, record.plan.cluster_size, record.git_changed)
        self._db.execute("INSERT OR IGNORE INTO summaries VALUES (?, ?, NULL, NULL, ?)", summary)

    def is_launcher_gone(self, job: str) -> bool:
        """Whether the process that launched a job from this machine has ended; False where that cannot be known."""
        rows = self._rows("SELECT pid, start_ticks, boot_id, launched_by FROM launchers JOIN jobs USING (job) WHERE job = ?", job)
        return any(
            boot_id != "" and (_start_ticks(pid) != start_ticks if boot_id == _boot_id() else launched_by == this_user())
            for pid, start_ticks, boot_id, launched_by in rows  # of another boot of this machine, or of one that shares the store
        )

    def was_launched_here(self, job: str) -> bool:
        """And not taken up from its nodes."""
        return bool(self._rows("SELECT 1 FROM launchers WHERE job = ?", job))

    def first_state(self, job: str) -> State:
        """Of its nodes, before they say anything."""
        return State.PENDING if self.was_launched_here(job) else State.UNKNOWN

    def jobs(self, limit: int | None = None) -> list[JobRecord]:
        """All jobs, newest first."""
        return [_record(row) for row in self._rows(f"{_SELECT} ORDER BY created_at DESC LIMIT ?", -1 if limit is None else limit)]

    def summaries(self, limit: int) -> list[JobSummary]:
        """The newest jobs, newest first."""
        return [self._summary(row) for row in self._rows(_SUMMARIES, limit)]

    def num_jobs(self) -> int:
        return cast(int, self._rows("SELECT count(*) FROM jobs")[0][0])

    def _summary(self, row: tuple[Any, ...]) -> JobSummary:
        job, name, launched_by, git_commit, overrides, state, exit_code, summarised, cluster_size, started_at, ended_at, git_changed = row
        if summarised is None or (State(state).is_final and ended_at is None):  # an older dtrain launched it, or followed it to its end
            record = self.find(job)
            return JobSummary.of(record, self.state(record))
        known = (job, name, launched_by, git_commit, _flag(git_changed), tuple(json.loads(overrides or "[]")))
        return JobSummary(*known, State(state), cluster_size, exit_code, started_at, ended_at)

    def find(self, wanted: str | None) -> JobRecord:
        """The job that `pick` finds; None: the newest.

        Raises:
            NoSuchJob: there is none, or the start of an id fits several.
        """
        if wanted is None:
            newest = self.jobs(limit=1)
            if not newest:
                raise NoSuchJob("no job was launched from here yet", hint="dtrain launch job.yaml")
            return newest[0]
        if not wanted.isprintable():  # nor can SQLite search for what is no text
            return pick(wanted, [])
        query = f"{_SELECT} WHERE substr(job, 1, ?) = ? OR name = ? ORDER BY created_at DESC"
        return pick(wanted, [_record(row) for row in self._rows(query, len(wanted), wanted, wanted)])

    # ---- what the nodes say ----

    def append(self, job: str, node: str, events: Sequence[tuple[int, str]], state: JobState) -> None:
        """Keep events, each as its offset and line, and what they add up to, so that a list of jobs need not add again."""
        with self._writing():
            self._db.executemany(_ADD_EVENT, [(job, node, offset, offset + len(line.encode()), line) for offset, line in events])
            self._set_state(job, state)

    def append_own(self, job: str, event: Event) -> None:
        """An event of the launching side, of which several processes may have one at the same time."""
        line = wire.to_json(event)
        with self._writing():
            self._db.execute(_ADD_OWN_EVENT, (job, LAUNCHING_SIDE, len(line.encode()), line, job, LAUNCHING_SIDE))

    def own_events(self, job: str, since: int = 0) -> list[tuple[int, Event]]:
        """The launching side's events from an offset on, whichever process had them, each with the offset behind it."""
        query = "SELECT next_offset, event FROM events WHERE job = ? AND node = ? AND offset >= ? ORDER BY offset"
        rows = self._rows(query, job, LAUNCHING_SIDE, since)
        return [(behind, event) for behind, line in rows if (event := _event(line, _OWN_EVENTS)) is not None]

    def is_stop_asked(self, job: str) -> bool:
        return any(isinstance(event, StopAsked) for _, event in self.own_events(job))

    def keep_state(self, job: str, state: JobState) -> None:
        with self._writing():
            self._set_state(job, state)

    def _set_state(self, job: str, state: JobState) -> None:
        """A follower that is behind another one takes no end back."""
        finals = ", ".join(f"'{each.value}'" for each in State if each.is_final)
        query = f"UPDATE jobs SET state = ?, exit_code = ? WHERE job = ? AND (? OR state NOT IN ({finals}))"
        if self._db.execute(query, (state.state.value, state.exit_code, job, state.state.is_final)).rowcount:
            self._db.execute("UPDATE summaries SET started_at = ?, ended_at = ? WHERE job = ?", (state.started_at, state.ended_at, job))

    def saw(self, job: str, seen_at: Mapping[str, float]) -> None:
        """When this machine last heard from some nodes, by its own clock."""
        with self._writing():
            self._db.executemany("INSERT OR REPLACE INTO contacts VALUES (?, ?, ?)", [(job, node, at) for node, at in seen_at.items()])

    def last_seen(self, job: str) -> dict[str, float]:
        return dict(self._rows("SELECT node, seen_at FROM contacts WHERE job = ?", job))

    def append_metrics(self, job: str, node: str, metrics: Sequence[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Keep metrics, each as its line's offset and length in bytes, and what it says."""
        with self._writing():
            self._db.executemany(_ADD_METRIC, [(job, node, offset, offset + size, json.dumps(metric)) for offset, size, metric in metrics])

    def next_offset(self, job: str, node: str, table: str = "events") -> int:
        """How far a node's events (or metrics) are known, in bytes of the stream."""
        return cast(int, self._rows(f"SELECT coalesce(max(next_offset), 0) FROM {table} WHERE job = ? AND node = ?", job, node)[0][0])

    def events(self, job: str) -> list[tuple[str, Event]]:
        """Node and event, in the order in which they arrived here."""
        return self.events_and_offsets(job)[0]

    def events_and_offsets(self, job: str) -> tuple[list[tuple[str, Event]], dict[str, int]]:
        """The events, and by node where the next one begins: what others add meanwhile is in neither."""
        rows = self._rows("SELECT node, event, next_offset FROM events WHERE job = ? ORDER BY rowid", job)
        offsets: dict[str, int] = {}
        for node, _, behind in rows:
            offsets[node] = max(offsets.get(node, 0), behind)
        kinds = {LAUNCHING_SIDE: _OWN_EVENTS}
        read = [(node, _event(line, kinds.get(node, _NODES_EVENTS))) for node, line, _ in rows]
        return [(node, event) for node, event in read if event is not None], offsets

    def metrics(self, job: str) -> list[dict[str, Any]]:
        return [read_metric(row[0]) for row in self._rows("SELECT metric FROM metrics WHERE job = ? ORDER BY rowid", job)]

    def state(self, record: JobRecord) -> JobState:
        return JobState.of(record.plan, self.events(record.job), self.first_state(record.job))

    # ---- copies of the nodes' streams ----

    def folder(self, job: str) -> Path:
        return self.root / "jobs" / job

    def job_file(self, job: str) -> Path | None:
        """What launches the job again; None where no file can say it."""
        path = self.folder(job) / JOB_FILE
        return path if path.is_file() else None

    def overrides_in(self, job_file: Path) -> tuple[str, ...]:
        """Those of an old job that this file launches again; none in a file of the user's."""
        if job_file.resolve() != (self.folder(job_file.parent.name) / JOB_FILE).resolve():
            return ()
        rows = self._rows("SELECT overrides FROM overrides WHERE job = ?", job_file.parent.name)
        return tuple(text for (overrides,) in rows for text in json.loads(overrides or "[]"))

    def log(self, job: str, node: str, stream: str) -> Path:
        return self.folder(job) / node / stream

    def write_log(self, job: str, node: str, stream: str, offset: int, data: bytes) -> None:
        """Put bytes of a stream where they belong in its copy.

        Raises:
            LogGap: that is behind its end.
        """
        path = self.log(job, node, stream)
        with self._writing():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if offset > (end := os.fstat(fd).st_size):
                    raise LogGap(node, stream, offset, end)
                done = 0
                while done < len(data):
                    done += os.pwrite(fd, data[done:], offset + done)
            finally:
                os.close(fd)

    def offsets(self, job: str, node: str) -> dict[str, int]:
        """Where to follow a node's streams from, so that nothing is missed."""
        folder = self.folder(job) / node
        logs = {str(path.relative_to(folder)): path.stat().st_size for path in folder.glob("logs/*.log")}
        return {**logs, wire.EVENTS: self.next_offset(job, node), wire.METRICS: self.next_offset(job, node, "metrics")}

    # ---- SQLite ----

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """What another process has locked is an error at once, and not after half a minute."""
        ((before_ms,),) = self._rows("PRAGMA busy_timeout")
        self._rows("PRAGMA busy_timeout = 0")
        try:
            yield
        finally:
            self._rows(f"PRAGMA busy_timeout = {before_ms}")

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise NoSpace(f"{self.root}: the job store cannot be read: {error}", hint=_cure(error, _LOOK)) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction, and one way to say that the disk does not take it."""
        try:
            with self._db:
                yield
        except (OSError, sqlite3.DatabaseError) as error:
            raise NoSpace(f"{self.root}: the job store cannot be written: {error}", hint=_cure(error, "free some space there")) from error


def _cure(error: Exception, otherwise: str) -> str:
    is_locked = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
    return "another process keeps it, such as a dtrain that Ctrl-Z stopped: fuser on store.db there names it" if is_locked else otherwise


def pick(wanted: str, jobs: Sequence[JobRecord], lists: str = "dtrain status") -> JobRecord:
    """The job with that id, else the newest of that name (a running one first), else the one whose id begins so.

    Args:
        jobs: newest first.
        lists: the command that lists them.

    Raises:
        NoSuchJob: there is none, or the start of an id fits several.
    """
    exact = [record for record in jobs if record.job == wanted]
    by_name = [record for record in jobs if record.name == wanted]
    by_id = [record for record in jobs if wanted and record.job.startswith(wanted)]
    running = [record for record in by_name if not record.state.is_final]
    if found := exact or running or by_name:
        return found[0]
    if len(by_id) == 1:
        return by_id[0]
    if by_id:
        raise NoSuchJob(f"{wanted} is the start of several jobs: {', '.join(record.job for record in by_id[:5])}", hint="type more of it")
    shown = wanted if wanted.isprintable() and wanted else repr(wanted)
    raise NoSuchJob(f"no job has the id or name {shown}", hint=f"{lists} lists them")


_ADD_EVENT = "INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?)"
_ADD_OWN_EVENT = """INSERT INTO events SELECT ?, ?, behind, behind + ?, ?
FROM (SELECT coalesce(max(next_offset), 0) AS behind FROM events WHERE job = ? AND node = ?)"""
_ADD_METRIC = "INSERT OR IGNORE INTO metrics VALUES (?, ?, ?, ?, ?)"


def _write_own(path: Path, text: str) -> None:
    """For its owner's eyes: a job's variables and arguments may be nobody else's business."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def this_user() -> str:
    """user@host, as jobs name who launched them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _boot_id() -> str:
    try:
        return procs.boot_id()
    except OSError:  # no Linux
        return ""


def _start_ticks(pid: int) -> int | None:
    found = procs.look(pid)
    return None if found is None else found.start_ticks


def read_event(line: str | bytes) -> Event | None:
    """A node's event; None for a line that was torn, as on a full disk, and for what only another version of dtrain, or nobody, calls
    an event of a node."""
    return _event(line, _NODES_EVENTS)


def _event(line: str | bytes, kinds: tuple[type, ...]) -> Event | None:
    try:
        event = wire.from_json(line)
    except ValueError:
        return None
    return cast(Event, event) if isinstance(event, kinds) and 0 <= cast(Event, event).at < _LATEST else None


def _flag(number: int | None) -> bool | None:
    return None if number is None else bool(number)


# Tables of their own, not a column more: an older dtrain on the same store goes on adding its rows.
_SELECT = """SELECT job, name, created_at, launched_by, workdir, outputs, git_commit, git_changed, workdir_hash, state, exit_code, plan,
cluster, overrides FROM jobs LEFT JOIN overrides USING (job) LEFT JOIN summaries USING (job)"""
_SUMMARIES = """SELECT job, name, launched_by, git_commit, overrides, state, exit_code, summaries.job, cluster_size, started_at, ended_at,
git_changed FROM jobs LEFT JOIN overrides USING (job) LEFT JOIN summaries USING (job) ORDER BY created_at DESC LIMIT ?"""


def _record(row: tuple[Any, ...]) -> JobRecord:
    job, name, created_at, launched_by, workdir, outputs, git_commit, git_changed, workdir_hash, state, exit_code, *texts = row
    plan, cluster, overrides = texts
    return JobRecord(
        job,
        name,
        created_at,
        launched_by,
        Path(workdir),
        outputs,
        git_commit,
        _flag(git_changed),
        workdir_hash,
        State(state),
        exit_code,
        plan,
        cluster,
        tuple(json.loads(overrides or "[]")),
    )
