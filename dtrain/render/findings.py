"""What a check has found, and what the nodes said of themselves, as a person reads it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.findings import Finding
from dtrain.node.wire import Interface, NodeFacts
from dtrain.render.console import harmless, size
from dtrain.render.ranges import collapsed

_MOST_NAMES = 4
_OPEN_MPI = re.compile(r"^mpirun \(Open MPI\) |^mpirun \(OpenRTE\) ")


def print_finding(console: Console, finding: Finding) -> None:
    """Its name, what is so on which nodes, and what cures it, in lines of the console's width."""
    kind, style = ("error", "bold red") if finding.is_error else ("warning", "yellow")
    console.print(Text.assemble((kind, style), " ", (finding.name, "bold")), soft_wrap=True)
    cure = [] if finding.cure is None else [f"hint: {finding.cure}"]
    for line in (*finding.text.splitlines(), *cure):
        for part in textwrap.wrap(harmless(line), console.width - 2, break_long_words=False, break_on_hyphens=False) or [""]:
            console.print(Text(f"  {part}"), soft_wrap=True)


def print_facts(console: Console, facts: Mapping[str, NodeFacts], clock_offsets_s: Mapping[str, float]) -> None:
    """Tables for all nodes, in which those that say the same share a row: what computes, what is around it, where they are."""
    _print_table(
        console,
        ("node", "system", "cores", "memory", "GPUs", "Python", "torch", "free"),
        {node: _computes(one) for node, one in facts.items()},
    )
    console.print()
    _print_table(
        console,
        ("node", "interfaces, Gbit/s", "/dev/shm", "memlock", "files", "MPI", "driver", "container"),
        {node: _around(one) for node, one in facts.items()},
    )
    console.print()
    _print_table(
        console,
        ("node", "addresses", "its name is", "clock", "jobs"),
        {
            node: (*_whereabouts(one), f"{round(clock_offsets_s[node]):+} s", ", ".join(one.machine.jobs) or "none")
            for node, one in facts.items()
        },
    )


def _print_table(console: Console, columns: tuple[str, ...], cells: Mapping[str, tuple[str, ...]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    rows: dict[tuple[str, ...], list[str]] = {}
    for node, row in cells.items():
        rows.setdefault(row, []).append(node)
    for row, nodes in rows.items():
        table.add_row(collapsed(nodes, at_most=_MOST_NAMES), *map(harmless, row))
    console.print(table)


def _computes(facts: NodeFacts) -> tuple[str, ...]:
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


def _around(facts: NodeFacts) -> tuple[str, ...]:
    machine, limits = facts.machine, facts.machine.limits
    return (
        ", ".join(_interface(one) for one in machine.interfaces if one.name != "lo") or "none",
        size(machine.shm_bytes),
        "all" if limits.memlock_bytes is None else size(limits.memlock_bytes),
        "all" if limits.nofile is None else str(limits.nofile),
        _OPEN_MPI.sub("", facts.mpi_version) or ("silent" if facts.mpirun else "none"),
        machine.gpu_driver or "none",
        machine.container or "none",
    )


def _interface(one: Interface) -> str:
    """`eth0 10`, `ib0 down`."""
    if one.state == "down":
        return f"{one.name} down"
    if one.speed_mbit == 0:
        return one.name
    return f"{one.name} {one.speed_mbit / 1000:g}"


def _whereabouts(facts: NodeFacts) -> tuple[str, ...]:
    others = [address for address in facts.addresses if address.interface != "lo"]
    return (
        ", ".join(f"{address.address} ({address.interface})" for address in others) or "none",
        ", ".join(facts.machine.name_means) or "nothing",
    )
