"""What a node runs: the launcher's command, and the worker's command that every rank fetches from its agent."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.bench.config import AllreduceConfig
from dtrain.node.wire import MpiNode
from dtrain.plan import LaunchPlan, NodePlan
from dtrain.spec import Command, JobSpec, Module, Script
from dtrain.trainers.config import TrainerConfig

MASKED = "***"  # stands for a secret's value, which the agent puts in its place


@dataclass(frozen=True, slots=True)
class NodeCommand:
    node: str
    argv: tuple[str, ...]  # the launcher's; none where mpirun has its daemon started there
    env: dict[str, str]  # on top of the node's own
    worker_argv: tuple[str, ...]
    worker_env: dict[str, str]  # on top of what the launcher sets; secrets are masked
    mpi: MpiNode | None = None  # under mpirun


def worker_argv(spec: JobSpec, node: NodePlan) -> tuple[str, ...]:
    match spec.run:
        case Script(path, args):
            return (node.python, path, *args)
        case Module(name, args):
            return (node.python, "-m", name, *args)
        case Command(argv):
            return argv
        case TrainerConfig():
            return (node.python, node.bundle, "trainer", spec.run.to_json())
        case AllreduceConfig():
            return (node.python, node.bundle, "allreduce", spec.run.to_json())


def worker_env(spec: JobSpec, plan: LaunchPlan, node: NodePlan, job: str) -> dict[str, str]:
    """Variables of every worker on a node. What the user set wins over what dtrain would choose."""
    chosen = {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": f"={node.interface}"}
    chosen["OMP_NUM_THREADS"] = str(node.cores_per_worker or "<threads>")
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if node.gpus else {}  # nvidia-smi's; CUDA's own begins with the fastest GPU
    fixed = {
        **order,
        "NODE_RANK": str(node.node_rank),
        "DTRAIN_JOB_ID": job,
        "DTRAIN_JOB_NAME": plan.name,
        "DTRAIN_OUTPUT_DIR": node.output_dir,
        "CUDA_VISIBLE_DEVICES": "<GPUs>" if node.device != "cpu" and not node.gpus else ",".join(map(str, node.gpus)),
    }
    secrets = dict.fromkeys(spec.secrets, MASKED)
    return {**{name: value for name, value in chosen.items() if value not in ("", "=")}, **spec.env, **fixed, **secrets}
