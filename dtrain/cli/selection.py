"""The options that say what to run otherwise than the files do, and mistakes in files and options as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import click

from dtrain.errors import MOST_MISTAKES, InFile, Problem, SpecError

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


@contextmanager
def mistakes_as_data(wanted: bool) -> Iterator[None]:
    """With `wanted` what is wrong with a file or an option stands on stdout as JSON too."""
    try:
        yield
    except SpecError as error:
        if wanted:
            told = [_mistake(problem) for problem in error.problems[:MOST_MISTAKES]]
            click.echo(json.dumps({"schema_version": 1, "mistakes": told, "num_mistakes": len(error.problems)}, indent=1))
        raise


def _mistake(problem: Problem) -> dict[str, Any]:
    if isinstance(problem.place, InFile):
        file = problem.place.file.encode(errors="replace").decode()  # a name that is no UTF-8 is no JSON either
        where = {**asdict(problem.place), "file": file}
    else:
        where = asdict(problem.place)
    return {"where": where, "message": problem.message, "hint": problem.hint}
