"""One word for why a worker ended, from what it left."""

from __future__ import annotations

import pytest

from dtrain.node import wire
from dtrain.reasons import REASONS, reason_of

SHOWN = wire.MemoryFinding(True, "kernel log: Memory cgroup out of memory: Killed process 20822 (python3)")
NOT_SHOWN = wire.MemoryFinding(False, "neither the kernel log nor its cgroup shows it")
KILLED_LOADER = "RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. "
BUS_ERROR = "RuntimeError: DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that"


def ended(exit_code: int, told: str = "", memory: wire.MemoryFinding | None = None, *, by_shell: bool = False) -> wire.WorkerEnded:
    number = exit_code - 128 if exit_code > 128 and not by_shell else None
    return wire.WorkerEnded(1.0, 0, 0, exit_code, number, told, symptom=False, memory=memory)


def traceback(*messages: str, link: str = "The above exception was the direct cause of the following exception:") -> str:
    return f"\n\n{link}\n\n".join(f'Traceback (most recent call last):\n  File "a.py", line 1\n{message}' for message in messages)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("ValueError: x", "exception"),
        ("KeyboardInterrupt", "exception"),
        ("ModuleNotFoundError: No module named 'x'", "import-error"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "cuda-out-of-memory"),
        ("MemoryError", "out-of-memory"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array", "out-of-memory"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory. Error code 12 (Cannot allocate memory)", "out-of-memory"),
        ("OSError: [Errno 28] No space left on device: 'x'", "no-space"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen. name: EADDRINUSE", "port-in-use"),
        ("OSError: [Errno 98] Address already in use", "port-in-use"),
        ("torch.distributed.DistNetworkError: Broken pipe", "peer-lost"),
        (KILLED_LOADER, "killed"),
        (BUS_ERROR, "bus-error"),
    ],
)
def test_an_exception_says_it(message: str, reason: str) -> None:
    assert reason_of(ended(1, traceback(message))) == reason


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [(132, "illegal-instruction"), (134, "aborted"), (135, "bus-error"), (136, "arithmetic-error"), (137, "killed"), (139, "segfault"),
     (143, "terminated")],
)  # fmt: skip
def test_a_signal_says_it_and_so_does_a_shell_whose_command_it_ended(exit_code: int, reason: str) -> None:
    assert reason_of(ended(exit_code)) == reason_of(ended(exit_code, by_shell=True)) == reason


def test_codes_without_a_word() -> None:
    assert [reason_of(ended(code)) for code in (3, 127, 129)] == ["exit-code", "not-found", "terminated"]


def test_out_of_memory_needs_proof() -> None:
    assert reason_of(ended(137, memory=NOT_SHOWN)) == "killed"
    assert reason_of(ended(137, memory=SHOWN)) == reason_of(ended(137, memory=SHOWN, by_shell=True)) == "out-of-memory"
    assert reason_of(ended(1, traceback(KILLED_LOADER), SHOWN)) == "out-of-memory"
    assert (
        reason_of(ended(134, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"))
        == "out-of-memory"
    )


def test_what_an_exception_was_raised_from_tells_more_than_its_own_name() -> None:
    full = "OSError: [Errno 28] No space left on device"
    assert reason_of(ended(1, traceback(full, "SaveError: step 3"))) == "no-space"
    beside = "During handling of the above exception, another exception occurred:"
    assert reason_of(ended(1, traceback("ImportError: no flash_attn", "ValueError: bad batch", link=beside))) == "exception"


def test_every_reason_has_a_next_step() -> None:
    assert [name for name, reason in REASONS.items() if not reason.hint] == []
