"""The plan: ranks, devices and arithmetic from a spec and what the nodes said."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dtrain.errors import GpusMissing, NodesBusy, PreflightFailed, SpecError
from dtrain.launchers import node_commands
from dtrain.node.wire import Address, Gpu, GpuHolder, NodeFacts
from dtrain.plan import LaunchPlan, Rendezvous, make_plan
from dtrain.render.plan import print_plan
from dtrain.spec import JobSpec, Overrides, load_job
from tests.facts import FACTS

LOOPBACK = Address("lo", "127.0.0.1", 8, 0)


def _spec(folder: Path, cluster: str, rest: str = "script: train.py\n") -> JobSpec:
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(f"{rest}cluster: {cluster}\n")
    return load_job(folder / "job.yaml", environ={})


def _facts(spec: JobSpec, *, gpus: int = 0, cores: int = 8, held: Mapping[int, GpuHolder | str] | None = None) -> dict[str, NodeFacts]:
    there = tuple(_gpu(index, (held or {}).get(index)) for index in range(gpus))
    return {
        instance.name: replace(FACTS, host_name=instance.name, cores=cores, gpus=there, addresses=(LOOPBACK,))
        for instance in spec.cluster.instances
    }


def _gpu(index: int, holder: GpuHolder | str | None) -> Gpu:
    """A GPU, held by a process, reserved by the dtrain job of that name, or free, whatever a desktop draws with it."""
    match holder:
        case GpuHolder():
            return Gpu(index, "GPU", 80 << 30, 9 << 30, holders=(holder,))
        case str():
            return Gpu(index, "GPU", 80 << 30, 0, job=holder)
        case None:
            return Gpu(index, "GPU", 80 << 30, 1 << 30)


def _plan(spec: JobSpec, **facts: Any) -> LaunchPlan:
    rendezvous = Rendezvous({instance.name: LOOPBACK for instance in spec.cluster.instances}, 29500)
    return make_plan(spec, _facts(spec, **facts), rendezvous)


def test_ranks_count_through_the_nodes_in_their_order(tmp_path: Path) -> None:
    plan = _plan(_spec(tmp_path, "{instances: 3, gpus_per_instance: 2, device: cpu}"))
    assert [(worker.node, worker.rank, worker.local_rank) for worker in plan.workers] == [
        ("node0", 0, 0), ("node0", 1, 1), ("node1", 2, 0), ("node1", 3, 1), ("node2", 4, 0), ("node2", 5, 1),
    ]  # fmt: skip
    assert (plan.cluster_size, plan.master_address, plan.master_port) == (6, "127.0.0.1", 29500)


def test_each_node_meets_the_others_where_that_was_proved(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "{instances: [a, b], device: cpu}")
    chosen = {"a": Address("eth1", "10.0.0.1", 24, 25000), "b": Address("", "10.0.0.2", 32, 0)}
    plan = make_plan(spec, _facts(spec), Rendezvous(chosen, 29501))
    assert [(node.address, node.interface) for node in plan.nodes] == [("10.0.0.1", "eth1"), ("10.0.0.2", "")]
    assert (plan.master_address, plan.master_port) == ("10.0.0.1", 29501)
    first, second = node_commands(spec, plan, "job")
    assert first.worker_env["GLOO_SOCKET_IFNAME"] == "eth1" and "GLOO_SOCKET_IFNAME" not in second.worker_env
    open_ = make_plan(spec)
    assert [(node.address, node.interface) for node in open_.nodes] == [("<address>", "<interface>")] * 2
    assert open_.master_port is None


def test_cores_are_shared_by_all_workers_of_this_machine(tmp_path: Path) -> None:
    plan = _plan(_spec(tmp_path, "{instances: 2, gpus_per_instance: 2, device: cpu}"), cores=8)
    assert [node.cores_per_worker for node in plan.nodes] == [2, 2]


def test_auto_takes_all_gpus_of_this_machine_in_turn_and_two_cpu_workers_without(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "{instances: 2}")
    assert [node.gpus for node in _plan(spec, gpus=4).nodes] == [(0, 1), (2, 3)]
    without = _plan(spec)
    assert [(node.device, len(node.workers)) for node in without.nodes] == [("cpu", 2), ("cpu", 2)]
    assert make_plan(spec).cluster_size is None  # nobody was asked yet


def test_a_list_of_gpus_is_taken_as_it_is(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "{instances: 1, gpus_per_instance: [5, 2]}")
    plan = _plan(spec, gpus=8)
    assert plan.nodes[0].gpus == (5, 2)
    env = node_commands(spec, plan, "job")[0].worker_env
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("5,2", "PCI_BUS_ID")


ANA = GpuHolder(4711, "ana", 10 << 30, "python train.py")


def test_a_number_takes_the_lowest_free_gpus(tmp_path: Path) -> None:
    held = {0: ANA, 2: "digits 4k2j"}
    one = _plan(_spec(tmp_path, "{instances: 1, gpus_per_instance: 2}"), gpus=4, held=held)
    assert one.nodes[0].gpus == (1, 3)
    two = _plan(_spec(tmp_path, "{instances: 2, gpus_per_instance: 2}"), gpus=6, held=held)
    assert [node.gpus for node in two.nodes] == [(1, 3), (4, 5)]
    far = _plan(_spec(tmp_path, "{instances: [a, b], gpus_per_instance: 2}"), gpus=4, held=held)
    assert [node.gpus for node in far.nodes] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    ("cluster", "first", "shown"),
    [
        ("{instances: 1, gpus_per_instance: 3}", "node0: 3 GPUs wanted, 2 free", [0, 2]),
        ("{instances: 1, gpus_per_instance: [3, 2]}", "node0: GPU 3, 2 wanted, 1 free", [2]),
        ("{instances: 1}", "node0: GPU 0, 1, 2, 3 wanted, 2 free", [0, 2]),
        ("{instances: [b], gpus_per_instance: 4}", "b: 4 GPUs wanted, 2 free", [0, 2]),
    ],
)
def test_gpus_that_others_hold_are_refused_with_who_holds_them(tmp_path: Path, cluster: str, first: str, shown: list[int]) -> None:
    with pytest.raises(NodesBusy) as caught:
        _plan(_spec(tmp_path, cluster), gpus=4, held={0: ANA, 2: "digits 4k2j"})
    told = {0: "  GPU 0 is held by pid 4711 of ana, 10.0 GiB, python train.py", 2: "  GPU 2 is held by job digits 4k2j"}
    assert caught.value.message.splitlines() == [first, *(told[index] for index in shown)]
    assert not isinstance(caught.value, GpusMissing) and "--wait" in str(caught.value.hint)


def test_every_busy_node_is_named_and_what_is_not_told_is_left_out(tmp_path: Path) -> None:
    hidden = GpuHolder(99, "", None, "")
    with pytest.raises(NodesBusy) as caught:
        _plan(_spec(tmp_path, "{instances: [a, b], gpus_per_instance: 1}"), gpus=1, held={0: hidden})
    assert caught.value.message == "\n".join(
        f"{node}: 1 GPU wanted, 0 free\n  GPU 0 is held by pid 99 that is not seen there" for node in ("a", "b")
    )


def test_waiting_is_no_use_where_a_node_never_has_the_gpus(tmp_path: Path) -> None:
    """Also where those that it has are held, or are held on another node."""
    with pytest.raises(GpusMissing, match=r"^node0: 3 GPUs wanted, 2 of 2 left\nhint: "):
        _plan(_spec(tmp_path, "{instances: 1, gpus_per_instance: 3}"), gpus=2, held={0: ANA})
    with pytest.raises(GpusMissing, match=r"^b: no GPU 7; there are 0, 1\nhint: "):
        _plan(_spec(tmp_path, "{instances: [{host: a, gpus: 2}, {host: b, gpus: [0, 7]}]}"), gpus=2, held={0: ANA})


@pytest.mark.parametrize(
    ("cluster", "gpus", "error"),
    [
        ("{instances: 1, gpus_per_instance: 3}", 2, GpusMissing),
        ("{instances: 2, gpus_per_instance: 2}", 3, GpusMissing),
        ("{instances: 1, gpus_per_instance: [0, 7]}", 2, GpusMissing),
        ("{instances: 3}", 2, GpusMissing),
        ("{instances: 1, device: cuda}", 0, PreflightFailed),
    ],
)
def test_gpus_that_are_not_there_are_refused(tmp_path: Path, cluster: str, gpus: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^node\d: "):
        _plan(_spec(tmp_path, cluster), gpus=gpus)


def test_the_batch_is_shared_out_over_the_replicas(tmp_path: Path) -> None:
    trainer = "trainer: {model: digits_cnn, data: digits, epochs: 3, batch: {global: 64}}\n"
    plan = _plan(_spec(tmp_path, "{instances: 2, gpus_per_instance: 2}", trainer))
    assert plan.batch is not None
    assert (plan.batch.replicas, plan.batch.per_replica_batch_size, plan.batch.iterations_per_epoch) == (4, 16, 22)
    assert plan.total_iterations == 66


def test_a_batch_that_gives_both_sizes_is_held_to_the_clusters_replicas(tmp_path: Path) -> None:
    """2 instances x 4 GPUs are a cluster size of 8; the answer stands at the option where that says the size."""
    cluster = "{instances: 2, gpus_per_instance: 4}"
    trainer = "trainer: {model: digits_cnn, data: digits, epochs: 2, batch: {global: 64, per_replica: 8}}\n"
    plan = make_plan(_spec(tmp_path, cluster, trainer))
    assert (plan.cluster_size, plan.total_iterations) == (8, 2 * (1437 // 64))
    assert plan.batch is not None and plan.batch.equation == "global batch 64 = replicas 8 x per-replica 8"
    for setting, where in (("trainer.batch.global=96", "--set trainer.batch.global"), ("cluster.instances=3", f"{tmp_path}/job.yaml:")):
        with pytest.raises(SpecError) as caught:
            load_job(tmp_path / "job.yaml", Overrides(settings=(setting,)), environ={})
        assert caught.value.problems[0].where.startswith(where)
        assert "is not replicas" in caught.value.problems[0].message


def test_a_batch_that_leaves_a_remainder_is_refused_before_any_node_is_asked(tmp_path: Path) -> None:
    trainer = "trainer:\n  model: digits_cnn\n  data: digits\n  epochs: 3\n  batch: {global: 250}\n"
    with pytest.raises(SpecError, match=r"job\.yaml:5:19: no whole number: global batch 250 = .* 62\.5\nhint: nearest: 248, 252"):
        make_plan(_spec(tmp_path, "{instances: 2, gpus_per_instance: 2}", trainer))


def test_a_hybrid_has_as_many_replicas_as_its_stages_leave(tmp_path: Path) -> None:
    trainer = "trainer: {model: gpt, data: text, iterations: 3, batch: {global: 30, micro_batches: 4}, pipeline: {stages: 2}}\n"
    plan = _plan(_spec(tmp_path, "{instances: 2, gpus_per_instance: 2}", trainer))
    assert plan.pipeline is not None and plan.pipeline.layers is not None and plan.batch is not None
    assert [[layer.name for layer in stage] for stage in plan.pipeline.layers] == [
        ["embed", "block0", "block1"],
        ["block2", "block3", "head"],
    ]
    assert (plan.pipeline.replicas, plan.batch.replicas, plan.batch.micro_batch_size, plan.batch.padding) == (2, 2, 4, 2)
    console = Console(file=io.StringIO(), record=True, width=200)
    print_plan(console, plan, None)
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert "2 replicas = cluster size 4 / 2 stages   schedule 1F1B" in lines
    assert "stage 1   ranks 2-3   block2, block3, head   116,736 parameters" in lines
    assert "predicted bubble 20.0% = (2 - 1) / (4 + 2 - 1): stages 2, micro-batches 4" in lines
    assert "global batch 30 + 2 rows of weight 0 = 2 replicas x per-replica batch 16" in lines
    assert "micro-batch 4 = per-replica batch 16 / micro-batches 4" in lines


def test_a_model_of_the_users_own_has_layers_that_the_plan_does_not_know(tmp_path: Path) -> None:
    trainer = "trainer: {model: 'my:net', data: text, iterations: 3, batch: {global: 32, micro_batches: 4}, pipeline: {stages: 4}}\n"
    console = Console(file=io.StringIO(), record=True, width=200)
    print_plan(console, make_plan(_spec(tmp_path, "{instances: 2, gpus_per_instance: 2}", trainer)), None)
    assert "stage 3   ranks 3   <layers>" in console.export_text()


def test_stages_that_do_not_share_out_the_cluster_are_refused_before_any_node_is_asked(tmp_path: Path) -> None:
    trainer = "trainer:\n  model: gpt\n  data: text\n  epochs: 3\n  batch: {global: 60, micro_batches: 4}\n  pipeline:\n    stages: 3\n"
    with pytest.raises(SpecError, match=r"job\.yaml:7:13: replicas = cluster size 4 / stages 3 .*\nhint: stages that fit: 1, 2, 4"):
        make_plan(_spec(tmp_path, "{instances: 2, gpus_per_instance: 2}", trainer))


def test_what_the_user_sets_wins_over_what_dtrain_would_choose(tmp_path: Path) -> None:
    spec = _spec(
        tmp_path, "{instances: 1, device: cpu}", "script: train.py\nenv: {OMP_NUM_THREADS: 3, GLOO_SOCKET_IFNAME: eth9, RATE: 1e-4}\n"
    )
    env = node_commands(spec, _plan(spec), "job")[0].worker_env
    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"], env["RATE"]) == ("3", "eth9", "1e-4")
    assert (env["NCCL_SOCKET_IFNAME"], env["PYTHONUNBUFFERED"]) == ("=lo", "1")


@pytest.mark.parametrize(("gpus", "size"), [("[4, 5]", 2), ("3", 3), ("auto", 2)])
def test_cpu_workers_are_known_before_any_node_is_asked(tmp_path: Path, gpus: str, size: int) -> None:
    """A list of GPUs then says no more than how many."""
    spec = _spec(tmp_path, f"{{instances: 1, gpus_per_instance: {gpus}, device: cpu}}")
    shown, later = make_plan(spec), _plan(spec, gpus=8)
    for plan in (shown, later):
        assert (plan.cluster_size, plan.nodes[0].device, plan.nodes[0].gpus, len(plan.workers)) == (size, "cpu", (), size)
        assert node_commands(spec, plan, "job")[0].worker_env["CUDA_VISIBLE_DEVICES"] == ""
    assert spec.cluster.size == size
