"""`dtrain logs`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dtrain import api
from dtrain.cli.on_cluster import cluster_option, taken_up
from dtrain.errors import CTRL_C, NoSuchJob
from dtrain.intake import Silent
from dtrain.link import LOGIN_S
from dtrain.node import wire
from dtrain.node.tail import last_lines
from dtrain.render import console
from dtrain.render.end import print_outcome
from dtrain.render.lines import RankLines
from dtrain.render.ranges import ranges
from dtrain.store import JobRecord, Store
from dtrain.supervise import Supervisor

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _RankSet:
    parts: tuple[range, ...]

    def __contains__(self, rank: object) -> bool:
        return any(rank in part for part in self.parts)


class _Ranks(click.ParamType[_RankSet]):
    """0,8-15"""

    name = "RANKS"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> _RankSet:
        parts = []
        for part in value.split(","):
            match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                self.fail(f"{value!r} is not a list of ranks such as 0,8-15", param, ctx)
            parts.append(range(int(match[1]), int(match[2] or match[1]) + 1))
        return _RankSet(tuple(parts))


@click.command("logs", epilog="Example: dtrain logs digits --ranks 0,2-3 --tail 20 --follow")
@click.argument("job", required=False)
@cluster_option
@click.option("--ranks", type=_Ranks(), help="Only these ranks, such as 0,8-15, and no setup.")
@click.option("--node", metavar="NODE", help="Only the ranks of this node, and its setup.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines of each rank and setup.")
@click.option("--grep", metavar="TEXT", help="Only lines that hold this text, which is no pattern. With --tail: the last N of those.")
@click.option("--follow", is_flag=True, help="Go on until the job ends. Ctrl-C leaves the job alone.")
def command(
    job: str | None, cluster: Path | None, ranks: _RankSet | None, node: str | None, tail: int | None, grep: str | None, follow: bool
) -> int:
    """Show what the workers of a JOB (default: the newest) printed, each line with its rank; before them its setup.

    JOB is an id, the start of one, or a name.
    """
    store = Store.default()
    within_s = api.ASK_NODES_S if cluster is None else LOGIN_S  # of which nothing is here yet
    meant = taken_up(store, cluster, job)
    ends: Mapping[tuple[str, str], bytes] = {}
    if tail is None or follow:  # who follows a log keeps it, and its copy has no gaps
        record, problems = api.find(store, meant.job, logs=True, within_s=within_s, silent=meant.silent)
        streams = _streams(record, ranks, node)
    else:
        record = _meant(store, meant.job)
        streams = _streams(record, ranks, node)
        ends, problems = api.log_ends(store, record, streams, tail, grep, within_s=within_s, silent=meant.silent)
    for name, problem in problems.items():
        if name not in meant.silent:
            console.person().print(f"{name} was not asked: {problem.removeprefix(f'{name}: ')}", style="yellow", soft_wrap=True)
    out = console.result()
    text = None if grep is None else os.fsencode(grep)
    lines = RankLines(sys.stdout.write, colour=out.is_terminal and not out.no_color, ranks=ranks, node=node, text=text)
    shown: dict[str, dict[str, int]] = {}  # by node and stream: a launcher may write on while this reads
    for name, stream in streams:
        if (name, stream) in ends:
            lines.take(name, stream, ends[name, stream])
        else:
            shown.setdefault(name, {})[stream] = _show(lines, name, stream, store.log(record.job, name, stream), tail, text)
    if not follow:
        lines.end()
        sys.stdout.flush()
        for gone in _gone(store, record, [each for each in streams if each not in ends]):
            console.person().print(gone, style="yellow", soft_wrap=True)
        return 0
    sys.stdout.flush()  # the job may be silent for long
    supervisor = Supervisor(store, record.job, record.plan, _Printer(lines))
    try:
        state = supervisor.run(api.targets(record), {}, offsets=shown)
    except KeyboardInterrupt:
        lines.end()
        console.person().print(f"\nleft by Ctrl-C; job {record.name} {record.job} goes on", soft_wrap=True)
        return CTRL_C
    lines.end()
    sys.stdout.flush()
    print_outcome(console.person(), record.name, record.job, state)
    if (lack := api.unkept(store, record.job, supervisor)) is not None:
        raise lack
    return 0


def _meant(store: Store, job: str | None) -> JobRecord:
    """The nodes are asked where a job goes before a newer one of its name only as the store does not know that it is over."""
    record = store.find(job)
    if record.state.is_final or record.name != job or store.jobs(limit=1)[0].job == record.job:
        return record
    return api.find(store, job)[0]


def _streams(record: JobRecord, ranks: _RankSet | None, node: str | None) -> list[tuple[str, str]]:
    """Nodes and their streams that are wanted, in the order in which they are shown.

    Raises:
        NoSuchJob: the job has none of them.
    """
    plan = record.plan
    there = [each.name for each in plan.nodes]
    if node is not None and node not in there:
        raise NoSuchJob(f"job {record.job} has no node {node}", hint=f"its nodes: {', '.join(there)}")
    here = [worker for worker in plan.workers if node in (None, worker.node)]
    wanted = [worker for worker in here if ranks is None or worker.rank in ranks]
    if not wanted:
        where = "" if node is None else f" on {node}"
        raise NoSuchJob(f"job {record.job} has none of these ranks{where}", hint=f"its ranks{where}: {ranges(each.rank for each in here)}")
    setups = [(name, wire.SETUP_LOG) for name in there if node in (None, name)] if ranks is None else []
    return [*setups, *((worker.node, wire.rank_log(worker.rank)) for worker in wanted)]


def _gone(store: Store, record: JobRecord, streams: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A word on each log that a worker of a job that is over has written, and whose copy somebody has removed."""
    if not record.state.is_final or all(store.log(record.job, *each).is_file() for each in streams):
        return
    began = {(node.name, wire.rank_log(rank.rank)) for node in store.state(record).nodes for rank in node.ranks if rank.pid is not None}
    folders = {node.name: node.job_folder for node in record.plan.nodes}
    for node, stream in streams:
        if (node, stream) in began and not store.log(record.job, node, stream).is_file():
            yield f"{store.log(record.job, node, stream)} is not there any more; on {node} it was {folders[node]}/{stream}"


def _show(lines: RankLines, node: str, stream: str, path: Path, tail: int | None, text: bytes | None) -> int:
    """Show the copy of a log, and return how far it went."""
    try:
        if tail is not None:
            data, end = last_lines(str(path), tail, text)
            lines.take(node, stream, data)
            return end
        end = 0
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                lines.take(node, stream, part)
                end += len(part)
        return end
    except FileNotFoundError:
        return 0


class _Printer(Silent):
    def __init__(self, lines: RankLines) -> None:
        self._lines = lines

    def printed(self, node: str, stream: str, data: bytes) -> None:
        self._lines.take(node, stream, data)
        sys.stdout.flush()
