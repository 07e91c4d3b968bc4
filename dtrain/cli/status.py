"""`dtrain status`."""

from __future__ import annotations

import json

import click

from dtrain import api
from dtrain.render import console
from dtrain.render.status import JobView, as_json, print_job, print_jobs
from dtrain.store import JobRecord, Store

_NEWEST = 20  # jobs in the list


@click.command("status", epilog="Example: dtrain status digits --json")
@click.argument("job", required=False)
@click.option("--json", "json_wanted", is_flag=True, help="JSON on stdout, for scripts.")
def command(job: str | None, json_wanted: bool) -> None:
    """Show the newest jobs, or one JOB with its nodes and ranks.

    JOB is an id, the start of one, or a name. The nodes of jobs that are not over are asked.
    """
    store = Store.default()
    if job is None:
        records = store.jobs(limit=_NEWEST)
        problems = api.refresh(store, records)
    else:
        record, problem = api.find(store, job)
        records, problems = [record], {record.job: problem}
    views = [_view(store, record) for record in records]
    if json_wanted:
        click.echo(json.dumps({"schema_version": 1, "jobs": [as_json(view) for view in views]}, indent=1))
    elif job is not None:
        print_job(console.result(), views[0], problems.get(views[0].record.job, {}))
    elif views:
        print_jobs(console.result(), views)
        for record in records:
            if silent := problems.get(record.job):
                console.person().print(f"{record.job}: {', '.join(silent)} did not answer", style="yellow", soft_wrap=True)
    else:
        console.person().print("no job was launched from here yet")


def _view(store: Store, record: JobRecord) -> JobView:
    return JobView.of(record, store.state(record), store.metrics(record.job), store.last_seen(record.job))
