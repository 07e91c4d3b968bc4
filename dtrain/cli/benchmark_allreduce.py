"""`dtrain benchmark-allreduce`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dtrain import api
from dtrain.bench.config import AllreduceConfig
from dtrain.cli.launch import follow_to_end
from dtrain.cli.selection import Selecting, selection_options
from dtrain.render.benchmark import AllreduceTable
from dtrain.spec import Overrides, benchmark_job


@click.command("benchmark-allreduce", cls=Selecting, epilog="Example: dtrain benchmark-allreduce lab.yaml")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--json", "json_wanted", is_flag=True, help="The measurements, or what is wrong, as JSON on stdout.")
@selection_options
def command(file: Path | None, json_wanted: bool, nodes: str | None, exclude: str | None, settings: tuple[str, ...]) -> int:
    """Measure allreduce between all workers of a cluster, size by size, and check every result.

    FILE is a cluster file, or a job file whose cluster is meant; without one the benchmark runs on this machine. The time
    is the median over repeats of the slowest rank's; bus bandwidth is 2(n-1)/n of algorithm bandwidth, the load on one
    link. Exit code 1: a result was wrong.
    """
    table = AllreduceTable()
    spec = benchmark_job(file, AllreduceConfig(), Overrides(nodes=nodes, exclude=exclude, settings=settings))
    code = follow_to_end(spec, api.LEASE_S, table)
    if json_wanted:
        click.echo(json.dumps({"schema_version": 1, "measurements": table.measurements}, indent=1))
    return code
