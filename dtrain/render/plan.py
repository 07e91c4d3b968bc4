"""The plan, as a person reads it before anything runs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.plan import LaunchPlan, NodePlan, at_port, counted
from dtrain.render.ranges import collapsed, ranges
from dtrain.render.shell import print_text
from dtrain.shell_words import visible
from dtrain.trainers.layout import PipelinePlan

_MOST_ROWS = 20
_MOST_NAMES = 3  # in a row of several nodes


def print_plan(console: Console, plan: LaunchPlan, job: str | None) -> None:
    """Nodes, ranks, cluster size, batch arithmetic."""
    launcher = "no launcher" if plan.launcher == "none" else plan.launcher
    title = Text.assemble(("plan ", "dim"), (plan.name, "bold"), (f"  {launcher}", "dim"))
    if job is not None:
        title.append(f"  job {job}", "dim")
    console.print(title, soft_wrap=True)
    print_text(console, plan.run)
    console.print(_nodes(plan.nodes))
    for line in _lines(plan):
        console.print(Text(textwrap.indent(visible(line), "  ")), soft_wrap=True)


def _nodes(nodes: Sequence[NodePlan]) -> Table:
    """A row for each node, or where they are many, for neighbours with as many workers."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("node", "address", "ranks", "workers"):
        table.add_column(name, overflow="fold")
    rows = [[node] for node in nodes]
    if len(nodes) > _MOST_ROWS:
        rows = [[*group] for _, group in groupby(nodes, key=lambda node: (_workers(node), len(node.workers)))]
    for row in rows[:_MOST_ROWS]:
        names, addresses = ([getattr(node, key) for node in row] for key in ("name", "address"))
        each = " each" if len(row) > 1 else ""
        table.add_row(
            collapsed(names, at_most=_MOST_NAMES),
            collapsed(list(dict.fromkeys(addresses)), at_most=_MOST_NAMES),
            ranges(worker.rank for node in row for worker in node.workers) or "<ranks>",
            _workers(row[0]) + each,
        )
    if len(rows) > _MOST_ROWS:
        table.add_row(f"and {sum(map(len, rows[_MOST_ROWS:]))} more nodes")
    return table


def _workers(node: NodePlan) -> str:
    if node.gpus:
        return f"GPU {ranges(node.gpus)}"
    count = node.num_gpus
    if not count:
        return "<GPUs>"
    if node.device == "cpu":
        return counted(count, "CPU worker")
    return f"{counted(count, 'worker')} on {node.device}"


def _lines(plan: LaunchPlan) -> Iterator[str]:
    yield _cluster_size(plan)
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
            division = f"{batch.num_examples:,} examples / global batch {batch.global_batch_size}"
            yield f"{batch.iterations_per_epoch} iterations per epoch = {division}"
    if plan.total_iterations is not None:
        yield f"{plan.total_iterations} iterations in all" + (f" = {counted(plan.epochs, 'epoch')}" if plan.epochs is not None else "")
    yield from _by_node(plan.nodes, lambda node: node.activate and f"activate {_hanging(node.activate)}")
    yield from _by_node(plan.nodes, lambda node: f"python {node.python}{_versions(node)}")
    if plan.setup is not None:
        yield f"setup {_hanging(plan.setup)}"
    port = "<port>" if plan.master_port is None else plan.master_port
    lease = "detached: no lease" if plan.lease_s is None else f"lease {plan.lease_s:g} s"
    yield f"rendezvous {at_port(plan.master_address, port)}   grace {plan.grace_s:g} s   {lease}"


def _by_node(nodes: Sequence[NodePlan], told: Callable[[NodePlan], str | None]) -> Iterator[str]:
    """What is told of each node, once for all that have it in common."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        if text := told(node):
            names.setdefault(text, []).append(node.name)
    for text, having in [*names.items()][:_MOST_ROWS]:
        yield text if len(having) == len(nodes) else f"{text}   on {collapsed(having, at_most=_MOST_NAMES)}"
    if len(names) > _MOST_ROWS:
        yield f"and {len(names) - _MOST_ROWS} more"


def _versions(node: NodePlan) -> str:
    if node.python_version.startswith("<"):
        return ", to be found by the probe"
    return f" {node.python_version}, {f'torch {node.torch_version}' if node.torch_version else 'without torch yet'}"


def _hanging(lines: str) -> str:
    return "\n  ".join(lines.strip().splitlines())


def _cluster_size(plan: LaunchPlan) -> str:
    instances = counted(len(plan.nodes), "instance")
    counts = Counter(node.num_gpus for node in plan.nodes)
    if plan.cluster_size is None:
        return f"cluster size <cluster size> = {instances} x <GPUs>"
    if len(counts) == 1:
        (count,) = counts
        return f"cluster size {plan.cluster_size} = {instances} x {counted(count or 0, 'GPU')} per instance"
    if len(plan.nodes) <= _MOST_ROWS:
        return f"cluster size {plan.cluster_size} = {' + '.join(str(node.num_gpus) for node in plan.nodes)} GPUs"
    return f"cluster size {plan.cluster_size} = {' + '.join(f'{times} x {count}' for count, times in counts.items())} GPUs"


def _pipeline_lines(pipeline: PipelinePlan) -> Iterator[str]:
    stages, micro_batches = pipeline.stages, pipeline.micro_batches
    division = f"cluster size {stages * pipeline.replicas} / {counted(stages, 'stage')}"
    yield f"{counted(pipeline.replicas, 'replica')} = {division}   schedule {pipeline.schedule}"
    for stage in range(stages)[:_MOST_ROWS]:
        layers = "<layers>"
        if pipeline.layers is not None:
            names = collapsed([layer.name for layer in pipeline.layers[stage]], at_least=3)
            layers = f"{names}   {sum(layer.num_parameters for layer in pipeline.layers[stage]):,} parameters"
        yield f"  stage {stage}   ranks {ranges(pipeline.ranks_of(stage))}   {layers}"
    if stages > _MOST_ROWS:
        yield f"  and {stages - _MOST_ROWS} more stages"
    bubble = f"({stages} - 1) / ({micro_batches} + {stages} - 1)"
    yield f"predicted bubble {pipeline.bubble:.1%} = {bubble}: stages {stages}, micro-batches {micro_batches}"
