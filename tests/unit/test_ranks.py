"""Ranks under any mix of GPUs: each once, counted through the nodes, and from 0 on every node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.launchers import node_commands
from dtrain.node.wire import Address, Gpu, NodeFacts
from dtrain.plan import LaunchPlan, Rendezvous, make_plan
from dtrain.spec import JobSpec, load_job
from tests.facts import FACTS

RUNS = {"torchrun": "script: train.py", "mpirun": "script: train.py\nlauncher: mpirun", "none": "command: [run]\nlauncher: none"}


@dataclass(frozen=True)
class Machine:
    """What a machine has, and what the cluster file wants of it."""

    num_gpus: int
    wanted: int | list[int] | str

    @property
    def num_workers(self) -> int:
        if isinstance(self.wanted, list):
            return len(self.wanted)
        return self.wanted if isinstance(self.wanted, int) else self.num_gpus or 2


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    num_gpus = draw(st.integers(0, 16))
    options: list[st.SearchStrategy[int | list[int] | str]] = [st.just("auto"), st.integers(1, num_gpus or 16)]
    if num_gpus:
        options.append(st.lists(st.integers(0, num_gpus - 1), min_size=1, unique=True))
    wanted = draw(st.one_of(options))
    return Machine(num_gpus, wanted)


def spec_of(folder: Path, cluster: list[Machine], launcher: str) -> JobSpec:
    (folder / "train.py").touch()
    instances = ", ".join(f"{{host: n{index}, gpus: {machine.wanted}}}" for index, machine in enumerate(cluster))
    (folder / "job.yaml").write_text(f"{RUNS[launcher]}\ncluster: {{instances: [{instances}]}}\n")
    return load_job(folder / "job.yaml", environ={})


def facts_of(machine: Machine) -> NodeFacts:
    gpus = tuple(Gpu(index, "GPU", None, None) for index in range(machine.num_gpus))
    return replace(FACTS, gpus=gpus)


def plan_of(spec: JobSpec, cluster: list[Machine]) -> LaunchPlan:
    names = [instance.name for instance in spec.cluster.instances]
    found = {name: facts_of(machine) for name, machine in zip(names, cluster, strict=True)}
    return make_plan(spec, found, Rendezvous({name: Address("eth0", f"10.0.0.{i}", 24, 0) for i, name in enumerate(names)}, 29500))


_SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@_SETTINGS
@given(cluster=st.lists(machines(), min_size=1, max_size=24), launcher=st.sampled_from(["torchrun", "mpirun"]))
def test_every_rank_is_there_once_and_counts_through_the_nodes(cluster: list[Machine], launcher: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, cluster, launcher)
    plan = plan_of(spec, cluster)
    assert sorted(worker.rank for worker in plan.workers) == [*range(plan.cluster_size or 0)]  # a permutation of 0..world_size-1
    assert [len(node.workers) for node in plan.nodes] == [machine.num_workers for machine in cluster]
    begin = 0
    for node_rank, (node, machine) in enumerate(zip(plan.nodes, cluster, strict=True)):
        assert node.node_rank == node_rank
        assert [worker.rank for worker in node.workers] == [*range(begin, begin + len(node.workers))]
        assert [worker.local_rank for worker in node.workers] == [*range(len(node.workers))]
        assert {worker.node for worker in node.workers} == {node.name}
        assert len(node.gpus) in (0, len(node.workers)) and len({*node.gpus}) == len(node.gpus)
        assert not isinstance(machine.wanted, list) or node.gpus == tuple(machine.wanted)
        begin += len(node.workers)
    # what is known before anything was asked stays
    before = make_plan(spec)
    told = [(node.workers, after.workers) for node, after in zip(before.nodes, plan.nodes, strict=True)]
    assert before.cluster_size is None or [early for early, _ in told] == [late for _, late in told]


@_SETTINGS
@given(cluster=st.lists(machines(), min_size=1, max_size=8), launcher=st.sampled_from(["torchrun", "mpirun"]))
def test_a_launcher_is_told_those_ranks(cluster: list[Machine], launcher: str, tmp_path: Path) -> None:
    """By the numbers of workers in the order of the nodes, which is all that torchrun and mpirun want."""
    spec = spec_of(tmp_path, cluster, launcher)
    commands = node_commands(spec, plan_of(spec, cluster), "job")
    if launcher == "torchrun":
        told = [next(int(text.partition("=")[2]) for text in command.argv if text.startswith("--nproc-per-node=")) for command in commands]
    else:
        told = [int(count) for flag, count in zip(commands[0].argv, commands[0].argv[1:], strict=False) if flag == "-np"]
    assert told == [machine.num_workers for machine in cluster]
    assert [command.worker_env["NODE_RANK"] for command in commands] == [str(index) for index in range(len(cluster))]


@_SETTINGS
@given(cluster=st.lists(machines(), min_size=1, max_size=24))
def test_without_a_launcher_a_node_has_one_command_with_its_own_number(cluster: list[Machine], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, cluster, "none")
    plan = plan_of(spec, cluster)
    assert [(worker.rank, worker.local_rank) for worker in plan.workers] == [(index, 0) for index in range(len(cluster))]
    assert plan.cluster_size == sum(machine.num_workers for machine in cluster)
