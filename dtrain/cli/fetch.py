"""`dtrain fetch`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from dtrain import api
from dtrain.cli.on_cluster import cluster_option, taken_up
from dtrain.plan import counted
from dtrain.render import console
from dtrain.render.progress import Transfer
from dtrain.store import JobRecord, Store
from dtrain.sync import kept_back


@click.command("fetch", epilog="Example: dtrain fetch digits --to results")
@click.argument("job", required=False)
@cluster_option
@click.option("--node", help="Only what this node keeps.")
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Default: outputs, or out, in the job's workdir; for a job that was taken up from its nodes out in the current folder.",
)  # fmt: skip
def command(job: str | None, cluster: Path | None, node: str | None, to: Path | None) -> None:
    """Bring the outputs of a JOB (default: the newest) home, each node's into DIR/NODE.

    Outputs persist per job name; files that are here already are not sent again.
    """
    store = Store.default()
    meant = taken_up(store, cluster, job)
    record, _ = api.find(store, meant.job, silent=meant.silent)
    into = to or _default_folder(store, record)
    out = console.person()
    out.print(f"job {record.name} {record.job}", soft_wrap=True)
    with Transfer(out, "fetching") as transfer:
        fetched = api.fetch(record, into, node, transfer.moved, meant.silent)
    for name, (there, sent) in fetched.results.items():
        files = f"{counted(there, 'file')} in {into / name}, {sent} of them new" if there else "no outputs yet"
        out.print(f"{name}: {files}", soft_wrap=True)
    if record.workdir_hash is not None:  # what lies there is sent
        _warn_of_sending(record, [into / name for name, (there, _) in fetched.results.items() if there], out)
    fetched.all()  # it tells of those from which nothing came


def _default_folder(store: Store, record: JobRecord) -> Path:
    """Where a person looks for them. What nodes say of a job that was taken up there names no folder of this machine."""
    if not store.was_launched_here(record.job):
        return Path("out")
    if not record.workdir.is_dir():
        raise click.UsageError(f"the workdir of job {record.name} {record.job}, {record.workdir}, is not there: --to DIR says where")
    return record.workdir / ("out" if os.path.isabs(record.outputs) else record.outputs)


def _warn_of_sending(record: JobRecord, folders: Sequence[Path], out: Console) -> None:
    """Where outputs were brought into the job's workdir, and go to the nodes with its next launch."""
    workdir = record.workdir.resolve()
    below = [str(folder.resolve().relative_to(workdir)) for folder in folders if folder.resolve().is_relative_to(workdir)]
    sent = [folder for folder in below if kept_back(workdir, record.outputs, f"{folder}/file") is None]
    if sent:
        ignored = " and ".join(dict.fromkeys(f"/{folder.partition('/')[0]}/" for folder in sent))
        text = f"the next launch sends these files to the nodes: to keep them here, write {ignored} into {workdir}/.dtrainignore"
        out.print(Text(text, "yellow"), soft_wrap=True)
