"""How much of their time the workers of a pipeline compute, and how much they wait: the bubble, as measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch


@dataclass(frozen=True)
class Occupancy:
    """Of a number of iterations, summed over all workers."""

    busy_s: float = 0.0  # in forward, loss and backward
    total_s: float = 0.0  # from an iteration's begin until the last worker is through its micro-batches

    @property
    def bubble(self) -> float:
        """The part of the time, 0..1, in which a worker waits, for whatever it be: other stages, or the network."""
        return 1 - self.busy_s / self.total_s

    def __add__(self, other: Occupancy) -> Occupancy:
        return Occupancy(self.busy_s + other.busy_s, self.total_s + other.total_s)


class BusyClock(Protocol):
    """Runs within `with clock:`."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None: ...

    def take_s(self) -> float:
        """The seconds since it was asked before."""
        ...


def busy_clock(device: torch.device) -> BusyClock:
    return CudaClock() if device.type == "cuda" else CpuClock()


class CpuClock:
    def __init__(self) -> None:
        self._busy_s = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._busy_s += time.perf_counter() - self._began_s

    def take_s(self) -> float:
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s


class CudaClock:
    """By events in the device's stream: the host is done with a micro-batch long before the device is."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        self._spans.append((begin, end))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._spans[-1][1].record()

    def take_s(self) -> float:
        spans, self._spans = self._spans, []
        if not spans:
            return 0.0
        spans[-1][1].synchronize()
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in spans)
        return milliseconds / 1000
