"""mpirun of Open MPI 4: it runs on the first node, and its daemons on the others are started by dtrain's agents (node/mpi.py).

So no node needs to log in to another. Each node is named by the address that was proved, and mpirun's daemons talk there and
nowhere else. All settings go into the environment of each node's own daemon, for they differ from node to node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address

from dtrain.errors import PreflightFailed
from dtrain.launchers.command import NodeCommand, worker_argv, worker_env
from dtrain.node.wire import MpiNode, NodeFacts
from dtrain.plan import LaunchPlan, NodePlan
from dtrain.spec import JobSpec

_MAJOR = "4"
_START_TIMEOUT_S = 120.0  # mpirun itself would wait for its daemons for ever
_FIRST_ALIAS = ip_address("127.1.0.0")

_SETTINGS = {
    "plm": "rsh",
    "plm_rsh_no_tree_spawn": "1",  # else daemons start daemons where there are more than 64
    "plm_rsh_num_concurrent": "4096",
    "plm_rsh_pass_environ_mca_params": "0",  # each node has its own; a first node's would be wrong on the others
    "orte_leave_session_attached": "1",  # a daemon stays the agent's child
    "orte_abort_on_non_zero_status": "0",  # else mpirun kills all workers within 2 s, whatever the grace: our agents stop them
    "odls_base_num_threads": "0",  # workers die with the thread that forked them, so that has to be the main one
    "oob_tcp_disable_ipv6_family": "1",
    "oob_tcp_keepalive_time": "10",  # a node that is cut off is noticed after 25 s instead of 8 minutes
    "oob_tcp_keepalive_intvl": "5",
    "oob_tcp_keepalive_probes": "3",
}


def check(facts: Mapping[str, NodeFacts]) -> None:
    """Whether mpirun can start on these nodes.

    Raises:
        PreflightFailed: it is missing on one, is not Open MPI 4, or not the same on all.
    """
    missing = [node for node, found in facts.items() if not (found.mpirun and found.mpi_daemon)]
    if missing:
        faults = [f"{node}: {'orted' if facts[node].mpirun else 'mpirun'} is not installed, or not on the PATH there" for node in missing]
        raise PreflightFailed(
            "\n".join(faults), hint="apt-get install openmpi-bin on each node, or use launcher: torchrun", finding="mpi-unfit"
        )
    versions: dict[str, list[str]] = {}
    for node, found in facts.items():
        versions.setdefault(_version(node, found), []).append(node)
    told = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in versions.items())
    majors = {version.partition(".")[0] for version in versions}
    if len(majors) > 1:
        raise PreflightFailed(
            f"the nodes have different Open MPI: {told}", hint=f"install the same Open MPI {_MAJOR} on all of them", finding="mpi-unfit"
        )
    if majors != {_MAJOR}:
        raise PreflightFailed(
            f"dtrain runs Open MPI {_MAJOR}; there is {told}", hint="use launcher: torchrun, or install Open MPI 4", finding="mpi-unfit"
        )


def _version(node: str, found: NodeFacts) -> str:
    match = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+\.\S+)", found.mpi_version)
    if match is None:
        raise PreflightFailed(
            f"{node}: {found.mpirun} is not Open MPI; it calls itself {found.mpi_version or 'nothing'}",
            hint="let mpirun there be Open MPI's (update-alternatives --config mpirun), or use launcher: torchrun",
            finding="mpi-unfit",
        )
    return match[1]


def hosts(plan: LaunchPlan) -> tuple[str, ...]:
    """The names by which mpirun knows the nodes, in their order: addresses, for names resolve differently on different nodes.

    Nodes that are one machine share an address, and mpirun would take them for one node. From the second on they get an
    alias, which nobody dials: it only tells our agents which node is meant.
    """
    names: list[str] = []
    for node in plan.nodes:
        is_taken = node.address in names and not node.address.startswith("<")
        names.append(str(_FIRST_ALIAS + node.node_rank) if is_taken else node.address)
    return tuple(names)


def node_commands(spec: JobSpec, plan: LaunchPlan, job: str) -> tuple[NodeCommand, ...]:
    for node in plan.nodes:
        if ":" in node.address:
            raise PreflightFailed(
                f"{node.name}: mpirun needs an IPv4 address, and the others reach it at {node.address}",
                hint="set network: in the cluster file to an IPv4 network that all nodes share, or use launcher: torchrun",
            )
        if " " in node.python + node.bundle:
            raise PreflightFailed(
                f"{node.name}: mpirun cannot start {node.python} {node.bundle}: there is a space in it",
                hint="set dir: and python: in the cluster file to paths without one",
            )
    return tuple(
        NodeCommand(
            node=node.name,
            argv=_argv(plan) if node.node_rank == 0 else (),
            env={f"OMPI_MCA_{name}": value for name, value in {**_SETTINGS, **_own_settings(node)}.items()},
            worker_argv=worker_argv(spec, node),
            worker_env={
                # mpirun gives its own settings to all workers; this one is each node's own
                "OMPI_MCA_btl_tcp_if_include": _only(node),
                **worker_env(spec, plan, node, job),
                "MASTER_ADDR": plan.master_address,
                "MASTER_PORT": str(plan.master_port or "<port>"),
            },
            mpi=_mpi_node(plan, node),
        )
        for node in plan.nodes
    )


def _mpi_node(plan: LaunchPlan, node: NodePlan) -> MpiNode:
    known: dict[str, str] = {}
    if node.node_rank == 0:
        named = zip(hosts(plan), plan.nodes, strict=True)
        known = {f"<address of {each.name}>" if host.startswith("<") else host: each.name for host, each in named}
    return MpiNode(node.mpi_daemon, node.node_rank, len(plan.nodes), plan.master_address, _START_TIMEOUT_S, known)


def _own_settings(node: NodePlan) -> dict[str, str]:
    return {
        "plm_rsh_agent": f"{node.python} -I -S {node.bundle} relay",  # daemons look for it too, and crash where it is missing
        "oob_tcp_if_include": _only(node),
        "btl_tcp_if_include": _only(node),
    }


def _only(node: NodePlan) -> str:
    """This address alone, in a network small enough. Not /32: Open MPI 4 shifts by 32 bits then, and takes every interface."""
    return f"{node.address}/31"


def _argv(plan: LaunchPlan) -> tuple[str, ...]:
    """One section a node, so that ranks count through the nodes in their order and each has its own paths."""
    argv = [plan.nodes[0].mpirun, "--noprefix", "--bind-to", "none", "--map-by", "slot"]
    for host, node in zip(hosts(plan), plan.nodes, strict=True):
        if node.node_rank > 0:
            argv.append(":")
        count = str(len(node.workers) or "<GPUs>")
        argv += ["--host", f"{host}:{count}", "-np", count, "--wdir", "/"]
        argv += [node.python, node.bundle, "worker", node.job_folder, "mpirun"]
    return tuple(argv)
