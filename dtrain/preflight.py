"""What all nodes' facts together say against a job. Pure: a thousand recorded nodes are judged as real ones are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from ipaddress import ip_address

from dtrain.findings import ENDS_AT_LOGOUT, KINDS, Finding, listed
from dtrain.node.wire import Address, NodeFacts
from dtrain.plan import counted
from dtrain.spec import ClusterSpec
from dtrain.spec.cluster import CPU_WORKERS

_CLOCK_S = 60.0
_SHM_BYTES = 256 << 20  # Docker gives 64 MiB
_MEMLOCK_BYTES = 1 << 20
_NOFILE = 1024
_FREE_BYTES = 1 << 30
_PYTHON = "set python: in the cluster file to one that has it"
TESTED_TORCH = "2.13"  # by the trainers' tests, as pyproject.toml says

# What has to agree, and in which words a node has it; "" where it has none, which is no difference but a lack of its own.
_EQUAL: dict[str, tuple[str, Callable[[NodeFacts], str]]] = {
    "torch-differs": ("torch", lambda facts: facts.torch_version),
    "nccl-differs": ("NCCL", lambda facts: facts.nccl_version),
    "cuda-differs": ("torch for CUDA", lambda facts: facts.cuda_version),
    "python-differs": ("Python", lambda facts: ".".join(facts.python_version.split(".")[:2])),
    "driver-differs": ("GPU driver", lambda facts: facts.machine.gpu_driver),
    "gpu-model-differs": ("GPUs", lambda facts: " and ".join(sorted({gpu.name for gpu in facts.gpus}))),
}


def judge(
    facts: Mapping[str, NodeFacts],
    clock_offsets_s: Mapping[str, float],
    *,
    is_trainer: bool = False,
    brings_torch: bool = False,
    is_one_machine: bool = False,
) -> tuple[Finding, ...]:
    """What differs from the majority, and what is too little on one node alone.

    Args:
        clock_offsets_s: how far each node's clock is ahead of this machine's.
        is_trainer: a built-in one runs there, which was not tested with every torch.
        brings_torch: the job's setup may do so.
        is_one_machine: nobody else has to reach it.
    """
    lacking = {} if brings_torch else {node: one.python for node, one in facts.items() if not one.torch_version}
    found = [
        Finding("torch-missing", nodes, f"{listed(nodes)}: torch is not installed for {python}", f"{_install(python)}, or {_PYTHON}")
        for python, nodes in _by_value(lacking).items()
    ]
    found += [
        finding
        for name, (what, value) in _EQUAL.items()
        for finding in _differs(name, what, {node: value(one) for node, one in facts.items()})
    ]
    alone = {
        "workdir-missing": {node: one.missing for node, one in facts.items() if one.missing},
        "torch-untested": {
            node: f"torch {one.torch_version}, and the trainers are tested with {TESTED_TORCH}"
            for node, one in facts.items()
            if is_trainer and not brings_torch and one.torch_version and not one.torch_version.startswith(f"{TESTED_TORCH}.")
        },
        "left-over": {node: text for node, one in facts.items() if (text := _left_over(one))},
        ENDS_AT_LOGOUT: {
            node: "systemd there ends what a user leaves running" for node, one in facts.items() if one.machine.ends_at_logout
        },
        "clock-skew": {node: _clock(offset_s) for node, offset_s in clock_offsets_s.items() if abs(offset_s) >= _CLOCK_S},
        "shm-small": {
            node: f"/dev/shm holds {_size(one.machine.shm_bytes)}" for node, one in facts.items() if one.machine.shm_bytes < _SHM_BYTES
        },
        "memlock-low": {node: text for node, one in facts.items() if (text := _memlock(one))},
        "nofile-low": {
            node: f"{one.machine.limits.nofile} files may be open"
            for node, one in facts.items()
            if _is_below(one.machine.limits.nofile, _NOFILE)
        },
        "disk-low": {
            node: f"{_size(one.machine.free_bytes)} free under {one.node_dir}"
            for node, one in facts.items()
            if one.machine.free_bytes < _FREE_BYTES
        },
        "host-name-loopback": {node: text for node, one in facts.items() if not is_one_machine and (text := _name(one))},
    }
    return (*found, *(finding for name, texts in alone.items() for finding in _by_text(name, texts)))


def judge_gpus(cluster: ClusterSpec, facts: Mapping[str, NodeFacts]) -> tuple[Finding, ...]:
    """Machines that have lost a GPU, and those that get CPU workers where nobody said so: a number was asked of them, others have
    GPUs, or nvidia-smi is there and fails.

    Those that this machine plays without one are there to try things with.
    """
    if cluster.device == "cpu":
        return ()
    lost = {node: one.gpu_fault for node, one in facts.items() if one.gpus and one.gpu_fault}
    some_have = any(one.gpus for one in facts.values())
    without: dict[str, str] = {}
    for instance in cluster.instances if cluster.device == "auto" else ():
        one = facts.get(instance.name)
        if one is None or one.gpus or isinstance(instance.gpus, tuple) or (one.gpu_fault and one.machine.gpu_driver):
            continue  # the last two get no CPU workers (plan.py)
        if one.gpu_fault or (instance.host is not None and (some_have or instance.gpus != "auto")):
            workers = counted(CPU_WORKERS if instance.gpus == "auto" else instance.gpus, "CPU worker")
            without[instance.name] = f"{one.gpu_fault or 'no GPU'}; it gets {workers}"
    return (*_by_text("gpu-lost", lost), *_by_text("no-gpu", without))


def contradictions(env: Mapping[str, str], addresses: Mapping[str, Address]) -> tuple[Finding, ...]:
    """Where the user's own words about interfaces, which win, are not what the nodes have proved."""
    found = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name in env:
            others = {
                node: f"env says {name}={env[name]}, and the others reach it over {address.interface}"
                for node, address in addresses.items()
                if address.interface and not _may_use(name, env[name], address.interface)
            }
            found += _by_text("env-contradicts", others)
    return tuple(found)


def _may_use(name: str, value: str, interface: str) -> bool:
    """Gloo takes names. NCCL takes their beginnings, names behind `=`, and all others behind `^`."""
    is_nccl = name == "NCCL_SOCKET_IFNAME"
    is_except = is_nccl and value.startswith("^")
    listed = value[1:] if is_except else value
    is_whole = not is_nccl or listed.startswith("=")
    names = listed.lstrip("=").split(",") if is_nccl else listed.split(",")
    return any(interface == one if is_whole else interface.startswith(one) for one in names) != is_except


def _install(python: str) -> str:
    if not python.startswith("/usr/bin/"):
        return f"{python} -m pip install torch"
    # into the system's own pip may not install (PEP 668)
    return f"{python} -m venv ~/train && ~/train/bin/pip install torch, and write python: ~/train/bin/python in the cluster file"


def _differs(name: str, what: str, values: Mapping[str, str]) -> list[Finding]:
    have = {node: value for node, value in values.items() if value}
    counts = Counter(have.values())
    if len(counts) < 2:
        return []
    norm, number = counts.most_common(1)[0]  # of equal numbers the first node's
    rest = f"the other {number} have {norm}" if number > 1 else f"{next(node for node, value in have.items() if value == norm)} has {norm}"
    return [
        Finding(name, nodes, f"{listed(nodes)}: {what} {value}, {rest}", KINDS[name].cure)
        for value, nodes in _by_value(have).items()
        if value != norm
    ]


def _by_text(name: str, texts: Mapping[str, str]) -> list[Finding]:
    """One finding for all nodes that have the same to say."""
    return [Finding(name, nodes, f"{listed(nodes)}: {text}", KINDS[name].cure) for text, nodes in _by_value(texts).items()]


def _by_value(values: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    return {value: tuple(some) for value, some in nodes.items()}


def _left_over(facts: NodeFacts) -> str:
    """One line for all of them: seldom there are several."""
    return "; ".join(
        f"job {one.job} had left {one.num_processes} process{'' if one.num_processes == 1 else 'es'} running, now ended"
        + (f" but for {', '.join(map(str, one.survivors))}, which KILL does not end" if one.survivors else "")
        for one in facts.machine.left_over
    )


def _clock(offset_s: float) -> str:
    return f"its clock is {abs(offset_s) / 60:.0f} min {'ahead of' if offset_s > 0 else 'behind'} this machine's"


def _memlock(facts: NodeFacts) -> str:
    limit = facts.machine.limits.memlock_bytes
    if limit is None or limit >= facts.machine.memory_bytes:
        return ""
    if facts.machine.has_infiniband:
        return f"it has InfiniBand, and {_size(limit)} of memory may be locked"
    return f"{_size(limit)} of memory may be locked" if limit < _MEMLOCK_BYTES else ""


def _name(facts: NodeFacts) -> str:
    means = facts.machine.name_means
    if len(facts.addresses) < 2 or not means or not all(ip_address(one.partition("%")[0]).is_loopback for one in means):
        return ""
    return f"its own name means {', '.join(means)} there"


def _is_below(limit: int | None, least: int) -> bool:
    return limit is not None and limit < least


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
