"""What a node may say of the jobs that it knows."""

from __future__ import annotations

import pytest

from dtrain.discovery import _ask
from dtrain.errors import PreflightFailed
from dtrain.link import Link
from dtrain.node import wire


class _Endless:
    """A node that tells of jobs without end."""

    def __init__(self) -> None:
        self._frame = wire.frame(wire.JobHere("aa11", "n1", alive=False))
        self._left = b""

    def read(self, size: int) -> bytes:
        self._left = self._left or self._frame
        part, self._left = self._left[:size], self._left[size:]
        return part

    def write(self, data: bytes) -> None: ...

    def stderr(self) -> str:
        return ""

    def close(self) -> None: ...


def test_a_node_that_tells_of_jobs_without_end_is_given_up_on() -> None:
    with pytest.raises(PreflightFailed, match=r"^n1: it tells of more than 20,000 jobs"):
        _ask("n1", Link("n1", _Endless()))
