"""Consoles: what a person reads goes to stderr, a result to stdout."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text
from typing_extensions import Self

_PLAIN_WIDTH = 80
_NARROWEST = 20
_ESCAPES = re.compile(r"(\x1b\[[0-9;:]*m)|\x1b(?:\[[0-9;:<=>?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_RESET = "\x1b[0m"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


class HarmlessConsole(Console):
    """Writes no control that comes from outside: nodes, jobs, files and errors have names and texts of their own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control or isinstance(text, Harmless) or text.isprintable():
                yield segment
            else:
                yield Segment(without_controls(text), style)


class Harmless(str):
    """Text from which the controls are gone already."""

    __slots__ = ()


def person() -> Console:
    return _console(stderr=True)


def result() -> Console:
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    is_plain = bool(os.environ.get("NO_COLOR"))  # rich by itself would still write bold and dim
    console = HarmlessConsole(stderr=stderr, highlight=False, markup=False, emoji=False, color_system=None if is_plain else "auto")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PLAIN_WIDTH
    console.width = max(console.width, _NARROWEST)  # rich fails where there is no room for a letter and its margin
    return console


class StatusLine:
    """What is drawn anew below the log on a terminal, and nowhere else. Used as a context manager: it goes at its end."""

    def __init__(self, console: Console, what: RenderableType) -> None:
        self.live = Live(what, console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()


class StepLine(StatusLine):
    """Which step a command is at."""

    def __init__(self) -> None:
        self._text = Text("", "dim")
        super().__init__(person(), self)

    def __rich__(self) -> Text:
        return self._text

    def step(self, text: str) -> None:
        self._text = Text(text, "dim")


def harmless(line: str) -> str:
    """A line of a log without what would move the cursor, ring, set titles or the clipboard; colours stay, up to its end."""
    if line.isprintable():
        return line
    safe = without_controls(line)
    return f"{safe}{_RESET}" if "\x1b" in safe and not safe.endswith(_RESET) else safe


def plain(text: str) -> str:
    """Without colours too."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def without_controls(text: str) -> str:
    return _CONTROLS.sub("", _ESCAPES.sub(lambda match: match[1] or "", text))


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that gives a short number: 1 KiB, 4 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
