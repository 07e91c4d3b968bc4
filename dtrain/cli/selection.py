"""The options that say what to run otherwise than the files do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


def _joined(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | None:
    """An option that is repeated adds to what it said before."""
    return ",".join(value) if value else None


_OPTIONS = (
    click.option(
        "--nodes", metavar="A,B", multiple=True, callback=_joined, help="Run on these nodes of the cluster alone; ranges are understood."
    ),
    click.option("--exclude", metavar="C", multiple=True, callback=_joined, help="Run on all nodes but these."),
    click.option(
        "--set", "settings", metavar="KEY=VALUE", multiple=True,
        help="As if the file said so: trainer.epochs=3, cluster.instances.0.gpus=2. May be repeated.",
    ),
)  # fmt: skip


def selection_options(command: _F) -> _F:
    """--nodes, --exclude and --set, as every command has them that reads a job or cluster file."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
