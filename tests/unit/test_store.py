"""The job store: finding jobs, and taking the same thing twice."""

from __future__ import annotations

import json
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.errors import LogGap, NoSpace, NoSuchJob
from dtrain.intake import Intake, Silent
from dtrain.jobstate import NodeLost, StartFailed, State, StopAsked
from dtrain.node import wire
from dtrain.plan import make_plan
from dtrain.spec import load_job
from dtrain.store import JobRecord, JobSummary, Store


def _add(store: Store, folder: Path, job: str, name: str, overrides: tuple[str, ...] = (), instances: int = 1) -> JobRecord:
    (folder / "train.py").touch()
    cluster = f"cluster: {{instances: {instances}, gpus_per_instance: 1, device: cpu}}\n"
    (folder / "job.yaml").write_text(f"name: {name}\nscript: train.py\n{cluster}")
    spec = load_job(folder / "job.yaml", environ={})
    store.add(job, make_plan(spec), spec.cluster, workdir=folder, outputs="out", git_commit=None, workdir_hash="h", overrides=overrides)
    return store.find(job)


def test_a_job_is_found_by_id_prefix_and_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    with pytest.raises(NoSuchJob, match="no job was launched"):
        store.find(None)
    for job, name in (("aa11", "train"), ("aa22", "train"), ("bb33", "aa")):
        _add(store, tmp_path, job, name)
    assert store.find(None).job == "bb33"
    assert store.find("aa2").job == "aa22"
    assert store.find("train").job == "aa22"  # the newest of that name
    assert store.find("aa").job == "bb33"  # a name comes before the start of an id
    _add(store, tmp_path, "cc44", "bb")
    assert store.find("bb").job == "cc44"
    with pytest.raises(NoSuchJob, match="start of several jobs"):
        store.find("a")
    with pytest.raises(NoSuchJob):
        store.find("")
    record = store.find("bb33")
    assert (record.plan.name, record.cluster.instances[0].name, record.state) == ("aa", "node0", State.PENDING)


def test_the_same_bytes_taken_twice_change_nothing(tmp_path: Path) -> None:
    """As after a reconnect, or with `logs --follow` next to `launch`; the cuts may fall anywhere."""
    store = Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train")
    events = (wire.AgentStarted(1.0, 1, 1, "b"), wire.WorkerStarted(2.0, 0, 0, 5), wire.WorkerEnded(3.0, 0, 0, 4, None, "", False))
    data = b"".join(wire.to_json(event).encode() + b"\n" for event in events)
    intake = Intake(store, "aa11", record.plan, Silent())
    for start in range(0, len(data), 7):
        intake.take("node0", wire.StreamBytes(wire.EVENTS, start), data[start : start + 7])
    again = Intake(store, "aa11", record.plan, Silent())
    again.take("node0", wire.StreamBytes(wire.EVENTS, 0), data)
    assert store.offsets("aa11", "node0")[wire.EVENTS] == len(data)
    assert [event for _, event in store.events("aa11")] == list(events)
    assert store.state(record) == intake.state
    for offset, part in ((0, b"hello "), (6, b"world"), (0, b"hello ")):
        intake.take("node0", wire.StreamBytes(wire.rank_log(0), offset), part)
    assert store.log("aa11", "node0", wire.rank_log(0)).read_bytes() == b"hello world"
    assert store.find("aa11").state is State.RUNNING


def test_a_follower_misses_no_event_that_another_one_stores_meanwhile(tmp_path: Path) -> None:
    """It would take a job that has ended for one whose nodes are gone."""
    store = Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train")
    events = (wire.AgentStarted(1.0, 1, 1, "b"), wire.NodeEnded(3.0, "succeeded", "", "", ()))
    first, last = (wire.to_json(event).encode() + b"\n" for event in events)
    launch = Intake(store, "aa11", record.plan, Silent())
    launch.take("node0", wire.StreamBytes(wire.EVENTS, 0), first)
    attach = Intake(store, "aa11", record.plan, Silent())
    launch.take("node0", wire.StreamBytes(wire.EVENTS, len(first)), last)
    offset = attach.offsets("node0")[wire.EVENTS]
    assert offset == len(first)
    attach.take("node0", wire.StreamBytes(wire.EVENTS, offset), last)
    attach.take("node0", wire.CaughtUp(alive=False, known=True), b"")
    assert attach.state == launch.state and store.find("aa11").state is State.SUCCEEDED


class Told(Silent):
    """What a person is shown."""

    def __init__(self) -> None:
        self.printed_bytes = b""
        self.num_unkept = 0

    def printed(self, node: str, stream: str, data: bytes) -> None:
        self.printed_bytes += data

    def unkept(self, error: NoSpace) -> None:
        self.num_unkept += 1


def test_a_store_that_is_locked_is_looked_at_again(tmp_path: Path) -> None:
    """What the nodes say counts meanwhile, and what others asked for once it can be read."""
    store, other = Store(tmp_path / "state"), Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train")
    told = Told()
    launch = Intake(store, "aa11", record.plan, told)
    with closing(sqlite3.connect(tmp_path / "state/store.db", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with store.without_waiting():
            assert not launch.take_others()
        assert launch.unkept is not None and "the job store cannot be read: database is locked" in launch.unkept.message
        launch.take("node0", wire.StreamBytes(wire.EVENTS, 0), wire.to_json(wire.AgentStarted(1.0, 1, 1, "b")).encode() + b"\n")
        launch.take("node0", wire.StreamBytes(wire.rank_log(0), 0), b"hello")
        assert launch.state.state is State.STARTING and told.printed_bytes == b"hello"
        db.execute("ROLLBACK")
    other.append_own("aa11", StopAsked(1.0, "stop"))
    assert launch.take_others() and launch.state.stop_cause == "stop"
    assert told.num_unkept == 1 and store.events("aa11") == [("", StopAsked(1.0, "stop"))]


def test_a_log_has_no_gap(tmp_path: Path) -> None:
    """Not where its copy was deleted, nor where a node says that its bytes stand elsewhere; what comes again is not shown again."""
    store = Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train")
    told = Told()
    intake = Intake(store, "aa11", record.plan, told)
    name = wire.rank_log(0)
    intake.take("node0", wire.StreamBytes(name, 0), b"hello ")
    with pytest.raises(LogGap, match=r"^node0: logs/rank0.log came from byte 4398046511104 on, and what is here of it ends at byte 6$"):
        intake.take("node0", wire.StreamBytes(name, 1 << 42), b"far away")
    store.log("aa11", "node0", name).unlink()
    with pytest.raises(LogGap) as gap:
        intake.take("node0", wire.StreamBytes(name, 6), b"world")
    assert (gap.value.stream, gap.value.end) == (name, 0)
    intake.take("node0", wire.StreamBytes(name, 0), b"hello world")
    assert store.log("aa11", "node0", name).read_bytes() == told.printed_bytes == b"hello world"


@pytest.mark.parametrize("offset", ["-1", "1.5", "true", "null", '"1"', "[]", str(1 << 62)])
def test_an_offset_that_is_none_breaks_the_connection(offset: str) -> None:
    with pytest.raises(ValueError, match=r"no offset in logs|not a dtrain message"):
        wire.from_json(f'{{"type": "StreamBytes", "stream": "logs/rank0.log", "offset": {offset}}}')


def test_metrics_that_an_older_version_took_are_harmless_too(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    _add(store, tmp_path, "aa11", "train")
    with closing(sqlite3.connect(tmp_path / "state/store.db")) as db, db:
        for offset, metric in enumerate(('{"loss": "x", "epoch": 1}', "torn", '{"evaluation": {"note": "early stop"}}')):
            db.execute("INSERT INTO metrics VALUES ('aa11', 'node0', ?, ?, ?)", (offset, offset + 1, metric))
    assert store.metrics("aa11") == [{"epoch": 1}, {}, {"evaluation": {}}]


def test_a_store_that_cannot_be_made_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoSpace, match="hint: set XDG_STATE_HOME"):
        Store(tmp_path / "file/below")


def test_two_processes_each_know_what_the_other_asked_for(tmp_path: Path) -> None:
    """As `dtrain stop` next to a `launch` that follows the job; what a node says after the stop is counted as its consequence."""
    store, other = Store(tmp_path / "state"), Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train")
    launch, stop = (Intake(each, "aa11", record.plan, Silent()) for each in (store, other))
    for intake, cause in ((stop, "stop"), (launch, "ctrl-c")):
        intake.take_own(StopAsked(1.0, cause))
    assert [event for _, event in store.own_events("aa11")] == [StopAsked(1.0, "stop"), StopAsked(1.0, "ctrl-c")]
    ended = (wire.WorkerEnded(2.0, 0, 0, 1, None, "", False), wire.NodeEnded(3.0, "failed", "worker-failed", "", ()))
    launch.take("node0", wire.StreamBytes(wire.EVENTS, 0), b"".join(wire.to_json(event).encode() + b"\n" for event in ended))
    assert (launch.state.state, launch.state.exit_code) == (State.STOPPED, 143)
    assert store.find("aa11").exit_code == 143
    stop.take_own(StopAsked(4.0, "stop"))  # it has not heard of the node's end
    assert store.find("aa11").state is State.STOPPED


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("elsewhere", "it is over, and node1 had none of it"),
        ("before this machine's restart", "its launcher was killed before all nodes had it"),
        ("by a process that goes on", None),
    ],
)
def test_a_start_that_came_to_some_nodes_alone(tmp_path: Path, where: str, told: str | None) -> None:
    """One node's part is over, and the other never had any: who may still be starting the job is waited for, and nobody else."""
    launched, taken_up = Store(tmp_path / "launched"), Store(tmp_path / "taken-up")
    record = _add(launched, tmp_path, "aa11", "train", instances=2)
    taken_up.adopt(record)
    if where == "before this machine's restart":
        with closing(sqlite3.connect(tmp_path / "launched/store.db")) as db, db:
            db.execute("UPDATE launchers SET boot_id = 'another'")
    intake = Intake(taken_up if where == "elsewhere" else launched, "aa11", record.plan, Silent())
    intake.take("node1", wire.CaughtUp(alive=False, known=False), b"")
    assert not intake.state.state.is_final
    events = (wire.AgentStarted(1.0, 1, 1, "b"), wire.NodeEnded(2.0, "failed", "never-committed", "", ()))
    intake.take("node0", wire.StreamBytes(wire.EVENTS, 0), b"".join(wire.to_json(event).encode() + b"\n" for event in events))
    failed = intake.state.start_failed
    assert (failed and failed.text, intake.state.exit_code) == (told, told and 69)


def test_what_was_overridden_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    _add(store, tmp_path, "aa11", "plain")
    record = _add(store, tmp_path, "bb22", "changed", overrides=("--set 'env.A=ü'", "--nodes a"))
    assert (store.find("aa11").overrides, record.overrides) == ((), ("--set 'env.A=ü'", "--nodes a"))


def test_an_event_that_only_another_version_knows_says_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train")
    lines = ['{"type": "DaemonWanted", "at": 1.0, "host": "n2"}\n', wire.to_json(wire.AgentStarted(2.0, 1, 1, "b")) + "\n"]
    with closing(sqlite3.connect(tmp_path / "state/store.db")) as db, db:
        for offset, line in enumerate(lines):
            db.execute("INSERT INTO events VALUES ('aa11', 'node0', ?, ?, ?)", (offset, offset + 1, line))
    assert [event for _, event in store.events("aa11")] == [wire.AgentStarted(2.0, 1, 1, "b")]
    assert store.state(record).state is State.STARTING


def test_a_node_does_not_speak_for_the_launching_side(tmp_path: Path) -> None:
    """Nor the other way; and what is damaged in the store says nothing."""
    store = Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train")
    own = (StopAsked(1.0, "stop"), StartFailed(1.0, 1, "no"), NodeLost(1.0, "node0", "gone"), NodeLost(1.0, "zzz", "gone"))
    others = (wire.Beat(1.0, 0.0, 0.0), wire.LeaseLifted(1e300))
    lines = [wire.to_json(event).encode() + b"\n" for event in (*own, *others, wire.AgentStarted(2.0, 1, 1, "b"))]
    intake = Intake(store, "aa11", record.plan, Silent())
    intake.take("node0", wire.StreamBytes(wire.EVENTS, 0), b"".join(lines))
    assert (intake.state.state, intake.state.stop_cause, intake.state.failures) == (State.STARTING, None, ())
    with closing(sqlite3.connect(tmp_path / "state/store.db")) as db, db:
        for offset, line in enumerate((wire.to_json(wire.NodeEnded(3.0, "lost", "", "", ())), '{"type": "StopAsked"', "[" * 100_000)):
            db.execute("INSERT INTO events VALUES ('aa11', '', ?, ?, ?)", (offset, offset + 1, line))
        db.execute("INSERT INTO events VALUES ('aa11', 'node0', 9000, 9001, ?)", (lines[0].decode(),))
    assert [event for _, event in store.events("aa11")] == [wire.AgentStarted(2.0, 1, 1, "b")]
    assert store.own_events("aa11") == [] and store.state(record) == intake.state


def test_a_summary_says_what_the_events_add_up_to(tmp_path: Path) -> None:
    """It is kept beside them, so that a list of jobs adds up nothing; also where only an older dtrain followed the job."""
    store = Store(tmp_path / "state")
    record = _add(store, tmp_path, "aa11", "train", overrides=("--nodes a",))
    _add(store, tmp_path, "bb22", "other")
    intake = Intake(store, "aa11", record.plan, Silent())
    events = (wire.AgentStarted(1.0, 1, 1, "b"), wire.WorkerEnded(3.0, 0, 0, 4, None, "", False), wire.NodeEnded(4.0, "failed", "", "", ()))
    offset = 0
    for event in events:
        line = wire.to_json(event).encode() + b"\n"
        intake.take("node0", wire.StreamBytes(wire.EVENTS, offset), line)
        offset += len(line)
        assert store.summaries(2)[1] == JobSummary.of(store.find("aa11"), intake.state)
    summary = store.summaries(2)[1]
    told = (summary.state, summary.exit_code, summary.cluster_size, summary.started_at, summary.ended_at, summary.overrides)
    assert told == (State.FAILED, 4, 1, 1.0, 4.0, ("--nodes a",))
    assert [each.job for each in store.summaries(1)] == ["bb22"] and store.num_jobs() == 2
    for older in ("UPDATE summaries SET ended_at = NULL", "DELETE FROM summaries"):
        with closing(sqlite3.connect(tmp_path / "state/store.db")) as db, db:
            db.execute(older)
        assert store.summaries(2)[1] == summary


def test_a_job_goes_to_another_machine_and_is_the_same_there(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "state"), Store(tmp_path / "other")
    record = _add(store, tmp_path, "aa11", "train", overrides=("--set 'env.A=ü'",))
    exported = replace(record, launched_by="ana@laptop").exported()
    copy = JobRecord.imported(exported)
    assert (copy.cluster_json, copy.launched_by, copy.plan) == ("", "ana@laptop", record.plan)
    other.adopt(copy.reached_by(record.cluster))
    assert other.find("train") == replace(record, launched_by="ana@laptop", state=State.UNKNOWN)  # until its nodes are asked
    moved = replace(record.cluster, dir="/scratch")
    other.adopt(copy.reached_by(moved))
    assert other.find("train").cluster == moved
    store.adopt(record.reached_by(moved))  # it was launched from there, and how it is reached is known better
    assert store.find("train") == record


def test_what_would_lie_elsewhere_on_this_machine_is_no_job(tmp_path: Path) -> None:
    record = _add(Store(tmp_path / "state"), tmp_path, "aa11", "train", instances=2)
    plan = record.plan_json
    elsewhere = [
        {"job": "../../aa11"},
        {"name": ".."},
        {"plan_json": plan.replace("node1", "..")},
        {"plan_json": plan.replace("node1", "/v")},
    ]
    of_another_node = plan.replace('"node":"node1"', '"node":"../../x"')
    assert of_another_node != plan
    for lie in (*elsewhere, {"plan_json": of_another_node}, {"plan_json": plan.replace("node1", "node0")}):
        with pytest.raises(ValueError):
            JobRecord.imported(replace(record, **lie).exported())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"created_at": "now"}, "^created_at: Input should be a valid number$"),
        ({"created_at": None}, "^created_at: "),
        ({"created_at": 1e300}, "^created_at: 1e\\+300 is no time$"),
        ({"created_at": float("nan")}, "^created_at: nan is no time$"),
        ({"name": 7}, "^name: "),
        ({"git_commit": 7}, "^git_commit: "),
        ({"git_changed": 0}, "^git_changed: "),
        ({"overrides": [1, 2]}, "^overrides: 0: "),
        ({"plan_json": "{}"}, "^name: Field required$"),
        ({"plan_json": "[" * 100_000}, "recursion limit"),
        ({"launched_by": "\x1b[2J"}, "characters that cannot be in it"),
        ({"outputs": "/out\0"}, "characters that cannot be in it"),
    ],
)
def test_a_damaged_record_is_no_job(tmp_path: Path, damage: dict[str, Any], why: str) -> None:
    record = _add(Store(tmp_path / "state"), tmp_path, "aa11", "train")
    kept = json.loads(zlib.decompress(record.exported()))
    with pytest.raises(ValueError, match=why):
        JobRecord.imported(zlib.compress(json.dumps({**kept, **damage}).encode()))


def test_what_is_no_record_takes_no_memory() -> None:
    bomb = zlib.compress(bytes(65 << 20))
    deep = zlib.compress(b"[" * 1_000_000)
    for exported in (bomb, deep, zlib.compress(b"{}"), zlib.compress(b"[]"), zlib.compress(b"{}" * 99)[:-9], b"", b"\0"):
        with pytest.raises(ValueError):
            JobRecord.imported(exported)


# The tables as the first versions made them, and what those write and read.
OLD = """
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, name TEXT, created_at REAL, launched_by TEXT, workdir TEXT, outputs TEXT,
    git_commit TEXT, workdir_hash TEXT, plan TEXT, cluster TEXT, state TEXT, exit_code INTEGER
);
CREATE TABLE events (job TEXT, node TEXT, offset INTEGER, next_offset INTEGER, event TEXT, PRIMARY KEY (job, node, offset));
CREATE TABLE metrics (job TEXT, node TEXT, offset INTEGER, next_offset INTEGER, metric TEXT, PRIMARY KEY (job, node, offset));
"""
OLD_ADD = "INSERT INTO jobs VALUES (?, ?, ?, 'me@here', '/', 'out', NULL, NULL, '{}', '{}', 'SUCCEEDED', 0)"


def test_a_store_of_an_older_version_opens_and_goes_on_being_one(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with closing(sqlite3.connect(tmp_path / "state/store.db")) as old:
        old.executescript(OLD)
        with old:
            old.execute(OLD_ADD, ("aa11", "old", 1.0))
        store = Store(tmp_path / "state")
        assert [(record.job, record.overrides) for record in store.jobs()] == [("aa11", ())]
        _add(store, tmp_path, "bb22", "new", overrides=("--nodes a",))
        with old:
            old.execute(OLD_ADD, ("cc33", "later", 2.0))  # an older dtrain beside the new one
        assert {record.job: record.overrides for record in store.jobs()} == {"aa11": (), "bb22": ("--nodes a",), "cc33": ()}
