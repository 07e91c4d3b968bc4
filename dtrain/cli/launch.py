"""`dtrain launch`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
from rich.text import Text

from dtrain import api
from dtrain.cli.job_file import DEFAULT, check_job_file
from dtrain.cli.selection import Selecting, selection_options
from dtrain.errors import CTRL_C, STOPPED, NodeUnreachable
from dtrain.findings import ENDS_AT_LOGOUT, Finding, listed
from dtrain.jobstate import JobState
from dtrain.launchers import node_commands, plan_json
from dtrain.plan import LaunchPlan, make_plan
from dtrain.render import console
from dtrain.render.commands import print_commands
from dtrain.render.end import print_detached, print_end, print_left, print_survivors, print_unfollowed, print_unkept
from dtrain.render.live import LiveView
from dtrain.render.plan import print_plan
from dtrain.shell_words import shell_words
from dtrain.spec import JobSpec, Overrides, load_job
from dtrain.store import Store
from dtrain.supervise import Supervisor
from dtrain.sync import check_is_sent

_ARGUMENTS = "dtrain.arguments"


class _WithArguments(Selecting):
    """What stands behind `--` is the job's, and none of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ARGUMENTS] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def instead_of(self, option: str, args: list[str], ctx: click.Context) -> list[str]:
        ours: list[str] = []
        theirs: list[str] = []
        words = ours
        for word in args:
            if word.startswith("-"):
                words = ours if word.partition("=")[0] in self.options(ctx) else theirs
            words.append(word)
        command = shell_words(("dtrain", "launch", *ours, "--", *theirs, *ctx.meta.get(_ARGUMENTS, ())))
        return [*super().instead_of(option, args, ctx), f"What is for the script goes behind --: {command}"]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARG...]"]


@click.command("launch", cls=_WithArguments, epilog="Example: dtrain launch job.yaml --cluster lab.yaml -- --epochs 3")
@click.argument("file", type=click.Path(path_type=Path), default=DEFAULT)
@click.option("--cluster", type=click.Path(path_type=Path), metavar="FILE", help="Run on this cluster instead of the job's.")
@selection_options
@click.option("--detach", is_flag=True, help="Return once all workers run, with the job's id on stdout; the job goes on by itself.")
@click.option("--wait", is_flag=True, help="Where others hold the GPUs, wait until they are free.")
@click.option("--dry-run", is_flag=True, help="Show what each node would run; touch nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: the plan, or what is wrong, as JSON on stdout.")
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
    `dtrain stop` from another shell. Ctrl-\\ detaches from it, and so does the end of its terminal: the job goes on without a
    lease, and `dtrain attach` follows it. The exit code is the failing worker's own.
    """
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    if detach and lease is not None:
        raise click.UsageError("a detached job has no lease: --lease goes without --detach")
    lease_s = None if detach else float(lease or api.LEASE_S)
    overrides = Overrides(cluster, nodes, exclude, settings, tuple(ctx.meta.get(_ARGUMENTS, ())))
    check_job_file(file, may_be_node=bool(nodes or exclude))
    spec = load_job(file, overrides)
    if dry_run:
        _show_plan(spec, lease_s, as_json=as_json)
        return 0
    return follow_to_end(spec, lease_s, LiveView(console.person()), detach=detach, wait=wait, may_detach=True)


def _show_plan(spec: JobSpec, lease_s: float | None, *, as_json: bool) -> None:
    plan = make_plan(spec, lease_s=lease_s)
    check_is_sent(spec)
    commands = node_commands(spec, plan, "<job>")
    if as_json:
        click.echo(plan_json(spec, plan, commands))
        return
    out = console.result()
    print_plan(out, plan, None)
    print_commands(out, commands, spec.env)


def follow_to_end(
    spec: JobSpec, lease_s: float | None, view: LiveView, *, detach: bool = False, wait: bool = False, may_detach: bool = False
) -> int:
    """Start a job, show it until it ends, or with detach until all its workers run, and return its exit code.

    Args:
        may_detach: it may also be left by a key, and by the end of its terminal.
    """
    store = Store.default()
    out = console.person()
    signals = _Signals(view, may_detach=may_detach, has_key=may_detach and not detach and os.isatty(0))

    def run() -> tuple[api.Job, Supervisor, JobState]:
        signals.start()
        job = api.launch(spec, store=store, progress=signals, lease_s=lease_s, wait=wait)
        state = None
        try:
            supervisor = job.supervisor(view)
            signals.hand_over(supervisor, job.plan.grace_s)
            state = supervisor.run(job.targets, job.links, renew_lease=True, detach=detach)
        finally:
            if state is None:
                print_unfollowed(out, spec.name, job.id, lease_s)
        return job, supervisor, state

    with view:
        job, supervisor, state = run()
        if state.is_port_taken:
            view.again(job.id)
            job, supervisor, state = run()
        if not state.state.is_final:
            view.leave()
    if state.stop_cause is not None and not state.state.is_final:
        for why in supervisor.unheard().values():
            out.print(Text(why, "red"), soft_wrap=True)
        print_survivors(out, state)
        out.print(f"job {spec.name} {job.id} may still be running: not every node has said that it stopped", soft_wrap=True)
        return CTRL_C if state.stop_cause == "ctrl-c" else STOPPED
    if supervisor.unkept is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # there is no job to stop, and what is missing may take long to come
    lack = api.unkept(store, job.id, supervisor)
    if state.state.is_final:
        print_end(out, job.id, job.plan, state, view.evaluation, store.folder(job.id))
    elif state.is_lease_lifted or lease_s is None:
        print_detached(out, spec.name, job.id, state)
    else:
        print_left(out, spec.name, job.id, lease_s)
        return NodeUnreachable.exit_code
    if detach and state.exit_code in (0, None):
        click.echo(job.id)
    if supervisor.unkept is not None:
        print_unkept(out, job.id, lack)
    return state.exit_code or (0 if lack is None else lack.exit_code)


class _Signals:
    """Ctrl-C and TERM. They end a start at once, and a running job with grace; a second one does not wait for the grace, a third
    one not for the nodes. Also Progress, to know the moment from which on workers run: one that comes then waits for the
    supervisor, which alone can end them.

    Ctrl-\\ and HUP detach from a job once it runs; a start goes on until then. A job that would end with this machine's
    connections is not left: there the key says so, and HUP takes the terminal away and nothing else.
    """

    def __init__(self, view: LiveView, *, may_detach: bool, has_key: bool) -> None:
        self._view = view
        self._is_starting = True
        self._supervisor: Supervisor | None = None
        self._grace_s = 0.0
        self._asked: list[int] = []
        self._num_detach_asked = 0
        self._tied_to: tuple[str, ...] = ()  # nodes that end the job with our connections to them
        for number in (signal.SIGINT, signal.SIGTERM):  # also where a script's shell lets its background commands ignore them
            signal.signal(number, self._take)
        if may_detach and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup does, which wants it to stay
            signal.signal(signal.SIGHUP, self._detach)
        if has_key:
            signal.signal(signal.SIGQUIT, self._detach)
            view.keys = "Ctrl-\\ detaches"

    def start(self) -> None:
        """From now on they end a start, as one does that came since a job has ended."""
        self._is_starting, self._supervisor = True, None
        if self._asked:
            self._end_start(self._asked[0])

    def hand_over(self, supervisor: Supervisor, grace_s: float) -> None:
        """From now on they stop this job, or detach from it."""
        self._supervisor, self._grace_s = supervisor, grace_s
        for i in range(len(self._asked)):
            self._pass_on(i)
        if self._num_detach_asked:
            self._request_detach(supervisor)

    def _detach(self, number: int, stack: FrameType | None) -> None:
        if self._asked:
            return
        if self._tied_to:
            self._view.keys = f"cannot detach: {listed(self._tied_to)} would end the job with the connection"
            return
        self._num_detach_asked += 1
        if self._supervisor is None:
            self._view.keys = "detaches once the job runs"
        elif self._num_detach_asked == 1:
            self._request_detach(self._supervisor)
        elif number == signal.SIGQUIT:
            self._supervisor.abandon()

    def _request_detach(self, supervisor: Supervisor) -> None:
        self._view.keys = "detaching: no node has heard of it yet; Ctrl-\\ leaves without"
        supervisor.request_detach()

    def _take(self, number: int, stack: FrameType | None) -> None:
        self._asked.append(number)
        if self._supervisor is not None:
            self._pass_on(len(self._asked) - 1)
        elif self._is_starting or len(self._asked) > 1:
            self._end_start(number)

    def _end_start(self, number: int) -> NoReturn:
        if number == signal.SIGTERM:
            raise SystemExit(STOPPED)
        raise KeyboardInterrupt

    def _pass_on(self, i: int) -> None:
        assert self._supervisor is not None
        cause = "ctrl-c" if self._asked[i] == signal.SIGINT else "stop"
        if i == 0:
            self._view.step(f"stopping (grace {self._grace_s:g} s; again to stop at once)")
            self._supervisor.request_stop(cause, self._grace_s)
        elif i == 1:
            self._supervisor.request_stop(cause, 0.0)
        else:
            self._supervisor.abandon()

    # ---- Progress ----

    def step(self, text: str) -> None:
        self._view.step(text)

    def busy(self, text: str) -> None:
        self._view.busy(text)

    def found(self, finding: Finding) -> None:
        if finding.name == ENDS_AT_LOGOUT:
            self._tied_to, self._view.keys = finding.nodes, ""
        self._view.found(finding)

    def planned(self, job: str, plan: LaunchPlan) -> None:
        self._view.planned(job, plan)

    def sending(self, node: str, sent_bytes: int, total_bytes: int) -> None:
        self._view.sending(node, sent_bytes, total_bytes)

    def setting_up(self, num_nodes: int) -> None:
        self._view.setting_up(num_nodes)

    def printed(self, node: str, stream: str, data: bytes) -> None:
        self._view.printed(node, stream, data)

    def committing(self) -> None:
        self._is_starting = False
