"""`dtrain fetch`."""

from __future__ import annotations

from pathlib import Path

import click

from dtrain import api
from dtrain.plan import counted
from dtrain.render import console
from dtrain.render.progress import Transfer
from dtrain.store import Store


@click.command("fetch", epilog="Example: dtrain fetch digits --to results")
@click.argument("job", required=False)
@click.option("--node", help="Only what this node keeps.")
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Default: the outputs folder of the job's workdir."
)
def command(job: str | None, node: str | None, to: Path | None) -> None:
    """Bring the outputs of a JOB (default: the newest) home, each node's into DIR/NODE.

    Outputs persist per job name; files that are here already are not sent again.
    """
    record, _ = api.find(Store.default(), job)
    into = to if to is not None else record.workdir / record.outputs
    out = console.person()
    with Transfer(out, "fetching") as transfer:
        fetched = api.fetch(record, into, node, transfer.moved)
    for name, (there, sent) in fetched.results.items():
        files = f"{counted(there, 'file')} in {into / name}, {sent} of them new" if there else "no outputs yet"
        out.print(f"{name}: {files}", soft_wrap=True)
    fetched.all()  # it tells of those from which nothing came
