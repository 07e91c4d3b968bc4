"""Workers' output as lines, each with its rank in front, whole however the bytes were cut on their way."""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from dtrain.render.console import harmless

_COLOURS = ("36", "32", "35", "34", "33", "96", "92", "95", "94", "93")
_SPECIAL = bytes({*range(32), 127} - {9, 10})  # what needs a look at each line; most logs have none of it
_RANK = re.compile(r"logs/rank(\d+)\.log")


class RankLines:
    """Takes bytes of streams and writes whole lines."""

    def __init__(self, write: Callable[[str], object], *, colour: bool, ranks: Container[int] | None = None) -> None:
        self._write = write
        self._colour = colour
        self._ranks = ranks
        self._partial: dict[str, bytes] = {}

    def take(self, stream: str, data: bytes) -> None:
        """The next bytes of a stream; those that are no worker's are passed over."""
        if not self._wants(stream):
            return
        whole, newline, rest = (self._partial.pop(stream, b"") + data).rpartition(b"\n")
        if rest:
            self._partial[stream] = rest
        if newline:
            self._lines(stream, whole)

    def end(self) -> None:
        """Write what came without a newline."""
        for stream, rest in sorted(self._partial.items()):
            self._lines(stream, rest)
        self._partial.clear()

    def _wants(self, stream: str) -> bool:
        match = _RANK.fullmatch(stream)
        return match is not None and (self._ranks is None or int(match[1]) in self._ranks)

    def _lines(self, stream: str, lines: bytes) -> None:
        match = _RANK.fullmatch(stream)
        if match is None:
            return
        prefix = f"[{match[1]}] "
        if self._colour:
            prefix = f"\x1b[{_COLOURS[int(match[1]) % len(_COLOURS)]}m{prefix}\x1b[0m"
        if len(lines.translate(None, _SPECIAL)) < len(lines):
            # A progress bar redraws its line after a carriage return: the last state of it is the line.
            texts = lines.decode(errors="replace").split("\n")
            lines = "\n".join(harmless(text.rstrip("\r").rpartition("\r")[2]) for text in texts).encode()
        start = prefix.encode()
        self._write((start + lines.replace(b"\n", b"\n" + start) + b"\n").decode(errors="replace"))
