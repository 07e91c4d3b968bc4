"""`dtrain init`."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from dtrain.errors import NoSpace, SpecError
from dtrain.spec import load_cluster

_JOB = Path("job.yaml")
_CLUSTER = Path("cluster.yaml")
_SCRIPT = Path("train.py")

_HEAD = """\
# yaml-language-server: $schema=dtrain.schema.json
# `dtrain schema > dtrain.schema.json` lets an editor complete the keys, and say what each of them means.
"""

_RUN_SCRIPT = """\
script: train.py              # every worker runs it, and finds RANK, WORLD_SIZE and so on as under torchrun
# args: --epochs 3            # or a list
"""

_RUN_TRAINER = """\
trainer:                      # a small language model, which needs no file and no download; or instead of it:
  model: gpt                  #   script: train.py
  data: text                  #   args: --epochs 3
  batch: {per_replica: 8}     # global batch = replicas x per-replica batch; or {global: 32}
  iterations: 20
  optimizer: adamw
  learning_rate: 0.003
"""

_HERE = """\
# cluster: cluster.yaml       # without it: this machine with all its GPUs, or with 2 CPU workers where it has none
"""
_THERE = """\
cluster: cluster.yaml         # without it: this machine
"""

_REST = """\
# launcher: torchrun          # or mpirun, or none: a command that starts its own workers
# env: {NCCL_DEBUG: INFO}     # text exactly as typed; a name without a value is taken from your environment
# secrets: [WANDB_API_KEY]    # from your environment; in no argv, plan, store or log
# outputs: out                # a folder that persists on the nodes, $DTRAIN_OUTPUT_DIR; `dtrain fetch` brings it home
# grace: 30                   # seconds from TERM to KILL
"""

_INSTANCES = """\
instances:                    # hosts, addresses, Host aliases of ~/.ssh/config, or ranges of them
"""
_CLUSTER_REST = """\
gpus_per_instance: auto       # all; or a number of free ones, or a list of indices. Without a GPU auto is 2 CPU workers
# python: /opt/conda/bin/python   # the one that has torch; default: python3 of the node's PATH
# ssh: {user: ubuntu, identity_file: ~/.ssh/id_ed25519, proxy_jump: bastion, host_keys: accept-new}
# network: 10.0.0.0/8         # or an interface that all have; default: what the nodes prove to each other
# ports: 29500-29599          # where a firewall leaves a window
# dir: /scratch/dtrain        # local to each node
"""


@click.command("init", epilog="Example: dtrain init gpu1.lab gpu2.lab")
@click.argument("hosts", metavar="[HOST...]", nargs=-1)
def command(hosts: tuple[str, ...]) -> None:
    """Write a job file to begin with, job.yaml; with HOSTs also one of their cluster, cluster.yaml.

    A HOST is a name, an address, a Host alias of ~/.ssh/config, or a range such as 'trn[01-16].lab'. Where this folder has a
    train.py, the job runs that. Nothing is written over a file that is here already.
    """
    texts = {_JOB: _HEAD + (_RUN_SCRIPT if _SCRIPT.is_file() else _RUN_TRAINER) + (_THERE if hosts else _HERE) + _REST}
    steps = [("dtrain launch --dry-run", "shows what each node would run; touches nothing"), ("dtrain launch", "trains")]
    if hosts:
        texts[_CLUSTER], first = _cluster(hosts)
        steps.insert(0, (f"ssh {first} true", "must ask for nothing, and so for each host"))
    there = [str(path) for path in texts if path.exists() or path.is_symlink()]
    if there:
        raise click.UsageError(f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} here already, and nothing was written")
    for path, text in texts.items():
        _write(path, text)
    click.echo(f"wrote {' and '.join(map(str, texts))}; next:", err=True)
    width = max(len(step) for step, _ in steps)
    for step, why in steps:
        click.echo(f"  {step:{width}}   {why}", err=True)


def _cluster(hosts: Sequence[str]) -> tuple[str, str]:
    """The text of a cluster file, and the first of its hosts. Raises click.BadParameter where one cannot be a host."""
    items = [f"  - {host if re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]*', host) else json.dumps(host)}\n" for host in hosts]
    text = "".join((_HEAD, _INSTANCES, *items, _CLUSTER_REST))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _CLUSTER
        path.write_text(text)
        try:
            return text, load_cluster(path).instances[0].name
        except SpecError as error:
            told = [problem.message + (f" ({problem.hint})" if problem.hint else "") for problem in error.problems]
            raise click.BadParameter("; ".join(told), param_hint="HOST") from error


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise NoSpace(f"{path} cannot be written: {error.strerror}", hint="run init in a folder that you can write") from error
