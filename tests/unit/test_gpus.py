"""What nvidia-smi says, and the locks of GPUs."""

from __future__ import annotations

import fcntl
import getpass
import os
from pathlib import Path

import pytest

from dtrain.node import gpus, wire
from dtrain.node.folder import NodeDir

# As drivers write it, with warnings that they add, memory that they do not tell, and a GPU that has fallen off the bus.
GPUS = """0, GPU-6c1d9d43-1d0b-7a5b-5f3e-0d6a1f0c9a11, 81559, 1, NVIDIA H100 80GB HBM3
1, GPU-f4d2a1b0-77aa-0c58-9d6e-2b1f9a8c7d22, [N/A], [N/A], NVIDIA GB10, of a kind
2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]
WARNING: infoROM is corrupted at gpu 0000:1B:00.0
"""
PROCESSES = """GPU-6c1d9d43-1d0b-7a5b-5f3e-0d6a1f0c9a11, {pid}, 10240
GPU-6c1d9d43-1d0b-7a5b-5f3e-0d6a1f0c9a11, 4194305, [N/A]
GPU-f4d2a1b0-77aa-0c58-9d6e-2b1f9a8c7d22, [Insufficient Permissions], [Not Supported]
WARNING: infoROM is corrupted at gpu 0000:1B:00.0
"""
FIRST, SECOND = (line.split(", ")[1] for line in GPUS.splitlines()[:2])


def test_gpus_are_read_past_warnings_and_what_is_not_told() -> None:
    assert gpus.parse_gpus(GPUS) == {
        FIRST: wire.Gpu(0, "NVIDIA H100 80GB HBM3", 81559 << 20, 1 << 20),
        SECOND: wire.Gpu(1, "NVIDIA GB10, of a kind", None, None),
    }
    assert gpus.parse_gpus("No devices were found\n") == {}


def test_whatever_is_named_holds_its_gpu() -> None:
    """A process of another container has a pid that /proc does not know (no pid is above 2^22)."""
    holders = gpus.parse_processes(PROCESSES.format(pid=os.getpid()))
    mine, other = holders[FIRST]
    assert (mine.pid, mine.user, mine.memory_bytes) == (os.getpid(), getpass.getuser(), 10 << 30)
    assert mine.command and mine.command.isprintable()
    assert other == wire.GpuHolder(4194305, "", None, "")
    assert holders[SECOND] == [wire.GpuHolder(0, "", None, "")]
    assert gpus.parse_processes("") == {}


def _about(job: str) -> wire.Open:
    return wire.Open("auto", job, "digits", "node0")


def test_gpus_are_reserved_all_or_none(tmp_path: Path) -> None:
    node_dir = NodeDir(str(tmp_path))
    first = gpus.reserve(node_dir, (2, 1), _about("first"))
    with pytest.raises(gpus.Taken) as caught:
        gpus.reserve(node_dir, (0, 1), _about("second"))
    assert (caught.value.index, caught.value.by) == (1, _about("first"))
    others = gpus.reserve(node_dir, (0,), _about("third"))  # the second left nothing behind
    gpus.release(first)
    again = gpus.reserve(node_dir, (1, 2), _about("fourth"))  # though descriptors of the first are still open
    for fd in (*first, *others, *again):
        os.close(fd)


def test_a_lock_that_names_nobody_yet_still_holds(tmp_path: Path) -> None:
    node_dir = NodeDir(str(tmp_path))
    (tmp_path / "gpus").mkdir()
    with open(node_dir.gpu_lock(0), "w") as file:
        file.write('{"type": "Op')
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(gpus.Taken) as caught:
            gpus.reserve(node_dir, (0,), _about("late"))
    assert caught.value.by is None
