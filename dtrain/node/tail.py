"""The end of a log, read from its end."""

from __future__ import annotations

import os
from typing import Optional


def drawn(line: bytes) -> bytes:
    """What is seen of a line: a progress bar redraws its own after a carriage return, and the last state of it stays."""
    return line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line


def last_lines(path: str, num_lines: int, text: Optional[bytes] = None, *, block_bytes: int = 1 << 20) -> tuple[bytes, int]:
    """The last lines of a file, or the last of those that hold a text, and where the file ended when this began.

    What stands behind the last newline is a line too, and is always there: it may go on. No more is read than that takes.

    Raises:
        OSError: there is no such file.
    """
    with open(path, "rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        unfinished: Optional[bytes] = None  # what stands behind the last newline, once that was found
        found: list[bytes] = []  # the last one first
        parts: list[bytes] = []  # of the line whose start was not reached yet, the last one first
        while start > 0 and (unfinished is None or len(found) < num_lines):
            size = min(block_bytes, start)
            start -= size
            file.seek(start)
            first, *lines = file.read(size).split(b"\n")
            if lines:
                lines[-1] += b"".join(reversed(parts))
                parts = []
                if unfinished is None:
                    unfinished = lines.pop()
                    num_lines -= bool(unfinished) and _holds(unfinished, text)
                found += [line for line in reversed(lines) if _holds(line, text)]
            parts.append(first)
    start_of_file = b"".join(reversed(parts))
    if unfinished is None:  # there is no newline
        return start_of_file, end
    if start == 0 and _holds(start_of_file, text):
        found.append(start_of_file)
    return b"".join(line + b"\n" for line in reversed(found[: max(0, num_lines)])) + unfinished, end


def _holds(line: bytes, text: Optional[bytes]) -> bool:
    return text is None or text in drawn(line)
