"""`dtrain init`."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from dtrain.errors import NoSpace, SpecError
from dtrain.shell_words import shell_word
from dtrain.spec import load_cluster

_JOB = Path("job.yaml")
_CLUSTER = Path("cluster.yaml")
_SCRIPT = Path("train.py")

_BY_HAND = {  # where the file is here already
    _JOB: f"let {_JOB} say `cluster: {_CLUSTER}`",
    _CLUSTER: f"write the hosts under `instances:` in {_CLUSTER}",
}

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
# secrets: [WANDB_API_KEY]    # from your environment; dtrain writes them nowhere, but does not look at what a worker prints
# setup: pip install -r requirements.txt   # bash, once on each node, before the workers
# outputs: out                # a folder that persists on the nodes, $DTRAIN_OUTPUT_DIR; `dtrain fetch` brings it home
# grace: 30                   # seconds from TERM to KILL
"""

_INSTANCES = """\
instances:                    # hosts, addresses, Host aliases of ~/.ssh/config, or ranges of them
"""
_CLUSTER_REST = """\
gpus_per_instance: auto       # all; or a number of free ones, or a list of indices. Without a GPU auto is 2 CPU workers
# python: /opt/conda/bin/python   # the one that has torch; default: python3 of the node's PATH
# activate: source /opt/conda/bin/activate train   # or what else makes a node ready, such as module load
# ssh: {user: ubuntu, identity_file: ~/.ssh/id_ed25519, proxy_jump: bastion, host_keys: accept-new}
# network: 10.0.0.0/8         # or an interface that all have; default: what the nodes prove to each other
# ports: 29500-29599          # where a firewall leaves a window
# dir: /scratch/dtrain        # local to each node
"""


@click.command("init", epilog="Example: dtrain init gpu1.lab gpu2.lab")
@click.argument("hosts", metavar="[HOST...]", nargs=-1)
def command(hosts: tuple[str, ...]) -> None:
    """Write a job file to begin with, job.yaml; with HOSTs also one of their cluster, cluster.yaml.

    A HOST is a name, an address, a Host alias of ~/.ssh/config, or a range such as 'trn[01-16].lab'; USER@HOST where the
    login has another name, HOST:PORT where sshd has another port. Where this folder has a train.py, the job runs that. A file
    that is here already is left as it is.
    """
    where = _THERE if hosts or _CLUSTER.is_file() else _HERE
    texts = {_JOB: _HEAD + (_RUN_SCRIPT if _SCRIPT.is_file() else _RUN_TRAINER) + where + _REST}
    steps = [("dtrain launch --dry-run", "shows what each node would run; touches nothing"), ("dtrain launch", "trains")]
    if hosts:
        texts[_CLUSTER], first = _cluster(hosts)
        steps.insert(0, (f"ssh {first} true", "must ask for nothing, and so for each host"))
    there = [path for path in texts if path.exists() or path.is_symlink()]
    by_hand = [_BY_HAND[path] for path in there if hosts]
    if len(there) == len(texts):
        left = f"{' and '.join(map(str, there))} {'is' if len(there) == 1 else 'are'} here already, and nothing was written"
        raise click.UsageError("; ".join((left, *(by_hand or ["dtrain init HOST... writes a cluster file beside it"]))))
    written = [path for path in texts if path not in there]
    for path in written:
        _write(path, texts[path])
    click.echo(f"wrote {' and '.join(map(str, written))}; next:", err=True)
    steps[:0] = [(step, "it is here already, and left as it is") for step in by_hand]
    width = max(len(step) for step, _ in steps)
    for step, why in steps:
        click.echo(f"  {step:{width}}   {why}", err=True)


def _cluster(hosts: Sequence[str]) -> tuple[str, str]:
    """The text of a cluster file, and the first of its hosts as ssh wants it. Raises click.BadParameter where one is no host."""
    text = "".join((_HEAD, _INSTANCES, *(f"  - {_item(host)}\n" for host in hosts), _CLUSTER_REST))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _CLUSTER
        path.write_text(text)
        try:
            first = load_cluster(path).instances[0]
        except SpecError as error:
            told = [problem.message + (f" ({problem.hint})" if problem.hint else "") for problem in error.problems]
            raise click.BadParameter("; ".join(told), param_hint="HOST") from error
    port = f"-p {first.ssh.port} " if first.ssh.port else ""
    return text, port + shell_word(f"{first.ssh.user}@{first.name}" if first.ssh.user else first.name)


def _item(host: str) -> str:
    if "://" in host:
        raise click.BadParameter(f"{host!r} is a URL: give the host's name or address alone", param_hint="HOST")
    if len(hosts := re.split(r",(?![^\[]*\])", host)) > 1:  # at no comma of a range
        raise click.BadParameter(f"{host!r} is no host name: separate hosts by spaces: {' '.join(hosts)}", param_hint="HOST")
    user, at, name = host.rpartition("@")
    login = [f"user: {_scalar(user)}"] if at else []
    if with_port := re.fullmatch(r"([^:]+):([0-9]+)", name):  # an IPv6 address has more colons
        name = with_port[1]
        login.append(f"port: {with_port[2]}")
    return f"{{host: {_scalar(name)}, ssh: {{{', '.join(login)}}}}}" if login else _scalar(name)


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) else json.dumps(text)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise NoSpace(f"{path} cannot be written: {error.strerror}", hint="run init in a folder that you can write") from error
