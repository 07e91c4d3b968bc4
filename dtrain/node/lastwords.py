"""What a worker's output says of its end: its traceback or abort, and whether it only lost another worker.

The texts are those of torch 2.13 with gloo, seen by killing one rank while the others were in all_reduce, barrier, send,
recv, monitored_barrier, init_process_group and TCPStore.get; NCCL's and those of older releases are from their sources.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Optional

TAIL_BYTES = 256 * 1024  # how much of the output is looked at
_NEAR_LINES = 30
_TRACEBACK = "Traceback (most recent call last):"
CONTEXT = "During handling of the above exception, another exception occurred:"
_CAUSE = "The above exception was the direct cause of the following exception:"
# Where Python cannot even read the script there is no traceback, only the line and what is wrong with it.
_SYNTAX_ERROR = re.compile(r"^  File \".*\", line \d+\n(?:    .*\n)*(?:SyntaxError|IndentationError|TabError): .*", re.MULTILINE)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch puts it before each line once a process group exists
_MORE_OF_MESSAGE = re.compile(r"[ \t]+\S|nccl\w+: |Last error:")
_EXCEPTION = re.compile(r"[\w.]+(?::|$)")
_MESSAGE_LINES = 20
_ABORT = re.compile(r"^terminate called .*(?:\n  what\(\): .*(?:\n(?:nccl\w+: |Last error:).*|(?<=Last error:)\n.*)*)?", re.MULTILINE)

# What torch, libstdc++ and Python write once an exception has ended the process.
_NOISE = re.compile(
    r"\s*$|\s|\[[IWEF]\d* .*\]|\[[IWEF]\d*\s|terminate called|Exception raised from|<omitting|frame #|Fatal Python error|Exception ignored"
    r"|Current thread|Thread 0x|Extension modules|\*\*\*|sys:1:|.*\w+Warning: |nccl\w+: |Last error:"
)
# The exceptions through which a process learns that another one is gone, or has not come for too long.
_PEER_LOST = re.compile(
    r"gloo/transport/\w+/(?:pair|buffer|unbound_buffer)\.cc"
    r"|DistNetworkError|DistStoreError|monitoredBarrier"
    r"|^RuntimeError: (?:Connection (?:closed|reset|refused)|Broken pipe|Socket Timeout)"  # of the store, in older releases
    r"|recvValue failed|sendBytes failed"
    r"|ncclRemoteError|remote process exited|[Cc]onnection closed by remote peer|NCCL communicator was aborted on rank"
    r"|Watchdog caught collective operation timeout|store->get\(.*got error"
    r"|nccl(?:System|Internal)Error[\s\S]*(?:closed|refused|reset by|timed out|Broken pipe|connection abort)"
)
# The same classes where the fault is the worker's own: its port is taken, its tensor is not as large as the others'.
_OWN_FAULT = re.compile(r"EADDRINUSE|failed to listen|enforce fail|CUDA error|out of memory")


@dataclass(frozen=True)
class LastWords:
    told: str  # the last Python traceback, or the text of a C++ abort; "" where neither ended the worker
    is_peer_lost: bool  # what ended it is the end of another worker


def last_words(output: str, exit_code: int, number: Optional[int]) -> LastWords:
    """What ended a worker, by the end of what it printed.

    A traceback counts where only noise stands behind it. After an exit code it also counts a little further from the end
    (a hook may print a summary), and with 1, which is Python's own for an exception, anywhere.

    Args:
        number: the signal that ended it, if one did.
    """
    output = without_rank_prefix(output)
    traceback = last_traceback(output)
    if traceback:
        behind = [line for line in output[output.rindex(traceback) + len(traceback) :].splitlines() if not _NOISE.match(line)]
        if not behind or (number is None and (exit_code == 1 or len(behind) <= _NEAR_LINES)):
            return LastWords(traceback, is_peer_lost(traceback))
    syntax_errors = [match[0] for match in _SYNTAX_ERROR.finditer(output)]
    if syntax_errors and exit_code == 1 and not traceback:
        return LastWords(syntax_errors[-1], False)
    aborts = [match[0].rstrip() for match in _ABORT.finditer(output)]
    if aborts and signal.SIGABRT in (number, exit_code - 128):
        return LastWords(aborts[-1], is_peer_lost(aborts[-1]))
    return LastWords("", False)


def is_whole(told: str) -> bool:
    """Whether they end by naming an exception, or what C++ said; else a full disk may have cut them off."""
    chain = exceptions(told)
    return bool(told) and (not chain or _EXCEPTION.match(chain[-1]) is not None)


def is_syntax_error(told: str) -> bool:
    return _SYNTAX_ERROR.fullmatch(told) is not None


def without_rank_prefix(text: str) -> str:
    return _RANK_PREFIX.sub("", text)


def last_traceback(text: str) -> str:
    """The last Python traceback in a worker's output, with the message of the exception; "" without one.

    Chained tracebacks ("During handling of ...", "The above exception was the direct cause ...") stay together.
    """
    start = text.rfind(_TRACEBACK)
    if start < 0:
        return ""
    while True:
        before = text.rfind(_TRACEBACK, 0, start)
        between = text[before:start].rstrip() if before >= 0 else ""
        if not between.endswith((CONTEXT, _CAUSE)):
            break
        start = before
    lines = text[start:].splitlines()
    last_mark = max(index for index, line in enumerate(lines) if line.startswith(_TRACEBACK))
    return "\n".join(lines[: _end_of_message(lines, last_mark)])


def is_peer_lost(told: str) -> bool:
    """Whether a traceback or an abort tells of another worker's end.

    In a chain the first exception decides: a `finally` that then waits in vain for the others is no symptom.
    """
    message = next(iter(exceptions(told)), told)
    return _PEER_LOST.search(message) is not None and _OWN_FAULT.search(message) is None


def exceptions(traceback: str) -> list[str]:
    """The message of each exception of a chain, the first one first."""
    lines = traceback.splitlines()
    found = []
    for mark in [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]:
        end = _end_of_message(lines, mark)
        start = next((index for index in range(mark + 1, end) if lines[index] and not lines[index][0].isspace()), end)
        found.append("\n".join(lines[start:end]))
    return found


def _end_of_message(lines: list[str], mark: int) -> int:
    """Where the traceback that begins at `mark` ends: frames are indented, the exception's own first line is not."""
    for start in range(mark + 1, len(lines)):
        if lines[start] and not lines[start][0].isspace():
            end = start + 1
            while end < min(len(lines), start + _MESSAGE_LINES):
                if not _MORE_OF_MESSAGE.match(lines[end]) and not lines[end - 1].startswith("Last error:"):
                    break
                end += 1
            return end
    return len(lines)
