"""Lines that several ranks print at the same moment, as one."""

from __future__ import annotations

import threading
from bisect import bisect
from collections.abc import Callable

from dtrain.render.lines import RankLines
from dtrain.render.ranges import ranges

_MOMENT_S = 0.03
_MOST_BYTES = 64 * 1024  # of one rank at once: a flood is not looked at line by line
_LONGEST_RANGES = 24


class FoldedLines(RankLines):
    """Holds lines for a moment, and writes those that are the same once, with how many ranks printed them, and which.

    The lines of each rank stay in their order.
    """

    def __init__(self, write: Callable[[str], object], *, colour: bool) -> None:
        super().__init__(write, colour=colour)
        self._lock = threading.RLock()
        self._forget_held()

    def _forget_held(self) -> None:
        self._held: list[tuple[bytes, list[str]]] = []  # lines, each with the labels of those that printed it
        self._places: dict[tuple[bool, bytes], list[int]] = {}  # where a line is held; a rank's is never a setup's
        self._last: dict[str, int] = {}  # by label, where its last line is held

    def end(self) -> None:
        super().end()
        self._show_held()

    def _show(self, label: str, lines: bytes) -> None:
        with self._lock:
            if len(lines) > _MOST_BYTES:
                self._show_held()
                super()._show(label, lines)
                return
            if not self._held:
                timer = threading.Timer(_MOMENT_S, self._show_held)
                timer.daemon = True
                timer.start()
            for line in lines.split(b"\n"):
                self._last[label] = self._place(label, line)

    def _place(self, label: str, line: bytes) -> int:
        """Where a line is held from now on: with the same one of others, if that does not stand before the last one of its own."""
        places = self._places.setdefault((label.isdigit(), line), [])
        behind = bisect(places, self._last.get(label, -1))
        if behind == len(places):
            places.append(len(self._held))
            self._held.append((line, []))
        self._held[places[behind]][1].append(label)
        return places[behind]

    def _show_held(self) -> None:
        with self._lock:
            held = self._held
            self._forget_held()
            blocks: list[tuple[list[str], list[bytes]]] = []
            for line, labels in held:
                if not blocks or blocks[-1][0] != labels:
                    blocks.append((labels, []))
                blocks[-1][1].append(line)
            for labels, lines in blocks:
                super()._show(_together(labels), b"\n".join(lines))


def _together(labels: list[str]) -> str:
    if len(labels) == 1:
        return labels[0]
    if not labels[0].isdigit():
        return f"{len(labels)} setups"
    named = ranges(sorted(map(int, labels)))
    return f"{len(labels)} ranks" + (f": {named}" if len(named) <= _LONGEST_RANGES else "")
