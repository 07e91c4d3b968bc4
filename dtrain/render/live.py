"""A job while it runs: the ranks' lines as they come, and one line below them that says how it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from dtrain.errors import NoSpace
from dtrain.findings import Finding
from dtrain.jobstate import Event, JobState, State, StopAsked
from dtrain.node import wire
from dtrain.plan import LaunchPlan, counted
from dtrain.render.console import Harmless, StatusLine, duration, size
from dtrain.render.findings import print_finding
from dtrain.render.fold import FoldedLines
from dtrain.render.lines import RankLines
from dtrain.render.plan import print_plan

_PLAIN_PROGRESS_S = 5.0  # between two progress lines where there is no terminal to redraw one on
_SHOW_SENDING_S = 1.0


class LiveView(StatusLine):
    """Progress of a start, then a Watcher of the job. Used as a context manager: the status line goes at its end."""

    def __init__(self, console: Console, age_s: float = 0.0) -> None:
        """Args:
        age_s: for how long the job has been there.
        """
        self._console = console
        self._status = ""
        super().__init__(console, self)
        # Who reads a file or a pipe may count lines, and look for a rank's.
        self._lines = FoldedLines(self._raw, colour=not console.no_color) if self.live is not None else RankLines(self._raw, colour=False)
        self._said_at_s = 0.0
        self._began_s = self._since_s = time.monotonic() - age_s
        self._sent: dict[str, tuple[int, int]] = {}
        self._sending_since_s = 0.0
        self._setup_since_s = 0.0
        self._busy = ""
        self._found: set[Finding] = set()
        self.evaluation: Mapping[str, float] = {}
        self.keys = ""  # what can be pressed, behind the status

    def __exit__(self, *_: object) -> None:
        self._lines.end()
        super().__exit__()

    def leave(self) -> None:
        """The job goes on: who attaches next shows the lines that are not whole yet."""
        self._lines.forget()

    def __rich__(self) -> RenderableType:
        """What is below the log, drawn anew four times a second: a worker's own progress bar, and how the job goes."""
        keys = f"  ({self.keys})" if self.keys else ""
        status = Text(f"{self._status}  {duration(time.monotonic() - self._since_s)}{keys}" if self._status else "", "dim")
        bar = self._lines.bar()
        return Group(Text(bar, no_wrap=True, overflow="ellipsis"), status) if bar else status

    # ---- the start ----

    def step(self, text: str) -> None:
        self._show(text)

    def busy(self, text: str) -> None:
        """Who holds the GPUs that the job waits for: said again when it changes."""
        if text != self._busy:
            self._say(f"waiting for GPUs: {text}")
            self._busy = text
        self._show("waiting for GPUs")

    def found(self, finding: Finding) -> None:
        """Said once: a launch that waits for GPUs looks again and again."""
        if finding not in self._found:
            self._found.add(finding)
            print_finding(self._console, finding)

    def planned(self, job: str, plan: LaunchPlan) -> None:
        print_plan(self._console, plan, job)
        self._show("preparing")

    def again(self, job: str) -> None:
        self._say(f"job {job}: another process took the port of the rendezvous before torchrun could; once more, with another port")

    def sending(self, node: str, sent_bytes: int, total_bytes: int) -> None:
        self._sent[node] = sent_bytes, total_bytes
        self._sending_since_s = self._sending_since_s or time.monotonic()
        if time.monotonic() - self._sending_since_s > _SHOW_SENDING_S:
            sent, total = (sum(parts) for parts in zip(*self._sent.values(), strict=True))
            self._progress(f"sending the working directory: {size(sent)} of {size(total)}", last=False)

    def setting_up(self, num_nodes: int) -> None:
        """How many nodes are still at it; the time beside that is the setup's own."""
        if not self._setup_since_s:
            self._setup_since_s = time.monotonic()
            if self.live is None:
                self._console.print(Text(f"setup on {counted(num_nodes, 'node')}"), soft_wrap=True)
        self._show(f"setup on {counted(num_nodes, 'node')}" if num_nodes else "starting", self._setup_since_s if num_nodes else None)

    # ---- the job ----

    def changed(self, state: JobState, node: str, event: Event) -> None:
        match event:
            case wire.NodeStopping(cause=cause):
                self._say(f"{node}: stopping its workers ({cause})")
            case StopAsked(by=by) if by:
                self._say(f"`dtrain stop` by {by}, from elsewhere, ends the job")
            case wire.LauncherStarted():
                self._show(f"{state.state.value.lower()}")
            case wire.WorkerStarted() if state.state is State.RUNNING:
                self._show("running")
            case _:
                pass

    def printed(self, node: str, stream: str, data: bytes) -> None:
        self._lines.take(node, stream, data)
        if self.live is None and time.monotonic() - self._said_at_s >= _PLAIN_PROGRESS_S and (bar := self._lines.bar()):
            self._say_progress(bar)

    def measured(self, metric: Mapping[str, Any]) -> None:
        evaluation = metric.get("evaluation")
        if isinstance(evaluation, Mapping):
            self.evaluation = evaluation
        line = progress_line(metric)
        if line:
            self._progress(line, last=metric.get("iteration") is not None and metric.get("iteration") == metric.get("iterations"))

    def disconnected(self, node: str, error: str) -> None:
        self._say(f"{error}; the job goes on there, connecting again")

    def reconnected(self, node: str) -> None:
        self._say(f"{node}: connected again")

    def unkept(self, error: NoSpace) -> None:
        self._say(f"{error.message}; the job goes on, and its nodes keep what is missing here")

    # ---- writing ----

    def _raw(self, text: str) -> None:
        """Log lines by-pass rich, but for keeping them clear of the status line: it is a thousand times faster."""
        if self.live is None:
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            self._console.print(_Raw(text), end="", soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(Text(text, "yellow"), soft_wrap=True)

    def _show(self, text: str, since_s: float | None = None) -> None:
        self._status, self._since_s = text, self._began_s if since_s is None else since_s

    def _progress(self, text: str, *, last: bool) -> None:
        now_s = time.monotonic()
        if self.live is None and (last or now_s - self._said_at_s >= _PLAIN_PROGRESS_S):
            self._say_progress(text)
        self._show(text)

    def _say_progress(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._said_at_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Raw:
    """Text that rich writes as it is."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(Harmless(self.text))


def progress_line(metric: Mapping[str, Any]) -> str:
    """`iteration 120/480  epoch 2/5  loss 0.312  3,120 samples/s`, as far as the metric says; of a pipeline the bubble too."""
    parts = []
    for name, total in (("iteration", "iterations"), ("epoch", "epochs")):
        if name in metric:
            parts.append(f"{name} {metric[name]}/{metric[total]}" if metric.get(total) is not None else f"{name} {metric[name]}")
    if isinstance(metric.get("loss"), (int, float)):
        parts.append(f"loss {metric['loss']:.4g}")
    if isinstance(metric.get("samples_per_s"), (int, float)):
        parts.append(f"{metric['samples_per_s']:,.0f} samples/s")
    if isinstance(metric.get("bubble"), (int, float)):
        predicted = metric.get("predicted_bubble")
        parts.append(f"bubble {metric['bubble']:.1%}" + (f" (predicted {predicted:.1%})" if isinstance(predicted, (int, float)) else ""))
    return "  ".join(parts)
