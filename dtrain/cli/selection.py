"""The options that say what to run otherwise than the files do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from dtrain.spec.mistake import nearest_word

_MEANT = {"hosts": "nodes", "instances": "nodes"}
_F = TypeVar("_F", bound=Callable[..., Any])


def _joined(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | None:
    """An option that is repeated adds to what it said before."""
    return ",".join(value) if value else None


COMMAS = "names of nodes are separated by commas, such as --nodes A,B"
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


class Selecting(click.Command):
    """A command with those options, which answers one that it does not have, and a word too many."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])  # which click empties
        except click.NoSuchOption as error:
            raise click.UsageError(" ".join((error.message, *self.instead_of(error.option_name, args, ctx))), ctx) from None
        except click.UsageError as error:
            if type(error) is click.UsageError and (ctx.params.get("nodes") or ctx.params.get("exclude")):  # one word too many
                raise click.UsageError(f"{error.message}: {COMMAS}", ctx) from None
            raise

    def instead_of(self, option: str, args: list[str], ctx: click.Context) -> list[str]:
        """What to do instead, a sentence each."""
        name = option.lstrip("-")
        meant = _MEANT.get(name) or nearest_word(name, [known[2:] for known in self.options(ctx) if known.startswith("--")])
        return [f"Did you mean '--{meant}'?"] if meant else []

    def options(self, ctx: click.Context) -> set[str]:
        return {name for param in self.get_params(ctx) if isinstance(param, click.Option) for name in param.opts}


def selection_options(command: _F) -> _F:
    """--nodes, --exclude and --set, as every command has them that reads a job or cluster file."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
