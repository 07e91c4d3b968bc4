"""The launch plan: what every node will run, as a value. It is shown before anything happens, stored, and what runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.bench.config import AllreduceConfig
from dtrain.errors import DtrainError, GpusMissing, InFile, NodesBusy, PreflightFailed, Problem, SpecError
from dtrain.node.wire import Address, Gpu, GpuHolder, NodeFacts
from dtrain.shell_words import shell_words, visible
from dtrain.spec import Command, Instance, JobSpec, Module, Run, Script
from dtrain.spec.cluster import CPU_WORKERS
from dtrain.spec.mistake import named
from dtrain.spec.trainer import Misfit, plan_training
from dtrain.trainers.batch import BatchPlan
from dtrain.trainers.config import TrainerConfig
from dtrain.trainers.layout import PipelinePlan

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Worker:
    """One training process, numbered as torchrun numbers them."""

    node: str
    rank: int  # 0 .. cluster_size-1 over the whole job
    local_rank: int  # 0 .. nproc_per_node-1 on its node


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the nodes meet, as they proved it to each other."""

    addresses: Mapping[str, Address]  # by node: where all that tried reached it
    port: int  # of the first node, which keeps it for the job


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node's part. What only the node itself can say reads `<python>` and so on until it was probed."""

    name: str
    node_rank: int
    workers: tuple[Worker, ...]  # under launcher: none the one command, numbered as its node
    device: str  # cpu | cuda | <device>
    gpus: tuple[int, ...]  # indices, one per worker; empty on CPUs
    cores_per_worker: int | None
    python: str
    address: str
    interface: str
    bundle: str
    job_folder: str
    output_dir: str
    num_gpus: int | None  # or CPU workers: what counts for the cluster size; None until the node said it
    mpirun: str
    mpi_daemon: str
    activate: str | None = None  # lines for bash, in whose environment all of it runs
    python_version: str = "<version>"
    torch_version: str = "<version>"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A whole job, ready to be turned into commands by its launcher."""

    name: str
    launcher: str
    nodes: tuple[NodePlan, ...]
    cluster_size: int | None  # instances x GPUs per instance; None until the nodes said how many GPUs they have
    master_address: str
    master_port: int | None  # None until the first node keeps one
    run: str  # what the workers run, in words; lines where the job's command is
    batch: BatchPlan | None  # the arithmetic of a built-in trainer
    total_iterations: int | None
    grace_s: float
    lease_s: float | None
    pipeline: PipelinePlan | None = None  # of a built-in trainer
    predicted_bubble: float | None = None  # of the pipeline, 0..1
    setup: str | None = None  # lines for bash, once on each node before the workers
    epochs: int | None = None  # of a built-in trainer; None where it is told for how many iterations

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(worker for node in self.nodes for worker in node.workers)


def make_plan(
    spec: JobSpec,
    facts: Mapping[str, NodeFacts] | None = None,
    rendezvous: Rendezvous | None = None,
    *,
    lease_s: float | None = None,
) -> LaunchPlan:
    """Work out ranks, devices, the rendezvous and the training arithmetic.

    Args:
        facts: what each node said, by node name; without it nothing is asked of any node, and what is open says so.
        rendezvous: the addresses and the port that the nodes proved.
        lease_s: a foreground job stops when its launcher is gone for longer.

    Raises:
        GpusMissing: a node has fewer GPUs than asked for.
        NodesBusy: it has them, and others hold them.
        PreflightFailed: a node cannot run the job.
        SpecError: the batch does not fit the cluster.
    """
    instances = spec.cluster.instances
    choices = [_device(spec, instance, facts[instance.name] if facts else None) for instance in instances]
    choices, faults = _hand_out_gpus(instances, choices)
    if faults:
        raise faults[0]
    num_cpu_workers_here = sum(choice.count or 0 for instance, choice in zip(instances, choices, strict=True) if instance.host is None)
    nodes = []
    rank = 0
    for node_rank, (instance, choice) in enumerate(zip(instances, choices, strict=True)):
        found = facts[instance.name] if facts else None
        meeting = rendezvous.addresses[instance.name] if rendezvous else None
        count = choice.count or 0
        workers = tuple(Worker(instance.name, rank + local_rank, local_rank) for local_rank in range(count))
        if spec.launcher == "none":
            workers = (Worker(instance.name, node_rank, 0),)
        rank += count
        sharing = num_cpu_workers_here if instance.host is None else count
        nodes.append(
            NodePlan(
                name=instance.name,
                node_rank=node_rank,
                workers=workers,
                device=choice.device,
                gpus=choice.gpus,
                cores_per_worker=max(1, found.cores // sharing) if found and sharing else None,
                python=found.python if found else python_of(instance),
                address=meeting.address if meeting else _address_of(instance),
                interface=meeting.interface if meeting else "<interface>",
                bundle=found.bundle if found else "<bundle>",
                job_folder=found.job_folder if found else "<job folder>",
                output_dir=spec.outputs if spec.outputs.startswith("/") else found.output_dir if found else "<output folder>",
                num_gpus=choice.count,
                mpirun=found.mpirun if found else "<mpirun>",
                mpi_daemon=found.mpi_daemon if found else "<orted>",
                activate=instance.activate,
                python_version=found.python_version if found else "<version>",
                torch_version=found.torch_version if found else "<version>",
            )
        )
    cluster_size = None if any(choice.count is None for choice in choices) else rank
    pipeline, batch = _training(spec, cluster_size)
    return LaunchPlan(
        name=spec.name,
        launcher=spec.launcher,
        nodes=tuple(nodes),
        cluster_size=cluster_size,
        master_address=nodes[0].address,
        master_port=rendezvous.port if rendezvous else None,
        run=describe_run(spec.run),
        pipeline=pipeline,
        predicted_bubble=pipeline.bubble if pipeline else None,
        batch=batch,
        epochs=spec.run.epochs if isinstance(spec.run, TrainerConfig) else None,
        total_iterations=_total_iterations(spec, batch),
        grace_s=spec.grace,
        setup=spec.setup,
        lease_s=lease_s,
    )


def gpu_faults(spec: JobSpec, facts: Mapping[str, NodeFacts]) -> tuple[DtrainError, ...]:
    """Why nodes do not give the GPUs that the job wants: of those that said what they have, whatever else they lack."""
    faults: list[DtrainError] = []
    instances, choices = [], []
    for instance in spec.cluster.instances:
        if instance.name in facts:
            try:
                choices.append(_device(spec, instance, facts[instance.name]))
                instances.append(instance)
            except PreflightFailed as error:
                faults.append(error)
    return (*faults, *_hand_out_gpus(tuple(instances), choices)[1])


def python_of(instance: Instance) -> str:
    """The interpreter that a node's workers are to run under: a path, or a name on its PATH."""
    if instance.python is not None:
        return instance.python
    return sys.executable if instance.host is None and instance.activate is None else "python3"


def describe_run(run: Run) -> str:
    """What the workers run, as a person would type it."""
    match run:
        case Script(path, args):
            return shell_words((path, *args))
        case Module(name, args):
            return shell_words(("-m", name, *args))
        case Command(argv):
            return bash_text(argv) or shell_words(argv)
        case TrainerConfig():
            return visible(f"trainer {run.model} on {run.data}")
        case AllreduceConfig():
            return "allreduce benchmark"


def bash_text(argv: Sequence[str]) -> str | None:
    """What the user wrote, where a command was given as text that can be read: its lines, and the arguments that it gets as "$@"."""
    match tuple(argv):
        case ("bash", "-c", text, "bash", *arguments) if text.strip() and text.replace("\n", "").replace("\t", "").isprintable():
            return text.strip("\n") + (f'\nwith {shell_words(arguments)} as "$@"' if arguments else "")
        case _:
            return None


def _address_of(instance: Instance) -> str:
    """Where the other nodes reach an instance, as far as the files say."""
    if instance.address is not None:
        return instance.address
    return LOOPBACK if instance.host is None else "<address>"


def counted(number: int, thing: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def at_port(address: str, port: int | str) -> str:
    """10.0.0.1:29500, [fd00::1]:29500."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@dataclass(frozen=True, slots=True)
class _Choice:
    device: str
    count: int | None  # workers; None while the node's GPUs are unknown
    gpus: tuple[int, ...]
    there: tuple[Gpu, ...] = ()  # of the machine, where they are to be chosen from


def _device(spec: JobSpec, instance: Instance, found: NodeFacts | None) -> _Choice:
    wanted, device = instance.gpus, spec.cluster.device
    number = None if wanted == "auto" else wanted if isinstance(wanted, int) else len(wanted)
    may_be_cpu = device == "auto" and not isinstance(wanted, tuple)
    if found and not found.gpus and found.gpu_fault and device != "cpu" and (found.machine.gpu_driver or not may_be_cpu):
        raise PreflightFailed(
            f"{instance.name}: {found.gpu_fault}",
            hint="run nvidia-smi there: after an update of its driver a machine wants a restart; "
            "device: cpu in the cluster file trains on CPU workers",
            finding="gpu-unreadable",
        )
    if device == "cpu" or (found and not found.gpus and may_be_cpu):
        return _Choice("cpu", CPU_WORKERS if number is None else number, ())
    if found is None:
        indices = wanted if isinstance(wanted, tuple) else ()
        return _Choice("<device>" if device == "auto" else device, number, indices)
    if not found.gpus:
        raise PreflightFailed(
            f"{instance.name}: the job wants GPUs and there is none",
            hint="set device: cpu in the cluster file to train on CPU workers",
            finding="gpu-missing",
        )
    return _Choice("cuda", number, (), found.gpus)


def _hand_out_gpus(instances: tuple[Instance, ...], choices: list[_Choice]) -> tuple[list[_Choice], list[NodesBusy]]:
    """Choose GPUs, the lowest free ones first; instances played by this machine take them in turn from the same ones.

    Returns:
        And what stands against it, the worst first.
    """
    num_here = sum(instance.host is None for instance in instances)
    given_here: set[int] = set()
    handed_out, missing, busy = [], [], []
    for instance, choice in zip(instances, choices, strict=True):
        if not choice.there:
            handed_out.append(choice)
            continue
        left = [gpu for gpu in choice.there if instance.host is not None or gpu.index not in given_here]
        count = choice.count if choice.count is not None else len(choice.there) // (num_here if instance.host is None else 1)
        wanted = _wanted(instance, left, count)
        if count == 0 or len(wanted) < count:
            missing.append(_missing(instance, choice.there, left, count))
        elif held := [gpu for gpu in wanted if _is_held(gpu)]:
            # for a number, whatever is held is in the way; else only what was named
            shown = [gpu for gpu in left if _is_held(gpu)] if isinstance(instance.gpus, int) else held
            asked = counted(count, "GPU") if isinstance(instance.gpus, int) else f"GPU {_listed(wanted)}"
            busy.append("\n  ".join((f"{instance.name}: {asked} wanted, {count - len(held)} free", *map(_held_by, shown))))
        given_here |= {gpu.index for gpu in wanted} if instance.host is None else set()
        handed_out.append(_Choice("cuda", count, tuple(gpu.index for gpu in wanted)))
    faults: list[NodesBusy] = []
    if missing:
        faults.append(GpusMissing("\n".join(missing), hint="ask for fewer, or for others, in gpus_per_instance, or set device: cpu"))
    if busy:
        hint = "dtrain launch --wait waits for them; gpus_per_instance: N takes any N that are free"
        faults.append(NodesBusy("\n".join(busy), hint=hint))
    return handed_out, faults


def _wanted(instance: Instance, left: list[Gpu], count: int) -> list[Gpu]:
    """The GPUs that an instance is to have, as many as there are, free or not."""
    if isinstance(instance.gpus, tuple):
        by_index = {gpu.index: gpu for gpu in left}
        return [by_index[index] for index in instance.gpus if index in by_index]
    if instance.gpus == "auto":
        return left[:count]
    return sorted(left, key=lambda gpu: (_is_held(gpu), gpu.index))[:count]


def _missing(instance: Instance, there: tuple[Gpu, ...], left: list[Gpu], count: int) -> str:
    if isinstance(instance.gpus, tuple):
        absent = min(set(instance.gpus) - {gpu.index for gpu in left})
        return f"{instance.name}: no GPU {absent}; there are {_listed(left)}"
    return f"{instance.name}: {counted(max(count, 1), 'GPU')} wanted, {len(left)} of {len(there)} left"


def _is_held(gpu: Gpu) -> bool:
    return bool(gpu.job or gpu.holders)


def _held_by(gpu: Gpu) -> str:
    job = [f"job {gpu.job}"] if gpu.job else []
    return f"GPU {gpu.index} is held by " + "; ".join((*job, *map(_process, gpu.holders)))


def _process(holder: GpuHolder) -> str:
    """As much of a process as is known: `pid 4711 of ana, 10.0 GiB, python train.py`."""
    pid = f"pid {holder.pid}" if holder.pid else "a process"
    user = f" of {holder.user}" if holder.user else " that is not seen there"
    memory = "" if holder.memory_bytes is None else f", {holder.memory_bytes / 2**30:.1f} GiB"
    return f"{pid}{user}{memory}" + (f", {holder.command}" if holder.command else "")


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)


def _training(spec: JobSpec, cluster_size: int | None) -> tuple[PipelinePlan | None, BatchPlan | None]:
    """Raises SpecError: what does not fit the cluster, as a mistake in the job file."""
    if not isinstance(spec.run, TrainerConfig) or cluster_size is None:
        return None, None
    try:
        return plan_training(spec.run, cluster_size)
    except Misfit as misfit:
        at, mistake = misfit.mistake.at, misfit.mistake
        while at and named(at) not in spec.places:  # a default, whose place is that of the mapping around it
            at = at[:-1]
        raise SpecError([Problem(spec.places.get(named(at), InFile(str(spec.path))), mistake.message, mistake.hint)]) from misfit


def _total_iterations(spec: JobSpec, batch: BatchPlan | None) -> int | None:
    if not isinstance(spec.run, TrainerConfig):
        return None
    if spec.run.iterations is not None:
        return spec.run.iterations
    if batch is None or batch.iterations_per_epoch is None or spec.run.epochs is None:
        return None
    return batch.iterations_per_epoch * spec.run.epochs
