"""A launcher decides what command each node runs; how it gets there is the transport's business.

A new launcher is one file with a `node_commands` function and one line below.
"""

from __future__ import annotations

from collections.abc import Callable

from dtrain.launchers import torchrun
from dtrain.launchers.command import NodeCommand
from dtrain.plan import LaunchPlan
from dtrain.spec import JobSpec

__all__ = ["LAUNCHERS", "NodeCommand", "node_commands"]

LAUNCHERS: dict[str, Callable[[JobSpec, LaunchPlan, str], tuple[NodeCommand, ...]]] = {"torchrun": torchrun.node_commands}


def node_commands(spec: JobSpec, plan: LaunchPlan, job: str) -> tuple[NodeCommand, ...]:
    """What each node of the plan runs, in the plan's order."""
    return LAUNCHERS[plan.launcher](spec, plan, job)
