"""How far the end of a job is: which nodes still stop, and how long they may."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from dtrain.errors import NoSpace
from dtrain.jobstate import Event, JobState
from dtrain.plan import counted
from dtrain.render.console import StatusLine, duration

_MOST_NAMES = 8


class StopView(StatusLine):
    """A Watcher. One line on a terminal, drawn anew; elsewhere only what goes wrong is said."""

    def __init__(self, console: Console, nodes: Sequence[str], grace_s: float) -> None:
        self._console = console
        super().__init__(console, self)
        self._stopping = list(nodes)
        self._kill_at_s = time.monotonic() + grace_s

    def __rich__(self) -> Text:
        left_s = self._kill_at_s - time.monotonic()
        grace = f"{duration(left_s)} of grace left" if left_s > 0 else "the grace is over: KILL"
        return Text(f"{names(self._stopping)} still {'stops' if len(self._stopping) == 1 else 'stop'}  {grace}", "dim")

    def changed(self, state: JobState, node: str, event: Event) -> None:
        ended = {each.name for each in state.nodes if each.state.is_final}
        self._stopping = [name for name in self._stopping if name not in ended]

    def disconnected(self, node: str, error: str) -> None:
        self._console.print(Text(f"{error}; trying again", "yellow"), soft_wrap=True)

    def reconnected(self, node: str) -> None:
        self._console.print(Text(f"{node}: connected again", "yellow"), soft_wrap=True)

    def unkept(self, error: NoSpace) -> None:
        self._console.print(Text(error.message, "yellow"), soft_wrap=True)

    def printed(self, node: str, stream: str, data: bytes) -> None: ...
    def measured(self, metric: Mapping[str, Any]) -> None: ...


def names(nodes: Sequence[str]) -> str:
    """n1, n2 and 98 more"""
    shown = ", ".join(nodes[:_MOST_NAMES])
    return shown if len(nodes) <= _MOST_NAMES else f"{shown} and {counted(len(nodes) - _MOST_NAMES, 'node')} more"
