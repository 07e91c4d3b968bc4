"""`dtrain schema`."""

from __future__ import annotations

import json

import click

from dtrain.spec.json_schema import json_schema


@click.command("schema", epilog="Example: dtrain schema > dtrain.schema.json")
def command() -> None:
    """Print the JSON Schema of job and cluster files, with which an editor completes keys and marks mistakes.

    \b
    For editors with the YAML language server, let a file begin with
    # yaml-language-server: $schema=dtrain.schema.json
    """
    click.echo(json.dumps(json_schema(), indent=1))
