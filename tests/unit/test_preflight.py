"""What facts of many nodes say against a job."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dtrain.bench.config import AllreduceConfig
from dtrain.findings import KINDS, Finding
from dtrain.node.wire import Address, Gpu, GpuHolder, Interface, LeftOver, Limits, NodeFacts
from dtrain.plan import gpu_faults
from dtrain.preflight import TESTED_TORCH, contradictions, judge, judge_gpus
from dtrain.render.findings import print_facts
from dtrain.render.live import LiveView
from dtrain.spec import benchmark_job
from tests.facts import FACTS, MACHINE

NO_DRIVER = replace(MACHINE, gpu_driver="")


def cluster(number: int, **changed: NodeFacts) -> dict[str, NodeFacts]:
    return {f"n{i}": changed.get(f"n{i}", FACTS) for i in range(1, number + 1)}


def told(facts: dict[str, NodeFacts], **offsets_s: float) -> list[tuple[str, str]]:
    return [(finding.name, finding.text) for finding in judge(facts, offsets_s)]


def test_nodes_that_agree_and_have_enough_give_no_word() -> None:
    assert judge(cluster(8), {f"n{i}": 59.0 for i in range(1, 9)}) == ()


@pytest.mark.parametrize(
    ("changed", "name", "text"),
    [
        ({"torch_version": "2.12.0"}, "torch-differs", "n3: torch 2.12.0, the other 7 have 2.13.0"),
        ({"nccl_version": "2.21.5"}, "nccl-differs", "n3: NCCL 2.21.5, the other 7 have 2.27.3"),
        ({"cuda_version": "11.8"}, "cuda-differs", "n3: torch for CUDA 11.8, the other 7 have 12.8"),
        ({"python_version": "3.12.1"}, "python-differs", "n3: Python 3.12, the other 7 have 3.11"),
        ({"gpus": (Gpu(0, "NVIDIA A100", 40 << 30, 0),)}, "gpu-model-differs", "n3: GPUs NVIDIA A100, the other 7 have NVIDIA H100"),
    ],
)
def test_only_what_differs_from_the_majority_is_told(changed: dict[str, Any], name: str, text: str) -> None:
    (finding,) = judge(cluster(8, n3=replace(FACTS, **changed)), {})
    assert finding == Finding(name, ("n3",), text, KINDS[name].cure)


@pytest.mark.parametrize(
    ("changed", "name", "text"),
    [
        ({"gpu_driver": "535.1"}, "driver-differs", "n2: GPU driver 535.1, the other 3 have 550.54.15"),
        ({"shm_bytes": 64 << 20}, "shm-small", "n2: /dev/shm holds 64 MiB"),
        ({"limits": Limits(64 << 10, 65536, None)}, "memlock-low", "n2: 64 KiB of memory may be locked"),
        ({"has_infiniband": True}, "memlock-low", "n2: it has InfiniBand, and 8 MiB of memory may be locked"),
        ({"limits": Limits(None, 256, None)}, "nofile-low", "n2: 256 files may be open"),
        ({"free_bytes": 3 << 20}, "disk-low", "n2: 3 MiB free under /var/tmp/dtrain-0"),
        ({"name_means": ("127.0.1.1",)}, "host-name-loopback", "n2: its own name means 127.0.1.1 there"),
        ({"left_over": (LeftOver("4b7x", 3),)}, "left-over", "n2: job 4b7x had left 3 processes running, now ended"),
        (
            {"left_over": (LeftOver("4b7x", 1, (17,)),)},
            "left-over",
            "n2: job 4b7x had left 1 process running, now ended but for 17, which KILL does not end",
        ),
        (
            {"ends_at_logout": True},
            "ends-at-logout",
            "n2: systemd there ends what a user leaves running",
        ),
    ],
)
def test_a_machine_with_too_little(changed: dict[str, Any], name: str, text: str) -> None:
    assert told(cluster(4, n2=replace(FACTS, machine=replace(MACHINE, **changed)))) == [(name, text)]


@pytest.mark.parametrize(
    ("cluster_file", "told"),
    [
        ("instances: [n1, n2]\ngpus_per_instance: 8", ["n1, n2: no GPU; it gets 8 CPU workers"]),
        ("instances: [n1, n3]", ["n1: no GPU; it gets 2 CPU workers"]),
        ("instances: [n1, n2]", []),
        ("instances: [n1, n2]\ngpus_per_instance: 8\ndevice: cpu", []),
        ("instances: 2\ngpus_per_instance: 2", []),
    ],
)
def test_cpus_where_gpus_were_meant(cluster_file: str, told: list[str], tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster_file)
    spec = benchmark_job(tmp_path / "cluster.yaml", AllreduceConfig())
    facts = {one.name: FACTS if one.name == "n3" else replace(FACTS, gpus=()) for one in spec.cluster.instances}
    assert [finding.text for finding in judge_gpus(spec.cluster, facts)] == told


MISMATCH = "/usr/bin/nvidia-smi tells of no GPU: Failed to initialize NVML: Driver/library version mismatch"
LOST = "/usr/bin/nvidia-smi says of GPU 2: [GPU is lost]"


@pytest.mark.parametrize(
    ("device", "gpus", "changed", "told"),
    [
        # a driver that was updated, and is still the old one in the kernel
        ("auto", "auto", {"gpus": (), "gpu_fault": MISMATCH}, [("gpu-unreadable", f"n1: {MISMATCH}")]),
        ("cuda", "auto", {"gpus": (), "gpu_fault": MISMATCH}, [("gpu-unreadable", f"n1: {MISMATCH}")]),
        ("cpu", "2", {"gpus": (), "gpu_fault": MISMATCH}, []),
        # no driver in the kernel: none was loaded after an update, or there never was a GPU
        ("auto", "auto", {"gpus": (), "gpu_fault": MISMATCH, "machine": NO_DRIVER}, [("no-gpu", f"n1: {MISMATCH}; it gets 2 CPU workers")]),
        ("auto", "[0]", {"gpus": (), "gpu_fault": MISMATCH, "machine": NO_DRIVER}, [("gpu-unreadable", f"n1: {MISMATCH}")]),
        ("auto", "auto", {"gpu_fault": LOST}, [("gpu-lost", f"n1: {LOST}")]),
        ("cpu", "2", {"gpu_fault": LOST}, []),
        ("auto", "9", {}, [("gpu-missing", "n1: 9 GPUs wanted, 8 of 8 left")]),
        ("auto", "[8]", {}, [("gpu-missing", "n1: no GPU 8; there are 0, 1, 2, 3, 4, 5, 6, 7")]),
        (
            "auto",
            "8",
            {"gpus": (*FACTS.gpus[:7], Gpu(7, "NVIDIA H100", 80 << 30, 9 << 30, "", (GpuHolder(4711, "ana", 9 << 30, "python old.py"),)))},
            [("gpu-busy", "n1: 8 GPUs wanted, 7 free\n  GPU 7 is held by pid 4711 of ana, 9.0 GiB, python old.py")],
        ),
    ],
)
def test_gpus_against_what_the_job_asks_for(
    device: str, gpus: str, changed: dict[str, Any], told: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "cluster.yaml").write_text(f"instances: [n1]\ngpus_per_instance: {gpus}\ndevice: {device}\n")
    spec = benchmark_job(tmp_path / "cluster.yaml", AllreduceConfig())
    facts = {"n1": replace(FACTS, **changed)}
    errors = [(error.finding, error.message) for error in gpu_faults(spec, facts)]
    assert errors + [(finding.name, finding.text) for finding in judge_gpus(spec.cluster, facts)] == told


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth0"}, ["n2"]),
        ({"NCCL_SOCKET_IFNAME": "e"}, []),
        ({"NCCL_SOCKET_IFNAME": "=e"}, ["n1", "n2"]),
        ({"NCCL_SOCKET_IFNAME": "=eth0,ens3"}, []),
        ({"NCCL_SOCKET_IFNAME": "^docker0,lo"}, []),
        ({"NCCL_SOCKET_IFNAME": "^ens"}, ["n2"]),
        ({"NCCL_SOCKET_IFNAME": "^=ens"}, []),
        ({"GLOO_SOCKET_IFNAME": "ens3"}, ["n1"]),
        ({"GLOO_SOCKET_IFNAME": "e"}, ["n1", "n2"]),
        ({"GLOO_SOCKET_IFNAME": "eth0,ens3"}, []),
        ({"NCCL_DEBUG": "INFO"}, []),
    ],
)
def test_interfaces_that_env_names_on_nodes_whose_own_have_other_names(env: dict[str, str], nodes: list[str]) -> None:
    """A node whose interface nobody knows, as behind an address that it does not list, is none of them."""
    addresses = {"n1": Address("eth0", "10.0.0.1", 24, 0), "n2": Address("ens3", "10.0.0.2", 24, 0), "n3": Address("", "10.0.0.3", 32, 0)}
    assert [node for finding in contradictions(env, addresses) for node in finding.nodes] == nodes


@pytest.mark.parametrize(("python", "line"), [("/usr/bin/python3", "-m venv ~/train && ~/train/bin/pip"), ("/v/bin/python", "-m pip")])
def test_how_to_install_torch(python: str, line: str) -> None:
    """The system's own Python may refuse pip (PEP 668)."""
    (finding,) = judge({"n1": replace(FACTS, torch_version="", python=python)}, {})
    assert (finding.cure or "").startswith(f"{python} {line} install torch, ")


def test_what_is_enough() -> None:
    fit = replace(MACHINE, has_infiniband=True, limits=Limits(None, None, None), name_means=("127.0.1.1", "10.0.0.1"))
    assert told(cluster(2, n2=replace(FACTS, machine=fit))) == []
    alone = replace(FACTS, addresses=FACTS.addresses[:1], machine=replace(MACHINE, name_means=("127.0.0.1",)))
    assert told({"this machine": alone}) == []


def test_clocks() -> None:
    assert told(cluster(3), n1=-0.5, n2=600.0, n3=-600.0) == [
        ("clock-skew", "n2: its clock is 10 min ahead of this machine's"),
        ("clock-skew", "n3: its clock is 10 min behind this machine's"),
    ]


def test_of_two_nodes_the_first_is_the_norm_and_what_a_node_lacks_is_no_difference() -> None:
    old, none = replace(FACTS, torch_version="2.12.0"), replace(FACTS, nccl_version="", cuda_version="")
    assert told(cluster(2, n2=old)) == [("torch-differs", "n2: torch 2.12.0, n1 has 2.13.0")]
    assert told(cluster(2, n2=none)) == []


def test_a_trainer_wants_the_torch_that_it_was_tested_with_and_a_script_takes_any() -> None:
    facts = cluster(2, n1=replace(FACTS, torch_version="2.14.0+cu130"), n2=replace(FACTS, torch_version="2.14.0+cu130"))
    assert judge(facts, {}) == ()
    assert judge({"n1": replace(FACTS, torch_version="2.13.1+cpu")}, {}, is_trainer=True) == ()
    (finding,) = judge(facts, {}, is_trainer=True)
    assert (finding.name, finding.nodes, finding.is_error) == ("torch-untested", ("n1", "n2"), True)
    assert finding.text == "n1, n2: torch 2.14.0+cu130, and the trainers are tested with 2.13"
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'"torch>=(.*?),', project) == [TESTED_TORCH]


def test_a_launch_that_looks_again_says_what_it_found_once() -> None:
    console = Console(file=io.StringIO(), width=80)
    view = LiveView(console)
    for free in (3, 3, 2):
        for finding in judge(cluster(2, n2=replace(FACTS, machine=replace(MACHINE, free_bytes=free << 20))), {}):
            view.found(finding)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("n2: 3 MiB free") == 1 == console.file.getvalue().count("n2: 2 MiB free")


def test_the_tables_of_a_thousand_nodes_fit_a_terminal() -> None:
    """Each with nine interfaces and a name and addresses of its own."""
    facts = {}
    for i in range(1000):
        addresses = tuple(Address(f"ib{k}", f"10.{k}.{i // 250}.{i % 250 + 1}", 16, 400_000) for k in range(9))
        interfaces = tuple(Interface(one.interface, "up", 2044, one.speed_mbit) for one in addresses)
        machine = replace(MACHINE, name_means=(addresses[0].address,), interfaces=interfaces)
        facts[f"gpu{i:04}.lab"] = replace(FACTS, torch_version=f"2.1{i % 3}.0", addresses=addresses, machine=machine)
    console = Console(file=io.StringIO(), width=80)
    print_facts(console, facts, dict.fromkeys(facts, 0.0))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and all(node in "".join(lines) for node in ("gpu0000", "gpu0999")), lines[:40]


def test_the_same_words_of_many_nodes_are_one_finding() -> None:
    facts = cluster(1000)
    for i in range(1, 1000, 3):
        facts[f"n{i}"] = replace(FACTS, torch_version="2.12.0", machine=replace(MACHINE, shm_bytes=64 << 20))
    found = judge(facts, {})
    assert [(finding.name, len(finding.nodes)) for finding in found] == [("torch-differs", 333), ("shm-small", 333)]
    assert found[0].text == "n1, n4, n7, n10 and 329 more: torch 2.12.0, the other 667 have 2.13.0"
