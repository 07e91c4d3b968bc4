"""The allreduce benchmark: a row as soon as a size is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from dtrain.render.console import person, size
from dtrain.render.live import LiveView

_ROW = ("size_bytes", "num_iterations", "time_us", "min_us", "p95_us", "algorithm_gb_per_s", "bus_gb_per_s", "num_wrong", "world_size")
_HEAD = f"{'size':>9} {'time':>11} {'fastest':>11} {'p95':>11} {'algorithm':>11} {'bus':>11} {'wrong':>6}"


class AllreduceTable(LiveView):
    """A live view whose measurements are rows of a table; the workers' own lines are not shown."""

    def __init__(self) -> None:
        super().__init__(person())
        self.measurements: list[dict[str, Any]] = []

    def printed(self, node: str, stream: str, data: bytes) -> None:
        """Their output stays in the logs."""

    def measured(self, metric: Mapping[str, Any]) -> None:
        if "algorithm_gb_per_s" not in metric:
            return
        if not self.measurements:
            self._console.print(Text(_HEAD, "dim"))
        row: dict[str, Any] = {name: metric.get(name) for name in _ROW}
        self.measurements.append(row)
        bus = "n/a" if row["bus_gb_per_s"] is None else f"{row['bus_gb_per_s']:.3f} GB/s"
        self._console.print(
            f"{size(row['size_bytes']):>9} {_time(row['time_us']):>11} {_time(row['min_us']):>11} {_time(row['p95_us']):>11}"
            f" {row['algorithm_gb_per_s']:6.3f} GB/s {bus:>11} {row['num_wrong']:>6}"
        )
        self._show(f"{size(row['size_bytes'])} measured")


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 10_000 else f"{microseconds / 1000:.1f} ms"
