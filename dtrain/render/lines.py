"""Workers' output as lines, each with its rank in front, and that of a node's setup; whole however the bytes were cut on their way."""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from dtrain.node import wire
from dtrain.node.tail import drawn
from dtrain.render.console import harmless, plain

_COLOURS = ("36", "32", "35", "34", "33", "96", "92", "95", "94", "93")
_SPECIAL = {*range(32), 127, 0xC2} - {9, 10}  # what needs a look at each line; most logs have none of it. C2 begins a control in UTF-8
_LONGEST_BAR = 4096  # bytes
_RANK = re.compile(r"logs/rank(\d+)\.log")


class RankLines:
    """Takes bytes of streams and writes whole lines.

    Args:
        ranks: only theirs, and no setup's.
        node: only those of this one.
        text: only lines that hold it.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        *,
        colour: bool,
        ranks: Container[int] | None = None,
        node: str | None = None,
        text: bytes | None = None,
    ) -> None:
        self._write = write
        self._colour = colour
        self._ranks = ranks
        self._node = node
        self._text = text
        self._partial: dict[str, list[bytes]] = {}  # by label, the parts of a line whose end has not arrived
        self._drawing: set[str] = set()  # labels of which such a line is drawn over and over

    def take(self, node: str, stream: str, data: bytes) -> None:
        """The next bytes of a stream; those that are neither a worker's nor a setup's are passed over."""
        label = self._label(node, stream)
        if label is None:
            return
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            self._take_lines(label, b"".join((*self._partial.pop(label, ()), whole)))
            self._drawing.discard(label)
        if rest:
            _append(self._partial.setdefault(label, []), rest)
            if b"\r" in rest:
                self._drawing.add(label)

    def bar(self) -> str:
        """The progress bar that the first of the ranks draws now, as far as a line holds it; "" while none does. Any thread may ask."""
        label = min(tuple(self._drawing), key=lambda label: (len(label), label), default="")
        parts = tuple(self._partial.get(label, ()))
        if not parts:
            return ""
        start = b"".join(part[:_LONGEST_BAR] for part in parts[:_LONGEST_BAR])[:_LONGEST_BAR]
        return f"[{label}] {plain(drawn(start).decode(errors='replace'))}"

    def end(self) -> None:
        """Write what came without a newline."""
        for label, parts in sorted(self._partial.items()):
            self._take_lines(label, b"".join(parts))
        self.forget()

    def forget(self) -> None:
        """Leave what came without a newline to who goes on with these streams."""
        self._partial.clear()
        self._drawing.clear()

    def _label(self, node: str, stream: str) -> str | None:
        """Whose lines a stream has: a rank, or a node's setup; None where nobody wants them."""
        if self._node not in (None, node):
            return None
        if stream == wire.SETUP_LOG and self._ranks is None:
            return f"{node} setup"
        match = _RANK.fullmatch(stream)
        if match is None or (self._ranks is not None and int(match[1]) not in self._ranks):
            return None
        return match[1]

    def _take_lines(self, label: str, lines: bytes) -> None:
        is_plain = not any(byte in lines for byte in _SPECIAL)
        if self._text is not None or not is_plain:
            each = [drawn(line) for line in lines.split(b"\n")]
            if self._text is not None:
                each = [line for line in each if self._text in line]
                if not each:
                    return
            lines = b"\n".join(each if is_plain else [harmless(line.decode(errors="replace")).encode() for line in each])
        self._show(label, lines)

    def _show(self, label: str, lines: bytes) -> None:
        """Write lines that are whole and harmless."""
        start = self._start(label).encode()
        self._write(b"".join((start, lines.replace(b"\n", b"\n" + start), b"\n")).decode(errors="replace"))

    def _start(self, label: str) -> str:
        """What stands before a line."""
        start = f"[{label}] "
        return f"\x1b[{_COLOURS[int(label) % len(_COLOURS)]}m{start}\x1b[0m" if self._colour and label.isdigit() else start


def _append(parts: list[bytes], data: bytes) -> None:
    """Add to a line that has not ended. What was drawn over by then is left out: a progress bar may go on for days."""
    over, is_redrawn, state = data.rstrip(b"\r").rpartition(b"\r")
    if is_redrawn or (parts and parts[-1].endswith(b"\r") and state):
        parts.clear()
    parts.append(data[len(over) + len(is_redrawn) :])
