"""What a check has found, and what the nodes said of themselves, as a person reads it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.findings import Finding
from dtrain.node.wire import NodeFacts
from dtrain.render.console import harmless, size
from dtrain.render.ranges import collapsed

_MOST_NAMES = 4


def print_finding(console: Console, finding: Finding) -> None:
    """Its name, what is so on which nodes, and what cures it, in lines of the console's width."""
    kind, style = ("error", "bold red") if finding.is_error else ("warning", "yellow")
    console.print(Text.assemble((kind, style), " ", (finding.name, "bold")), soft_wrap=True)
    cure = [] if finding.cure is None else [f"hint: {finding.cure}"]
    for line in (*finding.text.splitlines(), *cure):
        for part in textwrap.wrap(harmless(line), console.width - 2, break_long_words=False, break_on_hyphens=False) or [""]:
            console.print(Text(f"  {part}"), soft_wrap=True)


def print_facts(console: Console, facts: Mapping[str, NodeFacts]) -> None:
    """One table for all nodes, in which those that say the same share a row."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("node", "system", "cores", "memory", "GPUs", "Python", "torch", "free"):
        table.add_column(name, overflow="fold")
    rows: dict[tuple[str, ...], list[str]] = {}
    for node, one in facts.items():
        rows.setdefault(_row(one), []).append(node)
    for row, nodes in rows.items():
        table.add_row(collapsed(nodes, at_most=_MOST_NAMES), *row)
    console.print(table)


def _row(facts: NodeFacts) -> tuple[str, ...]:
    machine = facts.machine
    models = sorted({gpu.name for gpu in facts.gpus})
    return (
        machine.system,
        str(facts.cores),
        size(machine.memory_bytes),
        f"{len(facts.gpus)} x {' / '.join(models)}" if models else "none",
        facts.python_version,
        facts.torch_version or "none",
        f"{machine.free_bytes >> 30} GiB",
    )
