"""torchrun: one agent of torch's own per node, static rendezvous on the first node.

Static, because every rank is known beforehand: c10d would find the store's host by comparing host names, which goes
wrong where a name resolves differently on different nodes.
"""

from __future__ import annotations

from dtrain.launchers.command import NodeCommand, worker_argv, worker_env
from dtrain.plan import LaunchPlan, NodePlan
from dtrain.spec import JobSpec


def node_commands(spec: JobSpec, plan: LaunchPlan, job: str) -> tuple[NodeCommand, ...]:
    return tuple(
        NodeCommand(
            node=node.name,
            argv=_argv(plan, node),
            env={"OMP_NUM_THREADS": spec.env.get("OMP_NUM_THREADS", str(node.cores_per_worker or "<threads>"))},
            worker_argv=worker_argv(spec, node),
            worker_env=worker_env(spec, plan, node, job),
        )
        for node in plan.nodes
    )


def _argv(plan: LaunchPlan, node: NodePlan) -> tuple[str, ...]:
    return (
        node.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(plan.nodes)}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={len(node.workers) or '<GPUs>'}",
        f"--master-addr={plan.master_address}",
        f"--master-port={plan.master_port or '<port>'}",
        "--local-addr=" + node.address,  # never a host name: it may resolve to 127.0.1.1 here
        "--max-restarts=0",
        f"--log-dir={node.job_folder}/torchrun",  # else a folder that stays behind in /tmp when torchrun is killed
        node.bundle,
        "worker",
        node.job_folder,
        "torchrun",
    )
