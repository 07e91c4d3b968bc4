"""Room on a disk, taken before it is needed."""

from __future__ import annotations

import ctypes
import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE = 1  # linux/falloc.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_LIBC, "fallocate64", None) or _LIBC.fallocate  # musl has one alone


def reserve(fd: int, size_bytes: int) -> None:
    """Have the disk keep room for so many bytes behind a file's end; the file itself looks as before. A file system that cannot
    promise that promises nothing.

    Raises:
        OSError: one of FULL: it has not so much.
    """
    if _fallocate(fd, _KEEP_SIZE, ctypes.c_int64(os.fstat(fd).st_size), ctypes.c_int64(size_bytes)) != 0:
        code = ctypes.get_errno()
        if code in FULL:
            raise OSError(code, os.strerror(code))
