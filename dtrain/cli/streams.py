"""The standard streams, as every command may rely on them: open, taking every character, and failing in one way."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from dtrain.errors import NoSpace

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDIN, _STDOUT, _STDERR = range(3)


class ReaderGone(Exception):
    """Whoever reads stdout has had enough, as in `dtrain logs | head`."""

    exit_code = 141  # 128 + SIGPIPE, as any other program would end


def take_over() -> None:
    """Set sys.stdout and sys.stderr, before anything else is opened.

    Writing to stdout raises NoSpace, or ReaderGone. Writing to stderr never fails: there is no other place to say so, and no
    job ends for it. A character that the encoding lacks is written as an escape.
    """
    for number in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file that is opened would get what is printed
            os.open(os.devnull, os.O_RDONLY)  # so that a write still fails
    sys.stdout, sys.stderr = _text(_STDOUT, sys.stdout), _text(_STDERR, sys.stderr)


def _text(number: int, before: TextIO | None) -> TextIO:
    """Python's own has no encoding where it was closed."""
    is_by_line = number == _STDERR or os.isatty(number)
    encoding = "utf-8" if before is None else before.encoding
    return io.TextIOWrapper(io.BufferedWriter(_Raw(number)), encoding, errors="backslashreplace", line_buffering=is_by_line)


class _Raw(io.FileIO):
    """Fails once at most: what is written after that goes nowhere."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.fileno() == _STDERR:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            cause = "is closed" if error.errno == errno.EBADF else f"cannot be written: {error.strerror}"
            raise NoSpace(f"stdout {cause}", hint="what was written is not whole: let it go where there is room") from error
