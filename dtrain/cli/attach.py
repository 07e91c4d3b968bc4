"""`dtrain attach`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import click
from rich.text import Text

from dtrain import api
from dtrain.cli.on_cluster import cluster_option, taken_up
from dtrain.errors import CTRL_C
from dtrain.intake import Watcher
from dtrain.node import wire
from dtrain.node.tail import last_lines
from dtrain.render import console
from dtrain.render.end import print_detached, print_end, print_unkept
from dtrain.render.live import LiveView
from dtrain.render.status import has_lost_launcher, lost_launcher
from dtrain.store import JobRecord, Store
from dtrain.supervise import Supervisor


@click.command("attach", epilog="Example: dtrain attach digits")
@click.argument("job", required=False)
@cluster_option
def command(job: str | None, cluster: Path | None) -> int:
    """Follow a JOB (default: the newest) as its launch does, from where its logs end on this machine.

    JOB is an id, the start of one, or a name. Ctrl-C leaves, with 130, and the job goes on. Ctrl-\\ also ends its lease, so that it
    needs no launcher any more. Else the exit code is the job's own, also where it has ended before.
    """
    store = Store.default()
    record = store.find(taken_up(store, cluster, job).job)  # the nodes are not asked first: what that brings would not be shown
    if record.state.is_final:
        record, _ = api.find(store, record.job)  # where it was lost, its nodes may know better
    state = store.state(record)
    out = console.person()
    supervisor = None
    if not state.state.is_final:
        name = f"job {record.name} {record.job}"
        has_lease = record.plan.lease_s is not None and not state.is_lease_lifted
        out.print(Text(f"attached to {name}; Ctrl-C leaves, and the job goes on"), soft_wrap=True)
        if has_lost_launcher(store, record, state):
            out.print(Text(lost_launcher(record.plan, record.job), "yellow"), soft_wrap=True)
        with LiveView(out, age_s=max(0.0, time.time() - record.created_at)) as view:
            view.step(state.state.value.lower())
            supervisor = Supervisor(store, record.job, record.plan, view)
            _leave_by_key(supervisor, view, may_detach=has_lease)
            offsets = _go_on(store, record, view)
            if any(end for streams in offsets.values() for end in streams.values()):
                before = f"its logs go on where they end here; dtrain logs {record.job} shows what came before"
                out.print(Text(before, "dim"), soft_wrap=True)
            state = supervisor.run(api.unended(record, state), {}, offsets=offsets)
            if not state.state.is_final:
                view.leave()
                if has_lease and state.is_lease_lifted and not supervisor.is_abandoned:
                    print_detached(out, record.name, record.job, state)
                    return 0
                out.print(Text(f"left {name}, which goes on"), soft_wrap=True)
                return CTRL_C
    lack = None if supervisor is None else api.unkept(store, record.job, supervisor)
    evaluation = _evaluation(store, record.job) if lack is None else view.evaluation
    print_end(out, record.job, record.plan, state, evaluation, store.folder(record.job))
    assert state.exit_code is not None
    if supervisor is not None and supervisor.unkept is not None:
        print_unkept(out, record.job, lack)
    return state.exit_code or (0 if lack is None else lack.exit_code)


def _leave_by_key(supervisor: Supervisor, view: LiveView, *, may_detach: bool) -> None:
    """By Ctrl-C, and by the key that detaches from a launch, which does the same here."""
    keys = (signal.SIGINT, signal.SIGQUIT)

    def leave(number: int, stack: FrameType | None) -> None:
        for key in keys:  # a second one does not wait for a terminal that takes nothing
            signal.signal(key, signal.default_int_handler)
        supervisor.abandon()

    def detach(number: int, stack: FrameType | None) -> None:
        signal.signal(signal.SIGQUIT, leave)
        view.keys = "detaching: no node has heard of it yet; Ctrl-\\ leaves without"
        supervisor.request_detach()

    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGQUIT, detach if may_detach else leave)
    view.keys = "Ctrl-\\ detaches" if may_detach and os.isatty(0) else ""


def _go_on(store: Store, record: JobRecord, watcher: Watcher) -> dict[str, dict[str, int]]:
    """Where to follow each log from. A line that is not whole yet is shown from its start."""
    offsets: dict[str, dict[str, int]] = {}
    for node in record.plan.nodes:
        for stream in (wire.SETUP_LOG, *(wire.rank_log(worker.rank) for worker in node.workers)):
            path = store.log(record.job, node.name, stream)
            begun, end = last_lines(str(path), 0) if path.is_file() else (b"", 0)
            offsets.setdefault(node.name, {})[stream] = end
            if begun:
                watcher.printed(node.name, stream, begun)
    return offsets


def _evaluation(store: Store, job: str) -> Mapping[str, float]:
    found = [metric["evaluation"] for metric in store.metrics(job) if isinstance(metric.get("evaluation"), Mapping)]
    return found[-1] if found else {}
