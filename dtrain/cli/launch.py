"""`dtrain launch`."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import click
from rich.text import Text

from dtrain import api
from dtrain.cli.selection import mistakes_as_data, selection_options
from dtrain.errors import CTRL_C, STOPPED
from dtrain.launchers import node_commands, plan_json
from dtrain.plan import make_plan
from dtrain.render import console
from dtrain.render.commands import print_commands
from dtrain.render.end import print_detached, print_end, print_survivors
from dtrain.render.live import LiveView
from dtrain.render.plan import print_plan
from dtrain.spec import JobSpec, Overrides, load_job
from dtrain.store import Store
from dtrain.supervise import Supervisor

_ARGUMENTS = "dtrain.arguments"


class _WithArguments(click.Command):
    """What stands behind `--` is the job's, and none of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ARGUMENTS] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARG...]"]


@click.command("launch", cls=_WithArguments, epilog="Example: dtrain launch job.yaml --cluster lab.yaml -- --epochs 3")
@click.argument("file", type=click.Path(path_type=Path), default="job.yaml")
@click.option("--cluster", type=click.Path(path_type=Path), metavar="FILE", help="Run on this cluster instead of the job's.")
@selection_options
@click.option("--detach", is_flag=True, help="Return once all workers run, with the job's id on stdout; the job goes on by itself.")
@click.option("--wait", is_flag=True, help="Where others hold the GPUs, wait until they are free.")
@click.option("--dry-run", is_flag=True, help="Show what each node would run; touch nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: the plan, or every mistake, as JSON on stdout.")
@click.option(
    "--lease", type=click.IntRange(1, 10_000_000), metavar="S",
    help=f"Seconds that the job outlives its launcher. Default: {api.LEASE_S:g}.",
)  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    cluster: Path | None,
    nodes: str | None,
    exclude: str | None,
    settings: tuple[str, ...],
    detach: bool,
    wait: bool,
    dry_run: bool,
    as_json: bool,
    lease: int | None,
) -> int:
    """Run a job on all its nodes and follow it to its end.

    FILE is the job file (default: job.yaml). ARGs are appended to its args. Ctrl-C stops the job on every node; so does
    `dtrain stop` from another shell. The exit code is the failing worker's own.
    """
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    if detach and lease is not None:
        raise click.UsageError("a detached job has no lease: --lease goes without --detach")
    lease_s = None if detach else float(lease or api.LEASE_S)
    overrides = Overrides(cluster, nodes, exclude, settings, tuple(ctx.meta.get(_ARGUMENTS, ())))
    with mistakes_as_data(as_json):
        spec = load_job(file, overrides)
        if dry_run:
            _show_plan(spec, lease_s, as_json=as_json)
            return 0
    return follow_to_end(spec, lease_s, LiveView(console.person()), detach=detach, wait=wait)


def _show_plan(spec: JobSpec, lease_s: float | None, *, as_json: bool) -> None:
    plan = make_plan(spec, lease_s=lease_s)
    commands = node_commands(spec, plan, "<job>")
    if as_json:
        click.echo(plan_json(spec, plan, commands))
        return
    out = console.result()
    print_plan(out, plan, None)
    print_commands(out, commands)


def follow_to_end(spec: JobSpec, lease_s: float | None, view: LiveView, *, detach: bool = False, wait: bool = False) -> int:
    """Start a job, show it until it ends, or with detach until all its workers run, and return its exit code."""
    store = Store.default()
    out = console.person()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's shell lets its background commands ignore it
    signal.signal(signal.SIGTERM, _terminated)
    with view:
        job = api.launch(spec, store=store, progress=view, lease_s=lease_s, wait=wait)
        supervisor = job.supervisor(view)
        _stop_on_signals(supervisor, job.plan.grace_s, view)
        state = supervisor.run(job.targets, job.links, renew_lease=True, detach=detach)
    if state.stop_cause is not None and not state.state.is_final:
        for why in supervisor.unheard().values():
            out.print(Text(why, "red"), soft_wrap=True)
        print_survivors(out, state)
        out.print(f"job {spec.name} {job.id} may still be running: not every node has said that it stopped", soft_wrap=True)
        return CTRL_C if state.stop_cause == "ctrl-c" else STOPPED
    if state.state.is_final:
        print_end(out, spec.name, job.id, state, view.evaluation, store.folder(job.id))
    else:
        print_detached(out, spec.name, job.id)
    if detach and state.exit_code in (0, None):
        click.echo(job.id)
    return state.exit_code or 0


def _terminated(number: int, stack: FrameType | None) -> None:
    raise SystemExit(STOPPED)


def _stop_on_signals(supervisor: Supervisor, grace_s: float, view: LiveView) -> None:
    """Ctrl-C or TERM: stop with grace. A second one does not wait for the grace, a third one not for the nodes."""
    asked: list[int] = []

    def stop(number: int, stack: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:
            view.step(f"stopping (grace {grace_s:g} s; again to stop at once)")
            supervisor.request_stop("ctrl-c" if number == signal.SIGINT else "stop", grace_s)
        elif len(asked) == 2:
            supervisor.request_stop("ctrl-c", 0.0)
        else:
            supervisor.abandon()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
