"""Workers' output as lines, each with its rank in front, and that of a node's setup; whole however the bytes were cut on their way."""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from dtrain.node import wire
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
        self._partial: dict[str, bytes] = {}  # by prefix

    def take(self, node: str, stream: str, data: bytes) -> None:
        """The next bytes of a stream; those that are neither a worker's nor a setup's are passed over."""
        prefix = self._prefix(node, stream)
        if prefix is None:
            return
        whole, newline, rest = (self._partial.pop(prefix, b"") + data).rpartition(b"\n")
        if rest:
            self._partial[prefix] = rest
        if newline:
            self._lines(prefix, whole)

    def end(self) -> None:
        """Write what came without a newline."""
        for prefix, rest in sorted(self._partial.items()):
            self._lines(prefix, rest)
        self._partial.clear()

    def forget(self) -> None:
        """Leave what came without a newline to who goes on with these streams."""
        self._partial.clear()

    def _prefix(self, node: str, stream: str) -> str | None:
        """What stands before each line of a stream; None where nobody wants them."""
        if stream == wire.SETUP_LOG and self._ranks is None:
            return f"[{node} setup] "
        match = _RANK.fullmatch(stream)
        if match is None or (self._ranks is not None and int(match[1]) not in self._ranks):
            return None
        prefix = f"[{match[1]}] "
        return f"\x1b[{_COLOURS[int(match[1]) % len(_COLOURS)]}m{prefix}\x1b[0m" if self._colour else prefix

    def _lines(self, prefix: str, lines: bytes) -> None:
        if len(lines.translate(None, _SPECIAL)) < len(lines):
            # A progress bar redraws its line after a carriage return: the last state of it is the line.
            texts = lines.decode(errors="replace").split("\n")
            lines = "\n".join(harmless(text.rstrip("\r").rpartition("\r")[2]) for text in texts).encode()
        start = prefix.encode()
        self._write((start + lines.replace(b"\n", b"\n" + start) + b"\n").decode(errors="replace"))
