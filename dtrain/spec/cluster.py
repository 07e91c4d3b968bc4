"""The cluster: the keys of cluster.yaml, and what becomes of them."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from dtrain.errors import MOST_MISTAKES
from dtrain.node.folder import SAFE_NAME
from dtrain.spec.environment import argument_mistakes
from dtrain.spec.hosts import MAX_HOSTS, expand
from dtrain.spec.mistake import Mistake, Place, named, nearest, nearest_file, not_there, path_mistakes, typed

HostKeys: TypeAlias = Literal["strict", "accept-new"]
Device: TypeAlias = Literal["auto", "cuda", "cpu"]

STRICT: dict[str, Any] = {"extra": "forbid"}  # pydantic's configuration of the classes that a file is read into
CPU_WORKERS = 2  # what `gpus_per_instance: auto` means on a machine without a GPU

_PORTS = re.compile(r"([1-9][0-9]{0,4})-([1-9][0-9]{0,4})")
_MAX_GPUS = 1024  # of an instance, or CPU workers: more is a typing error, and a plan has each of them
_MAX_WORKERS = 2**17  # of a job: a plan has each of them, too
_INTERFACE = re.compile(r"[^\s/]{1,15}")  # what Linux takes as an interface's name


@dataclass(frozen=True, slots=True)
class SshOptions:
    """How a node is reached; what is None is left to ~/.ssh/config."""

    user: str | None = None
    port: int | None = None
    identity_file: str | None = None  # absolute, on this machine
    proxy_jump: str | None = None
    host_keys: HostKeys = "strict"


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine of the cluster."""

    name: str  # unique, and safe as a folder's name
    host: str | None  # None: played by this machine
    gpus: int | tuple[int, ...] | Literal["auto"] = "auto"  # how many, or which
    address: str | None = None  # IP literal under which the other nodes reach it
    python: str | None = None  # absolute path, or a name on the node's PATH
    ssh: SshOptions = field(default_factory=SshOptions)
    activate: str | None = None  # lines for bash, whose environment the job runs in


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    path: Path | None  # absolute; None where it stands in the job file, or no file says it
    instances: tuple[Instance, ...]
    device: Device = "auto"
    dir: str = "auto"  # or an absolute path on the nodes
    network: str = "auto"  # or a CIDR, or an interface's name
    ports: str = "auto"  # or "29500-29599", both ends included
    ssh: SshOptions = field(default_factory=SshOptions)

    @property
    def size(self) -> int | None:
        """Instances x GPUs per instance; None where the nodes have to say how many GPUs they have."""
        auto = CPU_WORKERS if self.device == "cpu" else None
        counts = [len(one.gpus) if isinstance(one.gpus, tuple) else auto if one.gpus == "auto" else one.gpus for one in self.instances]
        return None if None in counts else sum(count or 0 for count in counts)


@dataclass(frozen=True)
class SshFile:
    """The keys under `ssh`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    user: Annotated[str | None, Field(description="Who logs in. Without it, ~/.ssh/config's or your own name.")] = None
    port: Annotated[
        int | None,
        Field(description="Where sshd listens. Without it, ~/.ssh/config's or 22.", json_schema_extra={"minimum": 1, "maximum": 65535}),
    ] = None
    identity_file: Annotated[
        str | None, Field(description="The private key, a path relative to this file. Without it, the keys that ssh would try.")
    ] = None
    proxy_jump: Annotated[
        str | None, Field(description="A bastion to go through: host or user@host:port; several: a,b. Their users and ports are their own.")
    ] = None
    host_keys: Annotated[
        HostKeys | None,
        Field(
            description="strict: a host must be known. accept-new: the key of a new host is kept. A key that has changed is always refused."
        ),
    ] = None


@dataclass(frozen=True)
class InstanceFile:
    """The keys of an instance that is more than its host."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    host: Annotated[
        str, Field(description="A host name, an address, a Host alias of ~/.ssh/config, or a range of them such as trn[01-16].lab.")
    ]
    gpus: Annotated[
        int | list[int] | Literal["auto"] | None,
        Field(description="How many GPUs, which (a list of indices), or auto, on this instance. Without it, gpus_per_instance."),
    ] = None
    address: Annotated[
        str | None, Field(description="The IP address at which the other nodes reach it. Without it, the nodes find out.")
    ] = None
    python: Annotated[str | None, Field(description="The interpreter on this instance. Without it, the cluster's.")] = None
    activate: Annotated[str | None, Field(description="How this instance is made ready. Without it, the cluster's.")] = None
    ssh: Annotated[SshFile | None, Field(description="How to reach this instance, where that is otherwise than for the others.")] = None


@dataclass(frozen=True)
class ClusterFile:
    """The keys of cluster.yaml."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    instances: Annotated[
        int | list[str | InstanceFile],
        Field(description="The machines: hosts, ranges of them, or mappings with host. A number: that many, played by this machine."),
    ]
    only: Annotated[
        list[str] | None,
        Field(description="Those of the instances that are meant, as with launch --nodes: names, and ranges of them. Without it, all."),
    ] = None
    gpus_per_instance: Annotated[
        int | list[int] | Literal["auto"],
        Field(description="A number (the lowest free ones), a list of indices, or auto: all, and 2 CPU workers where there is none."),
    ] = "auto"
    device: Annotated[Device, Field(description="auto: GPUs where there are any. cpu: a GPU is one CPU worker.")] = "auto"
    python: Annotated[
        str | None,
        Field(
            description="The interpreter that has torch: a path, or a name on the PATH. Default: python3; here, without activate, dtrain's."
        ),
    ] = None
    activate: Annotated[
        str | None,
        Field(
            description="Lines for a login bash, run once on each node in the home folder, such as source /opt/conda/bin/activate train. "
            "setup, launcher and workers run in the environment that they leave behind. What counts is how the last of them ends."
        ),
    ] = None
    dir: Annotated[
        str, Field(description="All of dtrain on a node lies under it: an absolute path, local to the node. auto: /var/tmp/dtrain-UID.")
    ] = "auto"
    network: Annotated[
        str,
        Field(
            description="Where the nodes meet: a network such as 10.0.0.0/8, or an interface that all have. auto: what is proved to work."
        ),
    ] = "auto"
    ports: Annotated[
        str,
        Field(
            description="Where a firewall leaves a window, such as 29500-29599. Of several nodes the first takes two of them, one for the"
            " rendezvous and one on which the agents watch each other. auto: any free ones."
        ),
    ] = "auto"
    ssh: Annotated[SshFile | None, Field(description="How to reach the instances. What is absent is what ssh would do by itself.")] = None


def this_machine() -> ClusterSpec:
    """What a job without a cluster runs on."""
    return ClusterSpec(path=None, instances=(Instance("node0", host=None),))


def cluster_spec(file: ClusterFile, at: Place, *, path: Path | None, folder: Path) -> tuple[ClusterSpec, list[Mistake]]:
    """The cluster, and what is wrong with it. `at` is where the file's keys stand, `folder` what relative paths start from."""
    mistakes = [
        *_gpus_mistakes(file.gpus_per_instance, (*at, "gpus_per_instance")),
        *_python_mistakes(file.python, (*at, "python")),
        *lines_mistakes(file.activate, (*at, "activate"), "source /opt/conda/bin/activate train"),
        *_dir_mistakes(file.dir, (*at, "dir")),
        *_network_mistakes(file.network, (*at, "network")),
        *_ports_mistakes(file.ports, (*at, "ports")),
        *_ssh_mistakes(file.ssh, (*at, "ssh"), folder, guess=True),
    ]
    ssh = _merged(SshOptions(), file.ssh, folder)
    instances, wrong_instances = _instances(file, (*at, "instances"), ssh, folder)
    num_workers = sum(len(one.gpus) if isinstance(one.gpus, tuple) else one.gpus for one in instances if one.gpus != "auto")
    if num_workers > _MAX_WORKERS and not wrong_instances and not mistakes:
        hint = f"a job has at most {_MAX_WORKERS:,}"
        mistakes.append(Mistake((*at, "instances"), f"{named((*at, 'instances'))} come to {num_workers:,} workers", hint))
    if file.only is not None and not wrong_instances:
        instances, wrong_instances = _only(instances, file.only, (*at, "only"))
    return ClusterSpec(path, instances, file.device, file.dir, file.network, file.ports, ssh), mistakes + wrong_instances


def _instances(file: ClusterFile, at: Place, ssh: SshOptions, folder: Path) -> tuple[tuple[Instance, ...], list[Mistake]]:
    default_gpus = _gpus(file.gpus_per_instance)
    if isinstance(file.instances, int):
        number = file.instances
        if not 1 <= number <= MAX_HOSTS:
            return (), [
                Mistake(at, f"{named(at)} must be from 1 to {MAX_HOSTS}, not {number}", "a number of instances is played by this machine")
            ]
        played = tuple(Instance(f"node{i}", None, default_gpus, None, file.python, ssh, file.activate) for i in range(number))
        if number > 1 and isinstance(default_gpus, tuple) and file.device != "cpu":
            gpus_at = (*at[:-1], "gpus_per_instance")
            problem = f"{named(gpus_at)} gives the same GPUs to {number} instances, and this machine plays all of them"
            return played, [Mistake(gpus_at, problem, "write how many each is to have")]
        return played, []
    if not file.instances:
        return (), [Mistake(at, f"{named(at)} is empty", "list the hosts, or write a number to play that many on this machine")]
    instances: list[Instance] = []
    mistakes: list[Mistake] = []
    seen: set[str] = set()
    addresses: set[str] = set()
    for index, item in enumerate(file.instances):
        here = (*at, index)
        one = InstanceFile(item) if isinstance(item, str) else item
        mistakes += _instance_mistakes(one, here, folder, addresses, guess=len(mistakes) < MOST_MISTAKES)
        hosts, wrong_hosts = _hosts(one.host, here if isinstance(item, str) else (*here, "host"), seen)
        mistakes += wrong_hosts
        if one.address is not None and len(hosts) > 1:
            mistakes.append(Mistake((*here, "address"), f"one address for {len(hosts)} hosts", "give each host an item of its own"))
        gpus = default_gpus if one.gpus is None else _gpus(one.gpus)
        own_ssh = _merged(ssh, one.ssh, folder)
        python, activate = one.python or file.python, one.activate or file.activate
        instances += [Instance(host, host, gpus, one.address, python, own_ssh, activate) for host in hosts]
        if len(instances) > MAX_HOSTS:
            return (), [*mistakes, Mistake(here, f"with this item {named(at)} stands for more than {MAX_HOSTS} hosts", "check the ranges")]
    return tuple(instances), mistakes


def _only(instances: tuple[Instance, ...], texts: Sequence[str], at: Place) -> tuple[tuple[Instance, ...], list[Mistake]]:
    there = {instance.name for instance in instances}
    wanted: set[str] = set()
    num_named = 0
    for index, text in enumerate(texts):
        try:
            names = expand(text)
        except ValueError as error:
            message, hint = error.args
            return instances, [Mistake((*at, index), f"{typed(text)} {message}", hint)]
        if unknown := [name for name in names if name not in there]:
            hint = nearest(unknown[0], there) or "name instances as they stand above; those that this machine plays are node0, node1, ..."
            return instances, [Mistake((*at, index), f"the cluster has no node {typed(unknown[0])}", hint)]
        wanted |= {*names}
        num_named += len(names)
        if num_named > MAX_HOSTS:
            return instances, [Mistake((*at, index), f"with this item {named(at)} has more than {MAX_HOSTS} names", "write each once")]
    if not wanted:
        return instances, [Mistake(at, f"{named(at)} is empty", "name some of the instances, or leave it out")]
    return tuple(instance for instance in instances if instance.name in wanted), []


def number_of(name: str) -> int:
    """Of an instance that this machine plays."""
    return int(name.removeprefix("node"))


def _hosts(text: str, at: Place, seen: set[str]) -> tuple[tuple[str, ...], list[Mistake]]:
    try:
        hosts = expand(text)
    except ValueError as error:
        message, hint = error.args
        return (), [Mistake(at, f"the host {typed(text)} {message}", hint)]
    wrong = [host for host in hosts if not SAFE_NAME.fullmatch(host)]
    if wrong:
        return hosts, [Mistake(at, f"{typed(wrong[0])} is no host name", _host_hint(wrong[0]))]
    for host in hosts:
        if host in seen:
            return hosts, [Mistake(at, f"the host '{host}' stands here a second time", "every host is one instance: remove one")]
        seen.add(host)
    return hosts, []


def _host_hint(text: str) -> str:
    if match := re.fullmatch(r"([^@\s]+)@([^@:\s]+)", text):
        return f"write {{host: {match[2]}, ssh: {{user: {match[1]}}}}}"
    if match := re.fullmatch(r"([^@:\s]+):([0-9]+)", text):
        return f"write {{host: {match[1]}, ssh: {{port: {match[2]}}}}}"
    hosts = text.replace(",", " ").split()
    if len(hosts) > 1:
        return f"give each host an item of its own: {', '.join(hosts)}"
    if text.count(":") > 1:
        return "give an IPv6 address a Host name in ~/.ssh/config and use that"
    return "a host is at most 100 letters, digits, '.', '_' and '-', and starts with no '.' or '-'"


def _instance_mistakes(one: InstanceFile, at: Place, folder: Path, addresses: set[str], *, guess: bool) -> list[Mistake]:
    """`addresses` are those of the instances before, and then this one's too."""
    mistakes = [
        *(_gpus_mistakes(one.gpus, (*at, "gpus")) if one.gpus is not None else []),
        *_python_mistakes(one.python, (*at, "python")),
        *lines_mistakes(one.activate, (*at, "activate"), "source /opt/conda/bin/activate train"),
        *_ssh_mistakes(one.ssh, (*at, "ssh"), folder, guess=guess),
    ]
    if one.address is not None and not _is_address(one.address):
        hint = "a name may mean something else on another node: write the number"
        mistakes.append(Mistake((*at, "address"), f"address {typed(one.address)} is no IP address", hint))
    elif one.address is not None:
        address = ipaddress.ip_address(one.address)
        if address.is_unspecified or address.is_multicast:
            mistakes.append(Mistake((*at, "address"), f"the address '{one.address}' is no machine's", "write the instance's own"))
        elif str(address) in addresses:
            hint = "every instance is a machine of its own: correct one"
            mistakes.append(Mistake((*at, "address"), f"the address '{one.address}' stands here a second time", hint))
        addresses.add(str(address))
    return mistakes


def _gpus_mistakes(gpus: int | Sequence[int] | str, at: Place) -> list[Mistake]:
    name = named(at)
    if isinstance(gpus, str):
        return []
    if isinstance(gpus, int):
        all_of_them = "leave it out" if at[-1] == "gpus_per_instance" else "write auto"
        hint = f"{all_of_them} to use all of them; device: cpu uses none"
        return [] if 1 <= gpus <= _MAX_GPUS else [Mistake(at, f"{name} must be from 1 to {_MAX_GPUS}, not {gpus}", hint)]
    if not gpus:
        return [Mistake(at, f"{name} is an empty list", "list the indices of the GPUs, or write auto")]
    seen: set[int] = set()
    for index, gpu in enumerate(gpus):
        if gpu < 0:
            return [Mistake((*at, index), f"there is no GPU {gpu}", "GPUs are counted from 0")]
        if gpu in seen:
            return [Mistake((*at, index), f"GPU {gpu} stands here a second time", "every worker has a GPU of its own: remove one")]
        seen.add(gpu)
    return []


def _python_mistakes(python: str | None, at: Place) -> list[Mistake]:
    if python is None or os.path.isabs(python) or re.fullmatch(r"~/.+|[^\s/~-][^\s/]*", python):
        return []
    return [
        Mistake(
            at,
            f"{named(at)} {typed(python)} is neither an absolute path on the nodes nor a name on their PATH",
            "such as /opt/conda/bin/python",
        )
    ]


def lines_mistakes(lines: str | None, at: Place, example: str) -> list[Mistake]:
    """Of a key that holds lines for bash."""
    if lines is None:
        return []
    if lines.strip():
        return argument_mistakes(lines, at)
    return [Mistake(at, f"{named(at)} is empty", f"such as `{at[-1]}: {example}`")]


def _dir_mistakes(text: str, at: Place) -> list[Mistake]:
    if text == "auto" or (os.path.isabs(text) and ".." not in Path(text).parts and text.strip("/.")):
        return []
    return [Mistake(at, f"{named(at)} {typed(text)} is no absolute path on the nodes", "such as /var/tmp/me, local to each node; or auto")]


def _network_mistakes(text: str, at: Place) -> list[Mistake]:
    if "/" in text:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            return [Mistake(at, f"{named(at)} {typed(text)} is no network", "such as 192.168.7.0/24")]
        return []
    if _is_address(text):
        return [
            Mistake(
                at,
                f"{named(at)} {typed(text)} is one address, not a network",
                "write the network, such as 192.168.7.0/24, or an instance's `address`",
            )
        ]
    if not _INTERFACE.fullmatch(text):
        return [Mistake(at, f"{named(at)} {typed(text)} is neither a network nor an interface", "such as 192.168.7.0/24, or eth0, or auto")]
    return []


def _ports_mistakes(text: str, at: Place) -> list[Mistake]:
    found = _PORTS.fullmatch(text)
    if text == "auto" or (found and int(found[1]) <= int(found[2]) <= 65535):
        return []
    return [Mistake(at, f"{named(at)} {typed(text)} is no range of ports", "such as 29500-29599, lowest first, at most 65535; or auto")]


def _ssh_mistakes(ssh: SshFile | None, at: Place, folder: Path, *, guess: bool) -> list[Mistake]:
    """`guess` at which of the files beside it a missing one was meant as, which takes a while."""
    if ssh is None:
        return []
    mistakes = [
        Mistake((*at, key), f"{named((*at, key))} is empty", "give it a value, or remove the key")
        for key, text in (("user", ssh.user), ("identity_file", ssh.identity_file), ("proxy_jump", ssh.proxy_jump))
        if text is not None and not text.strip()
    ]
    if ssh.user is not None and re.search(r"^-|\S\s+\S", ssh.user):
        mistakes.append(Mistake((*at, "user"), f"{named((*at, 'user'))} {typed(ssh.user)} is no user's name", "write the name alone"))
    if ssh.proxy_jump is not None and ssh.proxy_jump.strip():
        mistakes += _jump_mistakes(ssh.proxy_jump, (*at, "proxy_jump"))
    if ssh.port is not None and not 1 <= ssh.port <= 65535:
        mistakes.append(Mistake((*at, "port"), f"{named((*at, 'port'))} must be from 1 to 65535, not {ssh.port}", "22 is usual"))
    if ssh.identity_file is not None and ssh.identity_file.strip():
        mistakes += _identity_mistakes(ssh.identity_file, (*at, "identity_file"), folder, guess=guess)
    return mistakes


def _jump_mistakes(text: str, at: Place) -> list[Mistake]:
    hint = "write host or user@host:port, or several as a,b; none goes through no bastion"
    return [Mistake(at, f"{named(at)} {typed(text)} is no bastion", hint)] if not all(map(_is_bastion, text.split(","))) else []


def _is_bastion(text: str) -> bool:
    place = text.removeprefix("ssh://").rpartition("@")[2]
    if re.search(r"\s", text):
        return False
    if place.count(":") > 1 and not place.startswith("["):
        return _is_address(place)
    found = re.fullmatch(r"(\[[^\]]+\]|[A-Za-z0-9_][A-Za-z0-9._-]*)(?::([1-9][0-9]{0,4}))?", place)
    return found is not None and int(found[2] or 22) <= 65535 and (found[1][0] != "[" or _is_address(found[1][1:-1]))


def _identity_mistakes(text: str, at: Place, folder: Path, *, guess: bool) -> list[Mistake]:
    if too_long := path_mistakes(text, at):
        return too_long
    path = _identity_path(text, folder)
    name = f"the identity file {typed(text)}"
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if os.path.exists(f"{path}.pub"):  # the agent has the other half
            return []
        near = nearest_file(path, text) if guess else None
        return [Mistake(at, f"{name} {not_there(path)}", near or f"it is looked for as {path}; without the key ssh's own are tried")]
    except (OSError, ValueError) as error:
        return [
            Mistake(at, f"{name} cannot be read: {error.strerror if isinstance(error, OSError) else error}", "name a private key's file")
        ]
    if not stat.S_ISREG(found.st_mode):
        return [Mistake(at, f"{name} is not a file", "name a private key's file")]
    if found.st_mode & 0o077 and found.st_uid == os.getuid() and not path.endswith(".pub"):  # OpenSSH's own rule, of private keys
        return [Mistake(at, f"{name} is open to others, and ssh refuses such a key", f"chmod 600 {shlex.quote(path)}")]
    if not os.access(path, os.R_OK):
        return [Mistake(at, f"{name} cannot be read by you", "name a key of your own")]
    return []


def _merged(base: SshOptions, over: SshFile | None, folder: Path) -> SshOptions:
    if over is None:
        return base
    key = base.identity_file if over.identity_file is None else _identity_path(over.identity_file, folder)
    return SshOptions(
        over.user or base.user,
        over.port or base.port,
        key,
        over.proxy_jump or base.proxy_jump,
        over.host_keys or base.host_keys,
    )


def _identity_path(text: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(text))


def _gpus(gpus: int | list[int] | Literal["auto"]) -> int | tuple[int, ...] | Literal["auto"]:
    return tuple(gpus) if isinstance(gpus, list) else gpus


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
