"""How far a transfer is, once it takes longer than a second."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from dtrain.render.console import StatusLine, size

_SHOW_AFTER_S = 1.0


class Transfer(StatusLine):
    """One line on a terminal, nothing elsewhere. `moved` may be called from several threads."""

    def __init__(self, console: Console, what: str) -> None:
        self._what = what
        super().__init__(console, Text(""))
        self._began_s = time.monotonic()
        self._moved: dict[str, tuple[int, int]] = {}

    def moved(self, node: str, moved_bytes: int, total_bytes: int) -> None:
        self._moved[node] = moved_bytes, total_bytes
        if self.live is not None and time.monotonic() - self._began_s > _SHOW_AFTER_S:
            moved, total = (sum(parts) for parts in zip(*self._moved.values(), strict=True))
            self.live.update(Text(f"{self._what} {size(moved)} of {size(total)}", "dim"))
