"""A job as a file again: one that needs no other file, no folder of its own and no variable that only launching had set."""

from __future__ import annotations

import json
from typing import Any

import yaml

from dtrain.spec.cluster import ClusterSpec, Instance, SshOptions
from dtrain.spec.job import Command, JobSpec, Module, Script
from dtrain.trainers.config import TrainerConfig


def dump_job(spec: JobSpec) -> str:
    """YAML whose job is this one, wherever the file lies: paths are absolute, the cluster stands in it, env has its values.

    Secrets are their names. Instances played by this machine are counted anew, so what --nodes left of them is named from node0 on.
    """
    values: dict[str, Any] = {
        "name": spec.name,
        "cluster": _cluster(spec.cluster),
        "launcher": spec.launcher,
        "workdir": str(spec.workdir),
        "sync": spec.sync,
        **({"outputs": spec.outputs} if spec.sync else {}),
        "env": dict(spec.env),
        "secrets": list(spec.secrets),
        "grace": spec.grace,
    }
    match spec.run:
        case Script(path, args):
            values |= {"script": path, "args": list(args)}
        case Module(name, args):
            values |= {"module": name, "args": list(args)}
        case Command(argv):
            values |= {"command": list(argv)}
        case TrainerConfig():
            trainer = json.loads(spec.run.to_json())
            if spec.run.pipeline is not None:
                trainer.pop("data_parallel")  # it stands at its default, and in a file none may stand beside a pipeline
            values |= {"trainer": trainer}
        case _:
            raise TypeError("a benchmark is no job file's")
    return str(yaml.dump(values, Dumper=_Plain, sort_keys=False, width=120))


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # what two instances share is written out for each


def _cluster(spec: ClusterSpec) -> dict[str, Any]:
    played = all(instance.host is None for instance in spec.instances)
    first = spec.instances[0]
    common = {"gpus_per_instance": _gpus(first), **({} if first.python is None else {"python": first.python})} if played else {}
    return {
        "instances": len(spec.instances) if played else [_instance(instance, spec.ssh) for instance in spec.instances],
        **common,
        "device": spec.device,
        "dir": spec.dir,
        "network": spec.network,
        "ports": spec.ports,
        "ssh": _ssh(spec.ssh),
    }


def _instance(instance: Instance, common: SshOptions) -> dict[str, Any]:
    given = {"host": instance.host, "gpus": _gpus(instance), "address": instance.address, "python": instance.python}
    ssh = {} if instance.ssh == common else {"ssh": _ssh(instance.ssh)}
    return {key: value for key, value in given.items() if value is not None} | ssh


def _gpus(instance: Instance) -> Any:
    return list(instance.gpus) if isinstance(instance.gpus, tuple) else instance.gpus


def _ssh(options: SshOptions) -> dict[str, Any]:
    given = {
        "user": options.user,
        "port": options.port,
        "identity_file": options.identity_file,
        "proxy_jump": options.proxy_jump,
        "host_keys": options.host_keys,
    }
    return {key: value for key, value in given.items() if value is not None}
