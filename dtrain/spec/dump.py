"""A job as a job file: what `load_job` reads back as the same job, wherever that file then lies."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import yaml

from dtrain.spec.cluster import ClusterSpec, Instance, SshOptions
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
        **({"outputs": spec.outputs} if spec.sync else {"sync": False}),
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


_EITHER = ("python", "activate")  # keys of the cluster or of an instance


class _Dumper(yaml.SafeDumper):
    """PyYAML by itself writes some line breaks of Unicode in a style that loses them."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)


def _run(run: Run) -> dict[str, Any] | None:
    match run:
        case Script(path, args):
            return {"script": path, "args": list(args)}
        case Module(name, args):
            return {"module": name, "args": list(args)}
        case Command(argv):
            return {"command": list(argv)}
        case TrainerConfig():
            return {"trainer": _given(run)}
        case _:
            return None


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
    same = {key: len({getattr(instance, key) for instance in cluster.instances}) == 1 for key in _EITHER}
    common = {
        "gpus_per_instance": _gpus(first),
        "device": cluster.device,
        **{key: getattr(first, key) if same[key] else None for key in _EITHER},
        "dir": cluster.dir,
        "network": cluster.network,
        "ports": cluster.ports,
        "ssh": _ssh(cluster.ssh),
    }
    instances: int | list[Any] = len(cluster.instances)
    if first.host is not None:
        instances = [_instance(instance, cluster, _gpus(first), same) for instance in cluster.instances]
    return {"instances": instances, **{key: value for key, value in common.items() if value is not None}}


def _instance(instance: Instance, cluster: ClusterSpec, default_gpus: Any, same: dict[str, bool]) -> str | dict[str, Any]:
    own = {
        "gpus": _gpus(instance) if _gpus(instance) != default_gpus else None,
        "address": instance.address,
        **{key: None if same[key] else getattr(instance, key) for key in _EITHER},
        "ssh": _ssh(instance.ssh) if instance.ssh != cluster.ssh else None,
    }
    given = {key: value for key, value in own.items() if value is not None}
    return {"host": instance.host, **given} if given else str(instance.host)


def _gpus(instance: Instance) -> int | str | list[int]:
    return list(instance.gpus) if isinstance(instance.gpus, tuple) else instance.gpus


def _ssh(options: SshOptions) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(options).items() if value is not None}
