"""`dtrain`: the group of commands and the edge at which every error becomes a message and an exit code.

`dtrain --help` loads click alone; a command's own file is imported when it runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

import click

import dtrain
from dtrain.cli.error_json import error_json
from dtrain.cli.streams import ReaderGone, take_over
from dtrain.errors import CTRL_C, DtrainError
from dtrain.shell_words import visible

# name: (module, what `dtrain --help` says of it)
_COMMANDS = {
    "init": ("dtrain.cli.init", "Write a job file to begin with."),
    "check": ("dtrain.cli.check", "Prove that a cluster can run a job, before it does."),
    "launch": ("dtrain.cli.launch", "Train: run a job on all its nodes."),
    "status": ("dtrain.cli.status", "Show jobs, or one job with its nodes."),
    "attach": ("dtrain.cli.attach", "Follow a job that runs, as its launch does."),
    "logs": ("dtrain.cli.logs", "Show what a job's workers printed."),
    "stop": ("dtrain.cli.stop", "End a job on all its nodes."),
    "fetch": ("dtrain.cli.fetch", "Bring a job's outputs home."),
    "schema": ("dtrain.cli.schema", "Print the JSON Schema of job and cluster files."),
    "benchmark-allreduce": ("dtrain.cli.benchmark_allreduce", "Measure allreduce between all workers."),
}
_ENDS_BY_CTRL_C = {"check", "init", "launch", "schema", "benchmark-allreduce"}  # what they do: no job goes on behind them
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings=_CONTEXT, epilog="Example: dtrain launch job.yaml --cluster lab.yaml")
@click.version_option(dtrain.__version__, prog_name="dtrain")
def commands() -> None:
    """Train PyTorch models on any set of machines that answer ssh."""


def main() -> None:
    """Console entry point."""
    take_over()
    code = run(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a hundred connections, each in a thread of its own, would hold the end up


def run(argv: list[str]) -> int:
    """Run a command line and return its exit code; whatever goes wrong has been said on stderr."""
    try:
        return _command(argv)
    except click.ClickException as error:
        error.show(sys.stderr)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped by Ctrl-C" if _ENDS_BY_CTRL_C & set(argv[:1]) else "left by Ctrl-C; a job that runs goes on", err=True)
        return CTRL_C
    except SystemExit as ended:  # by a TERM
        return ended.code if isinstance(ended.code, int) else DtrainError.exit_code
    except DtrainError as error:
        _say(error)
        return error.exit_code
    except ReaderGone as error:
        return error.exit_code
    except Exception:  # outer edge: a bug of ours
        traceback.print_exc()
        click.echo("this is a bug in dtrain; please report it with the lines above", err=True)
        return DtrainError.exit_code


def _command(argv: list[str]) -> int:
    """With --json what goes wrong stands on stdout too."""
    try:
        result: Any = commands.main(argv, prog_name="dtrain", standalone_mode=False)
    except (click.ClickException, DtrainError) as error:
        if "--json" in argv[: argv.index("--") if "--" in argv else None]:
            click.echo(json.dumps(error_json(error), indent=1))
        raise
    finally:
        sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _say(error: DtrainError) -> None:
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    head = click.style("error: ", fg="red", bold=True) if colour else "error: "
    click.echo(head + visible(error.message), file=sys.stderr)
    if error.hint is not None:
        click.echo(f"hint: {visible(error.hint)}", file=sys.stderr)
