"""A launcher decides what command each node runs; how it gets there is the transport's business.

A new launcher is one file with a `node_commands` function and one line below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dtrain.launchers import none, torchrun
from dtrain.launchers.command import NodeCommand
from dtrain.plan import LaunchPlan
from dtrain.spec import JobSpec

__all__ = ["LAUNCHERS", "NodeCommand", "node_commands"]


@dataclass(frozen=True, slots=True)
class Launcher:
    node_commands: Callable[[JobSpec, LaunchPlan, str], tuple[NodeCommand, ...]]


LAUNCHERS = {
    "torchrun": Launcher(torchrun.node_commands),
    "none": Launcher(none.node_commands),
}


def node_commands(spec: JobSpec, plan: LaunchPlan, job: str) -> tuple[NodeCommand, ...]:
    """What each node of the plan runs, in the plan's order."""
    return LAUNCHERS[plan.launcher].node_commands(spec, plan, job)
