"""`dtrain status`. The list of jobs that are all over needs nothing but the store, and loads no more than that."""

from __future__ import annotations

import json

import click

from dtrain.render import console
from dtrain.render.jobs import print_jobs
from dtrain.store import JobRecord, Store

_NEWEST = 50  # jobs in the list


@click.command("status", epilog="Example: dtrain status digits --json")
@click.argument("job", required=False)
@click.option("--json", "json_wanted", is_flag=True, help="JSON on stdout, for scripts.")
def command(job: str | None, json_wanted: bool) -> None:
    """Show the newest jobs, or one JOB with its nodes and ranks.

    JOB is an id, the start of one, or a name. The nodes of jobs that are not over are asked.
    """
    store = Store.default()
    if job is not None:
        _show_one(store, job, json_wanted)
    elif json_wanted:
        _refresh(store)
        _print_json(store, store.jobs(limit=_NEWEST))
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
        _print_json(store, [record])
    else:
        print_job(console.result(), JobView.of(store, record), problems)


def _print_json(store: Store, records: list[JobRecord]) -> None:
    from dtrain.render.status import JobView, as_json

    click.echo(json.dumps({"schema_version": 1, "jobs": [as_json(JobView.of(store, record)) for record in records]}, indent=1))
