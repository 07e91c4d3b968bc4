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
    there = {
        FIRST: wire.Gpu(0, "NVIDIA H100 80GB HBM3", 81559 << 20, 1 << 20),
        SECOND: wire.Gpu(1, "NVIDIA GB10, of a kind", None, None),
    }
    assert gpus.parse_gpus(GPUS) == (there, "GPU 2: [GPU is lost]")
    assert gpus.parse_gpus("No devices were found\n") == ({}, "")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (  # after an update of the driver, before the restart
            "echo 'Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54'; exit 18",
            "tells of no GPU: Failed to initialize NVML: Driver/library version mismatch NVML library version: 550.54",
        ),
        (
            'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver. "\n'
            "echo 'Make sure that the latest NVIDIA driver is installed and running.'; exit 9",
            "tells of no GPU: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
            "Make sure that the latest NVIDIA driver is installed and running.",
        ),
        ("echo 'No devices were found'; exit 6", "tells of no GPU: No devices were found"),
        ("echo 'No devices were found'", "tells of no GPU: No devices were found"),
        (  # of eight GPUs one has fallen off the bus (Xid 79)
            "echo 'Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error'; exit 255",
            "tells of no GPU: Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error",
        ),
        ("kill -SEGV $$", "tells of no GPU: it ended with -11"),
        ("printf '\\033[2J\\377'; exit 1", "tells of no GPU: ?[2J\ufffd"),
        (
            "case $1 in --query-gpu*) echo '0, GPU-1, 81559, 1, NVIDIA H100'; exit;; esac\n"
            "echo 'Field \"gpu_uuid\" is not a valid field to query.'; exit 2",
            'does not say who holds the GPUs: Field "gpu_uuid" is not a valid field to query.',
        ),
    ],
)
def test_an_nvidia_smi_that_fails_says_why(line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own words, as drivers 535 and 550 print them."""
    tool = _tool(tmp_path, monkeypatch, line)
    assert gpus.found(NodeDir(str(tmp_path))) == gpus.Found((), f"{tool} {told}")


def test_an_nvidia_smi_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what it has started."""
    monkeypatch.setattr(gpus, "_NVIDIA_SMI_TIMEOUT_S", 0.3)
    tool = _tool(tmp_path, monkeypatch, "echo $$ > pid; sleep 600 & wait".replace("pid", str(tmp_path / "pid")))
    assert gpus.found(NodeDir(str(tmp_path))) == gpus.Found((), f"{tool} did not answer within 0.3 s")
    os.waitpid(int((tmp_path / "pid").read_text()), 0)


def test_an_nvidia_smi_that_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = _tool(tmp_path, monkeypatch, "")
    tool.write_bytes(b"\x7fELF")
    assert gpus.found(NodeDir(str(tmp_path))) == gpus.Found((), f"{tool} tells of no GPU: Exec format error")


def test_a_machine_that_has_lost_a_gpu_has_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said").write_text(GPUS)
    tool = _tool(tmp_path, monkeypatch, f"case $1 in --query-gpu*) cat {tmp_path}/said;; esac")
    there = gpus.found(NodeDir(str(tmp_path)))
    assert [gpu.index for gpu in there.gpus] == [0, 1] and there.fault == f"{tool} says of GPU 2: [GPU is lost]"


def _tool(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> Path:
    """An nvidia-smi on the PATH that does this."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{line}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tool


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
