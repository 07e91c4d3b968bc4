"""`dtrain status`. The list of jobs that are all over needs nothing but the store, and loads no more than that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtrain.cli.on_cluster import cluster_option, find_on, jobs_on
from dtrain.render import console
from dtrain.render.jobs import print_jobs
from dtrain.store import JobSummary, Store

if TYPE_CHECKING:
    from dtrain.render.status import JobView

_NEWEST = 50  # jobs in the list


@click.command("status", epilog="Example: dtrain status digits --json")
@click.argument("job", required=False)
@cluster_option
@click.option("--json", "json_wanted", is_flag=True, help="JSON on stdout, for scripts.")
def command(job: str | None, cluster: Path | None, json_wanted: bool) -> None:
    """Show the newest 50 jobs, or one JOB with its nodes and ranks.

    JOB is an id, the start of one, or a name. The nodes of jobs that are not over are asked, with --cluster all of that cluster.
    """
    store = Store.default()
    if cluster is not None:
        _show_found(cluster, job, json_wanted)
    elif job is not None:
        _show_one(store, job, json_wanted)
    elif json_wanted:
        _show_json(store)
    else:
        _show_list(store)


def _show_list(store: Store) -> None:
    problems = _refresh(store)
    jobs = store.summaries(_NEWEST)
    if not jobs:
        console.person().print("no job was launched from here yet")
        return
    print_jobs(console.result(), jobs)
    if (older := store.num_jobs() - len(jobs)) > 0:
        console.person().print(f"and {older} older ones: dtrain status JOB shows one", style="dim", soft_wrap=True)
    for job in jobs:
        if silent := problems.get(job.job):
            console.person().print(f"{job.job}: {', '.join(silent)} did not answer", style="yellow", soft_wrap=True)


def _show_json(store: Store) -> None:
    from dtrain.render.status import JobView

    _refresh(store)
    _print_json([JobView.of(store, record) for record in store.jobs(limit=_NEWEST)])


def _refresh(store: Store) -> dict[str, dict[str, str]]:
    """By job that is not over, why each node that did not answer did not."""
    open_jobs = [job.job for job in store.summaries(_NEWEST) if not job.state.is_final]
    if not open_jobs:
        return {}
    from dtrain import api

    return api.refresh(store, [store.find(job) for job in open_jobs])


def _show_one(store: Store, job: str, json_wanted: bool) -> None:
    from dtrain import api
    from dtrain.render.status import JobView, print_job

    record, problems = api.find(store, job)
    if json_wanted:
        _print_json([JobView.of(store, record)])
    else:
        print_job(console.result(), JobView.of(store, record), problems)


def _show_found(cluster: Path, job: str | None, json_wanted: bool) -> None:
    """What the nodes say, which goes into no store: to list jobs is not to have their logs."""
    from dtrain.render.status import JobView, print_job

    found = jobs_on(cluster, job, lists=True)
    if job is not None or not found.jobs:
        meant = find_on(cluster, found, job)
        jobs = [each for each in found.jobs if each.record == meant]
    else:
        jobs = list(found.jobs)
    views = [JobView(each.record, each.record.plan, each.state, {}, dict.fromkeys(each.seen, found.asked_at), None) for each in jobs]
    if json_wanted:
        _print_json(views)
    elif job is not None:
        print_job(console.result(), views[0], {node: error.message for node, error in found.silent.items()})
    else:
        print_jobs(console.result(), [JobSummary.of(each.record, each.state) for each in jobs])


def _print_json(views: Sequence[JobView]) -> None:
    from dtrain.render.status import as_json

    click.echo(json.dumps({"schema_version": 1, "jobs": [as_json(view) for view in views]}, indent=1))
