"""`dtrain stop`."""

from __future__ import annotations

import signal
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from dtrain import api
from dtrain.cli.on_cluster import Meant, cluster_option, taken_up_running
from dtrain.errors import CTRL_C, NodeUnreachable, NoSpace, NoSuchJob
from dtrain.render import console
from dtrain.render.end import print_end, print_survivors
from dtrain.render.stop import StopView, names
from dtrain.store import JobRecord, Store, this_user
from dtrain.supervise import Supervisor

_SURVIVED = 1


@click.command("stop", epilog="Example: dtrain stop digits --grace 5")
@click.argument("job", required=False)
@cluster_option
@click.option("--grace", type=click.IntRange(0, 86400), metavar="S", help="Seconds from TERM to KILL. Default: the job's own.")
@click.option("--force", is_flag=True, help="Stop it even if another user or machine launched it.")
def command(job: str | None, cluster: Path | None, grace: int | None, force: bool) -> int:
    """End a JOB on all its nodes, from any shell: TERM, grace, KILL, and a look at what is left.

    JOB is an id, the start of one, or a name; without it the one that runs. A second stop with a shorter grace shortens that
    of the first. Exit code 0: nothing is left; 1: something survived; 69: a node could not be asked.
    """
    store = Store.default()
    out = console.person()
    record = _meant(store, taken_up_running(store, cluster, job))
    state = store.state(record)
    if state.state.is_final:
        out.print(f"job {record.name} {record.job} is over: {state.state.value}", soft_wrap=True)
        return _SURVIVED if print_survivors(out, state) else 0
    if record.launched_by != this_user() and not force:
        launched = f"job {record.name} {record.job} was launched by {record.launched_by}, not by {this_user()}"
        raise click.UsageError(f"{launched}: --force stops it all the same")
    return _stop(store, record, record.plan.grace_s if grace is None else float(grace), out)


def _meant(store: Store, meant: Meant) -> JobRecord:
    """A stop takes no guess where several could be meant."""
    job = meant.job
    if job is None:
        running = api.the_running_one(store)
        if running is None:
            raise NoSuchJob("no job is running", hint="dtrain status lists those that ran")
        return running
    try:
        record = api.find(store, job, silent=meant.silent)[0]
    except NoSpace:  # that the disk is full here keeps no job running
        return store.find(job)
    return api.the_running_one(store, job) or record if record.name == job != record.job else record


def _stop(store: Store, record: JobRecord, grace_s: float, out: Console) -> int:
    targets = api.unended(record, store.state(record))
    nodes = [target.node for target in targets]
    out.print(Text(f"stopping job {record.name} {record.job} on {names(nodes)} (grace {grace_s:g} s)"), soft_wrap=True)
    with StopView(out, nodes, grace_s) as view:
        supervisor = Supervisor(store, record.job, record.plan, view)
        signal.signal(signal.SIGINT, lambda number, stack: supervisor.abandon())
        supervisor.request_stop("stop", grace_s, by=this_user())
        state = supervisor.run(targets, {})
    unheard = supervisor.unheard()
    if supervisor.is_abandoned:
        _leave(record, supervisor, out)
        return CTRL_C
    for why in unheard.values():
        out.print(Text(why, "red"), soft_wrap=True)
    if unheard and len(unheard) < len(nodes):
        out.print(
            Text(f"the other nodes have told it to stop too; `dtrain status {record.job}` shows whether it did", "red"), soft_wrap=True
        )
    elif unheard:
        lease_s = record.plan.lease_s
        lease = "" if lease_s is None or state.is_lease_lifted else f", or its lease of {lease_s:g} s is over"
        out.print(Text(f"the job goes on there until `dtrain stop {record.job}` reaches it{lease}", "red"), soft_wrap=True)
    if state.state.is_final:
        print_end(out, record.job, record.plan, state, {}, store.folder(record.job))
        survived = any(node.survivors for node in state.nodes)
    else:
        survived = print_survivors(out, state)
    return _SURVIVED if survived else NodeUnreachable.exit_code if unheard else 0


def _leave(record: JobRecord, supervisor: Supervisor, out: Console) -> None:
    """Ctrl-C: what was ordered takes its course."""
    untold = supervisor.untold()
    told = [node for node in supervisor.waited_for() if node not in untold]
    told_any = len(untold) < len(record.plan.nodes)
    if told:
        out.print(Text(f"the order has been given, and the nodes go on stopping: {names(told)}"), soft_wrap=True)
    if untold:
        passed_on = "not reached from here; the other nodes tell it to stop" if told_any else "not reached, so the job goes on there"
        out.print(Text(f"{passed_on}: {names(untold)}", "red"), soft_wrap=True)
    out.print(f"dtrain status {record.job} shows how far they are", soft_wrap=True)
