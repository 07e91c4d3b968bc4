"""The plan, as a person reads it before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.launchers import NodeCommand
from dtrain.plan import LaunchPlan, NodePlan, counted
from dtrain.trainers.layout import PipelinePlan

_MOST_ROWS = 20


def print_plan(console: Console, plan: LaunchPlan, job: str | None) -> None:
    """Nodes, ranks, cluster size, batch arithmetic."""
    title = Text.assemble(("plan ", "dim"), (plan.name, "bold"), f"  {plan.run}", (f"  {plan.launcher}", "dim"))
    if job is not None:
        title.append(f"  job {job}", "dim")
    console.print(title, soft_wrap=True)
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("node", "address", "ranks", "workers"):
        table.add_column(name, overflow="fold")
    for node in plan.nodes[:_MOST_ROWS]:
        table.add_row(node.name, node.address, ranges(worker.rank for worker in node.workers) or "<ranks>", _workers(node))
    console.print(table)
    if len(plan.nodes) > _MOST_ROWS:
        console.print(f"  and {len(plan.nodes) - _MOST_ROWS} more nodes")
    for line in _lines(plan):
        console.print(Text("  " + line), soft_wrap=True)


def print_commands(console: Console, commands: Sequence[NodeCommand], secrets: Sequence[str]) -> None:
    """What each node runs, in a form that a shell would take."""
    for command in commands:
        console.print(Text.assemble("\n", (command.node, "bold")))
        if command.argv:
            console.out(shlex.join(command.argv))
        else:
            console.print(Text("mpirun's daemon, started by dtrain's agent", "dim"))
        console.print(Text("each worker:", "dim"))
        for name, value in sorted(command.worker_env.items()):
            console.out(f"  {name}={shlex.quote(value)}")
        for name in secrets:
            console.out(f"  {name}=<secret>")
        console.out(f"  {shlex.join(command.worker_argv)}")


def _workers(node: NodePlan) -> str:
    if node.gpus:
        return f"GPU {ranges(node.gpus)}"
    count = node.num_gpus
    if not count:
        return "<GPUs>"
    if node.device == "cpu":
        return f"{count} CPU worker{'s' if count > 1 else ''}"
    return f"{count} {'worker' if count == 1 else 'workers'} on {node.device}"


def _lines(plan: LaunchPlan) -> Iterator[str]:
    instances = len(plan.nodes)
    counts = {node.num_gpus or 0 for node in plan.nodes}
    if plan.cluster_size is None:
        yield f"cluster size <cluster size> = {counted(instances, 'instance')} x <GPUs>"
    elif len(counts) == 1:
        count = counts.pop()
        yield f"cluster size {plan.cluster_size} = {counted(instances, 'instance')} x {counted(count, 'GPU')} per instance"
    else:
        yield f"cluster size {plan.cluster_size} = {' + '.join(str(node.num_gpus) for node in plan.nodes[:_MOST_ROWS])} GPUs"
    if plan.pipeline is not None:
        yield from _pipeline_lines(plan.pipeline)
    if plan.batch is not None:
        batch = plan.batch
        padding = f" + {batch.padding} rows of weight 0" if batch.padding else ""
        per_replica = batch.per_replica_batch_size
        yield f"global batch {batch.global_batch_size}{padding} = {counted(batch.replicas, 'replica')} x per-replica batch {per_replica}"
        if batch.micro_batches > 1 or plan.pipeline is not None:
            yield f"micro-batch {batch.micro_batch_size} = per-replica batch {per_replica} / micro-batches {batch.micro_batches}"
        if batch.iterations_per_epoch is not None:
            total = "" if plan.total_iterations is None else f", {plan.total_iterations} iterations in all"
            yield f"{batch.iterations_per_epoch} iterations per epoch{total}"
    port = "<port>" if plan.master_port is None else plan.master_port
    lease = "detached: no lease" if plan.lease_s is None else f"lease {plan.lease_s:g} s"
    yield f"rendezvous {plan.master_address}:{port}   grace {plan.grace_s:g} s   {lease}"


def _pipeline_lines(pipeline: PipelinePlan) -> Iterator[str]:
    stages, micro_batches = pipeline.stages, pipeline.micro_batches
    division = f"cluster size {stages * pipeline.replicas} / {counted(stages, 'stage')}"
    yield f"{counted(pipeline.replicas, 'replica')} = {division}   schedule {pipeline.schedule}"
    for stage in range(stages)[:_MOST_ROWS]:
        layers = "<layers>"
        if pipeline.layers is not None:
            names = ", ".join(layer.name for layer in pipeline.layers[stage])
            layers = f"{names}   {sum(layer.num_parameters for layer in pipeline.layers[stage]):,} parameters"
        yield f"  stage {stage}   ranks {ranges(pipeline.ranks_of(stage))}   {layers}"
    if stages > _MOST_ROWS:
        yield f"  and {stages - _MOST_ROWS} more stages"
    bubble = f"({stages} - 1) / ({micro_batches} + {stages} - 1)"
    yield f"predicted bubble {pipeline.bubble:.1%} = {bubble}: stages {stages}, micro-batches {micro_batches}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0-3,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
