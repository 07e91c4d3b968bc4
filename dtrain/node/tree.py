"""The working directory on a node: file contents by digest, and a tree of each job's own made from them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from typing import Callable, Optional

from dtrain.node.wire import CHUNK_BYTES, TreeEntry


def file_digest(path: str) -> str:
    digest = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as file:
        while True:
            part = file.read(1 << 20)
            if not part:
                return digest.hexdigest()
            digest.update(part)


def scan(root: str, keep: Callable[[str, bool], bool] = lambda path, folder: True) -> list[TreeEntry]:
    """Every file, symlink and folder below `root` that `keep(path, is_folder)` wants, sorted by path.

    A folder that is not kept is not entered. Sockets, pipes and devices are passed over.
    """
    return list(_scan(root, "", keep))


def _scan(root: str, below: str, keep: Callable[[str, bool], bool]) -> Iterator[TreeEntry]:
    for item in sorted(os.scandir(os.path.join(root, below)), key=lambda item: item.name):
        path = f"{below}/{item.name}" if below else item.name
        folder = item.is_dir(follow_symlinks=False)
        if not keep(path, folder):
            continue
        status = item.stat(follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        if item.is_symlink():
            yield TreeEntry(path, mode, 0, "", link=os.readlink(item.path))
        elif folder:
            yield TreeEntry(path, mode, 0, "", folder=True)
            yield from _scan(root, path, keep)
        elif item.is_file(follow_symlinks=False):
            yield TreeEntry(path, mode, status.st_size, file_digest(item.path))


class Blobs:
    """File contents, each under its digest, so that no content is sent twice."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._incoming: Optional[tuple[str, int]] = None  # path and descriptor of the file that is being received
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def missing(self, entries: Sequence[TreeEntry]) -> tuple[str, ...]:
        """Digests among the entries whose content is not here."""
        wanted = dict.fromkeys(entry.digest for entry in entries if entry.digest)
        return tuple(digest for digest in wanted if not os.path.exists(self._path(digest)))

    def put(self, digest: str, part: bytes, last: bool) -> bool:
        """Take the next part of a content. False: that was the last, and the whole is not what its digest says."""
        if self._incoming is None:
            fd, path = tempfile.mkstemp(dir=self._folder, prefix="incoming-")
            self._incoming = path, fd
        path, fd = self._incoming
        try:
            _write_all(fd, part)
        except OSError:
            self.close()
            raise
        if last:
            self._incoming = None
            os.close(fd)
            if file_digest(path) != digest:
                os.unlink(path)
                return False
            os.makedirs(os.path.dirname(self._path(digest)), mode=0o700, exist_ok=True)
            os.replace(path, self._path(digest))
        return True

    def close(self) -> None:
        """Forget what was received of a content that never came to its end."""
        if self._incoming is not None:
            path, fd = self._incoming
            self._incoming = None
            os.close(fd)
            os.unlink(path)

    def make_tree(self, entries: Sequence[TreeEntry], root: str) -> None:
        """Lay out the entries below `root`, which must not exist. Files are copies: a job may change its own."""
        os.makedirs(root, mode=0o700)
        for entry in entries:
            path = inside(root, entry.path)
            if entry.link is not None:
                os.symlink(entry.link, path)
            elif entry.folder:
                os.mkdir(path, 0o700)
            else:
                shutil.copyfile(self._path(entry.digest), path)
                os.chmod(path, entry.mode)
        for entry in reversed(entries):  # folders last: one may forbid writing
            if entry.folder:
                os.chmod(inside(root, entry.path), entry.mode)

    def _path(self, digest: str) -> str:
        return os.path.join(self._folder, digest[:2], digest)


def inside(root: str, path: str) -> str:
    """`path` below `root`; never through a symlink of the same tree, and never out of it."""
    parts = path.split("/")
    if path.startswith("/") or not path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"not a path inside the working directory: {path!r}")
    above = root
    for part in parts[:-1]:
        above = os.path.join(above, part)
        if os.path.islink(above):
            raise ValueError(f"{path!r} goes through the symlink {above!r}")
    return os.path.join(root, *parts)


def link_outputs(tree: str, name: str, kept: str) -> None:
    """Make `name` in the tree a link to the folder that persists."""
    link = inside(tree, name)
    os.makedirs(os.path.dirname(link), exist_ok=True)
    os.symlink(kept, link)


def read_parts(path: str, size_bytes: Optional[int] = None) -> Iterator[bytes]:
    """A file's content, or as much of it as it had when it was looked at: a log may grow while it is sent."""
    left = size_bytes
    with open(path, "rb") as file:
        while True:
            part = file.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
            if not part:
                return
            if left is not None:
                left -= len(part)
            yield part


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
