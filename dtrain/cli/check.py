"""`dtrain check`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from dtrain import api
from dtrain.bench.config import AllreduceConfig
from dtrain.check import Checked, check
from dtrain.cli.selection import Selecting, selection_options
from dtrain.findings import WARNABLE
from dtrain.launchers import plan_json
from dtrain.plan import at_port, counted
from dtrain.render import console
from dtrain.render.commands import print_commands
from dtrain.render.console import StepLine
from dtrain.render.findings import print_facts, print_finding
from dtrain.render.plan import print_plan
from dtrain.spec import JobSpec, Overrides, benchmark_job, is_cluster_file, load_job
from dtrain.store import Store


@click.command("check", cls=Selecting, epilog="Example: dtrain check lab.yaml")
@click.argument("file", type=click.Path(path_type=Path), default="job.yaml")
@click.option("--cluster", type=click.Path(path_type=Path), metavar="FILE", help="Check this cluster instead of the job's.")
@selection_options
@click.option("--ignore", multiple=True, type=click.Choice(sorted(WARNABLE)), metavar="NAME", help="Pass over findings of this name.")
@click.option("-v", "--verbose", is_flag=True, help="Show what the nodes say of themselves, too.")
@click.option("--json", "as_json", is_flag=True, help="Findings, facts and plan as JSON on stdout.")
def command(
    file: Path,
    cluster: Path | None,
    nodes: str | None,
    exclude: str | None,
    settings: tuple[str, ...],
    ignore: tuple[str, ...],
    verbose: bool,
    as_json: bool,
) -> int:
    """Prove that a cluster can run a job, before a worker starts.

    FILE is a job file (default: job.yaml), whose plan is shown, or a cluster file. Every node is logged in to and asked; they
    dial each other at the ports where they would meet. Nothing is left running on them. Exit code 0: a launch would begin.
    """
    overrides = Overrides(cluster, nodes, exclude, settings)
    is_job = cluster is not None or not is_cluster_file(file)
    spec = load_job(file, overrides) if is_job else benchmark_job(file, AllreduceConfig(), overrides)
    line = StepLine()
    with line:
        checked = check(spec, line, state=Store.default().root, lease_s=api.LEASE_S, ignored={*ignore, *spec.preflight.ignore})
    if as_json:
        click.echo(json.dumps(_as_data(spec, checked), indent=1))
        return checked.exit_code
    out = console.result()
    for finding in checked.findings:
        print_finding(out, finding)
    if verbose:
        offsets_s = {node: one.clock_offset_s for node, one in checked.probed.items()}
        print_facts(out, {node: one.facts for node, one in checked.probed.items()}, offsets_s)
    if checked.plan is None:
        out.print(Text(f"not fit: {counted(len(checked.errors), 'error')}", "bold red"), soft_wrap=True)
        return checked.exit_code
    if is_job:
        print_plan(out, checked.plan, None)
        print_commands(out, checked.commands, spec.env)
    plan = checked.plan
    at = f", meeting at {at_port(plan.master_address, plan.master_port or 0)}" if len(plan.nodes) > 1 else ""
    out.print(Text(f"fit: {counted(len(plan.nodes), 'node')}, cluster size {plan.cluster_size}{at}", "bold green"), soft_wrap=True)
    return checked.exit_code


def _as_data(spec: JobSpec, checked: Checked) -> dict[str, Any]:
    findings = [{"level": "error" if finding.is_error else "warning", **asdict(finding)} for finding in checked.findings]
    facts = {node: {**asdict(one.facts), "clock_offset_s": one.clock_offset_s} for node, one in checked.probed.items()}
    plan = None if checked.plan is None else json.loads(plan_json(spec, checked.plan, checked.commands))
    return {"schema_version": 1, "findings": findings, "facts": facts, "plan": plan}
