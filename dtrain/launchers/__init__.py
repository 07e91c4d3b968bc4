"""A launcher decides what command each node runs; how it gets there is the transport's business.

A new launcher is one file with a `node_commands` function and one line below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtrain.launchers import mpirun, none, torchrun
from dtrain.launchers.command import MASKED, NodeCommand
from dtrain.launchers.plan_json import plan_json
from dtrain.node.wire import NodeFacts
from dtrain.plan import LaunchPlan
from dtrain.spec import JobSpec

__all__ = ["LAUNCHERS", "MASKED", "NodeCommand", "check", "node_commands", "plan_json"]


@dataclass(frozen=True, slots=True)
class Launcher:
    node_commands: Callable[[JobSpec, LaunchPlan, str], tuple[NodeCommand, ...]]
    check: Callable[[Mapping[str, NodeFacts]], None] = lambda facts: None  # raises PreflightFailed where it cannot start


LAUNCHERS = {
    "torchrun": Launcher(torchrun.node_commands),
    "mpirun": Launcher(mpirun.node_commands, mpirun.check),
    "none": Launcher(none.node_commands),
}


def node_commands(spec: JobSpec, plan: LaunchPlan, job: str) -> tuple[NodeCommand, ...]:
    """What each node of the plan runs, in the plan's order.

    Raises:
        PreflightFailed: the launcher cannot run this plan.
    """
    return LAUNCHERS[plan.launcher].node_commands(spec, plan, job)


def check(launcher: str, facts: Mapping[str, NodeFacts]) -> None:
    """Whether a launcher can start on nodes that said this of themselves.

    Raises:
        PreflightFailed: it cannot, and on which.
    """
    LAUNCHERS[launcher].check(facts)
