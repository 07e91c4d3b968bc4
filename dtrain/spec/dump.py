"""A job as a job file: what `load_job` reads back as the same job, wherever that file then lies."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import yaml

from dtrain.spec.cluster import ClusterSpec, Instance, SshOptions, number_of
from dtrain.spec.hosts import folded
from dtrain.spec.job import Command, JobSpec, Module, Run, Script
from dtrain.trainers.config import TrainerConfig


def job_file(spec: JobSpec) -> dict[str, Any] | None:
    """The keys of a job file with its cluster in it and every path absolute; None for a benchmark, which no file can ask for.

    Secrets are names alone. What the job took from its environment is written out, as it was.
    """
    run = _run(spec.run)
    if run is None:
        return None
    preflight = {"ignore": list(spec.preflight.ignore)} if spec.preflight.ignore else None
    optional = {"setup": spec.setup, "preflight": preflight, "env": spec.env, "secrets": list(spec.secrets)}
    return {
        "name": spec.name,
        "cluster": _cluster(spec.cluster),
        "launcher": spec.launcher,
        "workdir": str(spec.workdir),
        **({} if spec.sync else {"sync": False}),
        **({"outputs": spec.outputs} if spec.sync or spec.outputs.startswith("/") else {}),
        **{key: value for key, value in optional.items() if value},
        **run,
        "grace": spec.grace,
    }


def dump_job(spec: JobSpec) -> str:
    """The same as text. Raises TypeError for a benchmark."""
    file = job_file(spec)
    if file is None:
        raise TypeError("a benchmark is no job file's")
    return str(yaml.dump(file, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31 - 1))


_MOST_LISTED = 1000  # arguments: a text can hold more of them than a file may have values
_EITHER = ("python", "activate")  # keys of the cluster or of an instance


class _Dumper(yaml.SafeDumper):
    """PyYAML by itself writes some line breaks of Unicode in a style that loses them."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)


def _run(run: Run) -> dict[str, Any] | None:
    match run:
        case Script(path, args):
            return {"script": path, "args": _args(args)}
        case Module(name, args):
            return {"module": name, "args": _args(args)}
        case Command(argv) if len(argv) > _MOST_LISTED:
            return {"command": list(argv[:1]), "args": _args(argv[1:])}
        case Command(argv):
            return {"command": list(argv)}
        case TrainerConfig():
            return {"trainer": _given(run)}
        case _:
            return None


def _args(args: Sequence[str]) -> list[str] | str:
    return shlex.join(args) if len(args) > _MOST_LISTED else list(args)


def _given(config: Any) -> dict[str, Any]:
    """What differs from the defaults: some keys exclude others, and then one of them has to be absent."""
    given = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if value != default:
            given[field.name.rstrip("_")] = _given(value) if dataclasses.is_dataclass(value) else value
    return json.loads(json.dumps(given))  # type: ignore[no-any-return]  # YAML has no tuples


def _cluster(cluster: ClusterSpec) -> dict[str, Any]:
    """Said once where all instances have it: thousands of them must fit a file."""
    first = cluster.instances[0]
    default_gpus = _most_said([_gpus(instance) for instance in cluster.instances])
    either = {key: [getattr(instance, key) for instance in cluster.instances] for key in _EITHER}
    default = {key: None if None in texts else _most_said(texts) for key, texts in either.items()}
    common = {
        "gpus_per_instance": default_gpus,
        "device": cluster.device,
        **default,
        "dir": cluster.dir,
        "network": cluster.network,
        "ports": cluster.ports,
        "ssh": _ssh(cluster.ssh),
    }
    given = {key: value for key, value in common.items() if value is not None}
    if first.host is None:
        return {**_played([instance.name for instance in cluster.instances]), **given}
    items = [(str(instance.host), _own(instance, cluster, {"gpus": default_gpus, **default})) for instance in cluster.instances]
    together = groupby(items, key=lambda item: item[1])
    listed = [{"host": text, **own} if own else text for own, group in together for text in folded([host for host, _ in group])]
    return {"instances": listed, **given}


def _most_said(gpus: Sequence[Any]) -> Any:
    """What takes the most room where each instance says it."""
    times = Counter(map(json.dumps, gpus))
    return json.loads(max(times, key=lambda text: times[text] * len(text)))


def _played(names: Sequence[str]) -> dict[str, Any]:
    every = max(map(number_of, names)) + 1
    return {"instances": every, **({} if len(names) == every else {"only": folded(names)})}


def _own(instance: Instance, cluster: ClusterSpec, default: Mapping[str, Any]) -> dict[str, Any]:
    """What an instance has otherwise than the cluster."""
    common = _ssh(cluster.ssh)
    own = {
        "gpus": _gpus(instance),
        "address": instance.address,
        **{key: getattr(instance, key) for key in _EITHER},
        "ssh": {key: value for key, value in _ssh(instance.ssh).items() if value != common.get(key)} or None,
    }
    return {key: value for key, value in own.items() if value is not None and value != default.get(key)}


def _gpus(instance: Instance) -> int | str | list[int]:
    return list(instance.gpus) if isinstance(instance.gpus, tuple) else instance.gpus


def _ssh(options: SshOptions) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(options).items() if value is not None}
