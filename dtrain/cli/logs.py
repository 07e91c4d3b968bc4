"""`dtrain logs`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import click

from dtrain import api
from dtrain.errors import CTRL_C, NoSuchJob
from dtrain.intake import Silent
from dtrain.node import wire
from dtrain.render import console
from dtrain.render.end import print_outcome
from dtrain.render.lines import RankLines
from dtrain.render.ranges import ranges
from dtrain.store import Store
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


@click.command("logs", epilog="Example: dtrain logs digits --ranks 0,2-3 --follow")
@click.argument("job", required=False)
@click.option("--ranks", type=_Ranks(), help="Only these ranks, such as 0,8-15.")
@click.option("--follow", is_flag=True, help="Go on until the job ends. Ctrl-C leaves the job alone.")
def command(job: str | None, ranks: _RankSet | None, follow: bool) -> int:
    """Show what the workers of a JOB (default: the newest) printed, each line with its rank; before them its setup."""
    store = Store.default()
    record, problems = api.find(store, job, logs=True)
    there = [worker.rank for worker in record.plan.workers]
    if ranks is not None and not any(rank in ranks for rank in there):
        raise NoSuchJob(f"job {record.job} has none of these ranks", hint=f"its ranks: {ranges(there)}")
    for node, problem in problems.items():
        console.person().print(f"{node} was not asked: {problem}", style="yellow", soft_wrap=True)
    out = console.result()
    lines = RankLines(sys.stdout.write, colour=out.is_terminal and not out.no_color, ranks=ranks)
    shown: dict[str, dict[str, int]] = {}  # by node and stream: a launcher may write on while this reads
    setups = [(node.name, wire.SETUP_LOG) for node in record.plan.nodes]
    for node_name, stream in (*setups, *((worker.node, wire.rank_log(worker.rank)) for worker in record.plan.workers)):
        path = store.log(record.job, node_name, stream)
        offsets = shown.setdefault(node_name, {})
        offsets[stream] = 0
        if path.is_file():
            with path.open("rb") as file:
                while part := file.read(_READ_BYTES):
                    lines.take(node_name, stream, part)
                    offsets[stream] += len(part)
    if follow:
        sys.stdout.flush()  # the job may be silent for long
        try:
            Supervisor(store, record.job, record.plan, _Printer(lines)).run(api.targets(record), {}, offsets=shown)
        except KeyboardInterrupt:
            lines.end()
            console.person().print(f"\nleft by Ctrl-C; job {record.name} {record.job} goes on", soft_wrap=True)
            return CTRL_C
    lines.end()
    sys.stdout.flush()
    if follow:
        print_outcome(console.person(), record.name, record.job, store.state(record))
    return 0


class _Printer(Silent):
    def __init__(self, lines: RankLines) -> None:
        self._lines = lines

    def printed(self, node: str, stream: str, data: bytes) -> None:
        self._lines.take(node, stream, data)
        sys.stdout.flush()
