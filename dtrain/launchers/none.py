"""No launcher: the job's command runs once on each node, and starts its workers by itself."""

from __future__ import annotations

from dtrain.launchers.command import NodeCommand, worker_argv, worker_env
from dtrain.plan import LaunchPlan, NodePlan
from dtrain.spec import JobSpec


def node_commands(spec: JobSpec, plan: LaunchPlan, job: str) -> tuple[NodeCommand, ...]:
    return tuple(
        NodeCommand(
            node=node.name,
            argv=(node.python, node.bundle, "worker", node.job_folder, "none"),
            env={"NODE_RANK": str(node.node_rank)},
            worker_argv=worker_argv(spec, node),
            worker_env={**worker_env(spec, plan, node, job), **_rendezvous(plan, node)},
        )
        for node in plan.nodes
    )


def _rendezvous(plan: LaunchPlan, node: NodePlan) -> dict[str, str]:
    return {
        "NNODES": str(len(plan.nodes)),
        "GPUS_PER_NODE": str(node.num_gpus or "<GPUs>"),
        "CLUSTER_SIZE": str(plan.cluster_size or "<cluster size>"),
        "MASTER_ADDR": plan.master_address,
        "MASTER_PORT": str(plan.master_port or "<port>"),
    }
