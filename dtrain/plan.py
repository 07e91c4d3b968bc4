"""The launch plan: what every node will run, as a value. It is shown before anything happens, stored, and what runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.bench.config import AllreduceConfig
from dtrain.errors import NodesBusy, PreflightFailed, Problem, SpecError
from dtrain.node.wire import Address, NodeFacts
from dtrain.spec import Command, Instance, JobSpec, Module, Run, Script
from dtrain.trainers.batch import BatchPlan, plan_batches
from dtrain.trainers.config import TrainerConfig
from dtrain.trainers.layout import PipelinePlan, plan_pipeline
from dtrain.trainers.zoo import DATASETS, MODELS

LOOPBACK = "127.0.0.1"
CPU_WORKERS = 2  # what `gpus_per_instance: auto` means on a machine without a GPU


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


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A whole job, ready to be turned into commands by its launcher."""

    name: str
    launcher: str
    nodes: tuple[NodePlan, ...]
    cluster_size: int | None  # instances x GPUs per instance; None until the nodes said how many GPUs they have
    master_address: str
    master_port: int | None  # None until the first node keeps one
    run: str  # what the workers run, in words
    batch: BatchPlan | None  # the arithmetic of a built-in trainer
    total_iterations: int | None
    grace_s: float
    lease_s: float | None
    pipeline: PipelinePlan | None = None  # of a built-in trainer

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
        NodesBusy: a node has fewer GPUs than asked for.
        PreflightFailed: a node cannot run the job.
        SpecError: the batch does not fit the cluster.
    """
    instances = spec.cluster.instances
    choices = [_device(spec, instance, facts[instance.name] if facts else None) for instance in instances]
    choices = _share_this_machine(instances, choices)
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
                output_dir=found.output_dir if found else "<output folder>",
                num_gpus=choice.count,
                mpirun=found.mpirun if found else "<mpirun>",
                mpi_daemon=found.mpi_daemon if found else "<orted>",
            )
        )
    cluster_size = None if any(choice.count is None for choice in choices) else rank
    pipeline = _pipeline(spec, cluster_size)
    batch = _batch(spec, cluster_size, pipeline)
    return LaunchPlan(
        name=spec.name,
        launcher=spec.launcher,
        nodes=tuple(nodes),
        cluster_size=cluster_size,
        master_address=nodes[0].address,
        master_port=rendezvous.port if rendezvous else None,
        run=describe_run(spec.run),
        pipeline=pipeline,
        batch=batch,
        total_iterations=_total_iterations(spec, batch),
        grace_s=spec.grace,
        lease_s=lease_s,
    )


def python_of(instance: Instance) -> str:
    """The interpreter that a node's workers are to run under: a path, or a name on its PATH."""
    if instance.python is not None:
        return instance.python
    return sys.executable if instance.host is None else "python3"


def describe_run(run: Run) -> str:
    """What the workers run, in a line."""
    match run:
        case Script(path, args):
            return shlex.join((path, *args))
        case Module(name, args):
            return shlex.join(("-m", name, *args))
        case Command(argv):
            return shlex.join(argv)
        case TrainerConfig():
            return f"trainer {run.model} on {run.data}"
        case AllreduceConfig():
            return "allreduce benchmark"


def _address_of(instance: Instance) -> str:
    """Where the other nodes reach an instance, as far as the files say."""
    if instance.address is not None:
        return instance.address
    return LOOPBACK if instance.host is None else "<address>"


def counted(number: int, thing: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


@dataclass(frozen=True, slots=True)
class _Choice:
    device: str
    count: int | None  # workers; None while the node's GPUs are unknown
    gpus: tuple[int, ...]
    taken_from: tuple[int, ...] = ()  # GPUs of the machine, where instances share it


def _device(spec: JobSpec, instance: Instance, found: NodeFacts | None) -> _Choice:
    wanted, device = instance.gpus, spec.cluster.device
    number = None if wanted == "auto" else wanted if isinstance(wanted, int) else len(wanted)
    if found is None:
        indices = wanted if isinstance(wanted, tuple) else ()
        return _Choice("<device>" if device == "auto" else device, number, indices)
    there = tuple(gpu.index for gpu in found.gpus)
    if device == "cpu" or (device == "auto" and not there and not isinstance(wanted, tuple)):
        return _Choice("cpu", CPU_WORKERS if number is None else number, ())
    if not there:
        raise PreflightFailed(
            f"{instance.name}: the job wants GPUs and there is none",
            hint="set device: cpu in the cluster file to train on CPU workers",
        )
    if isinstance(wanted, tuple):
        absent = [index for index in wanted if index not in there]
        if absent:
            raise NodesBusy(f"{instance.name}: no GPU {absent[0]}; there are {', '.join(map(str, there))}")
        return _Choice("cuda", len(wanted), wanted)
    return _Choice("cuda", len(there) if number is None else number, (), there)


def _share_this_machine(instances: tuple[Instance, ...], choices: list[_Choice]) -> list[_Choice]:
    """Hand out GPUs by index, lowest first; instances played by this machine take them in turn from the same ones."""
    num_here = sum(instance.host is None for instance in instances)
    used_here = 0
    shared = []
    for instance, choice in zip(instances, choices, strict=True):
        if not choice.taken_from:
            shared.append(choice)
            continue
        count = choice.count or 0
        start = 0
        if instance.host is None:
            count = count // num_here if instance.gpus == "auto" else count
            start, used_here = used_here, used_here + count
        gpus = choice.taken_from[start : start + count]
        if len(gpus) < count or count == 0:
            raise NodesBusy(
                f"{instance.name}: {max(count, 1)} GPUs wanted, {len(gpus)} of {len(choice.taken_from)} left",
                hint="ask for fewer in gpus_per_instance, or set device: cpu",
            )
        shared.append(_Choice("cuda", count, gpus))
    return shared


def _pipeline(spec: JobSpec, cluster_size: int | None) -> PipelinePlan | None:
    if not isinstance(spec.run, TrainerConfig) or spec.run.pipeline is None or cluster_size is None:
        return None
    known = MODELS.get(spec.run.model)
    try:
        return plan_pipeline(spec.run, cluster_size=cluster_size, layers=known.layers if known else None)
    except ValueError as error:
        raise _misfit(spec, error, "trainer.pipeline.stages") from error


def _batch(spec: JobSpec, cluster_size: int | None, pipeline: PipelinePlan | None) -> BatchPlan | None:
    if not isinstance(spec.run, TrainerConfig) or cluster_size is None:
        return None
    known = DATASETS.get(spec.run.data)
    num_examples = known.num_train if known else None
    replicas = cluster_size if pipeline is None else pipeline.replicas
    try:
        return plan_batches(spec.run.batch, replicas=replicas, num_examples=num_examples, pad=pipeline is not None)
    except ValueError as error:
        raise _misfit(spec, error, "trainer.batch") from error


def _misfit(spec: JobSpec, error: ValueError, at: str) -> SpecError:
    """What does not fit the cluster, as a mistake in the job file; what works stands behind the semicolon."""
    problem, _, hint = str(error).partition("; ")
    where = spec.places.get(at, spec.places.get("trainer", str(spec.path)))
    return SpecError([Problem(where, problem, hint or None)])


def _total_iterations(spec: JobSpec, batch: BatchPlan | None) -> int | None:
    if not isinstance(spec.run, TrainerConfig):
        return None
    if spec.run.iterations is not None:
        return spec.run.iterations
    if batch is None or batch.iterations_per_epoch is None or spec.run.epochs is None:
        return None
    return batch.iterations_per_epoch * spec.run.epochs
