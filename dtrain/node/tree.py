"""The working directory on a node: file contents by digest, lists of files by hash, and a tree of each job's own made from them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Callable, NamedTuple, Optional, TypeVar

from dtrain.node.wire import CHUNK_BYTES

_INCOMING = "incoming-"
_READ_BYTES = 1 << 20
_Row = TypeVar("_Row", bound="NamedTuple")


class Found(NamedTuple):
    """A file, symlink or folder as it lies on a disk, named relative to where the scan began."""

    path: str
    mode: int  # permission bits
    size_bytes: int  # 0 for a symlink or folder
    mtime_ns: int
    ctime_ns: int
    inode: int
    link: Optional[str] = None  # target of a symlink
    folder: bool = False


class TreeEntry(NamedTuple):
    """A file, symlink or folder of the working directory, named relative to it. A folder comes before what is in it."""

    path: str
    mode: int  # permission bits
    size_bytes: int  # 0 for a symlink or folder
    digest: str  # of a file's content; "" for a symlink or folder
    link: Optional[str] = None  # target of a symlink
    folder: bool = False


def pack(rows: Iterable[NamedTuple]) -> bytes:
    """A list of Found or TreeEntry as it is sent and stored: equal for equal rows."""
    return json.dumps(list(rows), separators=(",", ":")).encode()


def unpack(kind: type[_Row], data: bytes) -> list[_Row]:
    """The list that `pack` was given.

    Raises:
        ValueError: it is no such list.
    """
    try:
        return [kind(*row) for row in json.loads(data)]
    except TypeError as error:
        raise ValueError(f"not a list of files: {data[:200]!r}") from error


def manifest_hash(manifest: bytes) -> str:
    """One name for a whole tree: equal for equal files, whenever and from wherever they were read."""
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()


def file_digest(path: str, size_bytes: int) -> str:
    """Of a file's content, or of as much of it as it had when it was looked at."""
    digest = _new_digest()
    for part in read_parts(path, size_bytes):
        digest.update(part)
    return digest.hexdigest()


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=20)


def scan(root: str, keep: Callable[[str, bool], bool] = lambda path, folder: True) -> Iterator[Found]:
    """Every file, symlink and folder below `root` that `keep(path, is_folder)` wants; a folder before what is in it.

    A folder that is not kept is not entered. Sockets, pipes and devices are passed over, and so is what vanishes meanwhile.
    """
    waiting = [_items(root, "")]
    while waiting:  # without recursion, for folders may lie deeper than Python calls
        item, path = next(waiting[-1], (None, ""))
        if item is None:
            waiting.pop()
            continue
        folder = item.is_dir(follow_symlinks=False)
        if not keep(path, folder):
            continue
        try:
            status = item.stat(follow_symlinks=False)
            link = os.readlink(item.path) if stat.S_ISLNK(status.st_mode) else None
        except FileNotFoundError:
            continue
        is_file = stat.S_ISREG(status.st_mode)
        if is_file or folder or link is not None:
            size_bytes = status.st_size if is_file else 0
            mode = stat.S_IMODE(status.st_mode)
            yield Found(path, mode, size_bytes, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, link, folder)
        if folder:
            waiting.append(_items(root, path))


def _items(root: str, below: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    """What lies in a folder, by name, each with its path below `root`."""
    try:
        with os.scandir(os.path.join(root, below)) as items:
            found = sorted(items, key=lambda item: item.name)
    except FileNotFoundError:
        return
    for item in found:
        yield item, f"{below}/{item.name}" if below else item.name


def remove(top: str) -> None:
    """Remove a folder, however deep: of each folder in it the folders move up into `top` before it goes.

    Killed at any point, what is left can be removed again. What another user left there, as through sudo or docker, stays.
    """
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)  # it may forbid writing
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    if os.path.islink(path) or not os.path.isdir(path):
                        os.unlink(path)
                        continue
                    if folder != top:
                        os.chmod(path, 0o700)  # whose parent changes
                        moved = os.path.join(top, os.urandom(8).hex())
                        os.rename(path, moved)
                        path = moved
                    waiting.append(path)
            if folder != top:
                os.rmdir(folder)
    with contextlib.suppress(OSError):
        os.rmdir(top)


class Trees:
    """What is kept of synced trees: each content once, by its digest, and the list of each tree's files, by its hash.

    A list comes before the contents that only it wants, and goes after them.
    """

    def __init__(self, blobs: str, manifests: str) -> None:
        self._blobs = blobs
        self._manifests = manifests

    def manifest(self, name: str) -> Optional[list[TreeEntry]]:
        """The files of a tree; None where nothing is known of it, or after a crash of the machine no longer."""
        try:
            with open(self._manifest_path(name), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        return unpack(TreeEntry, data) if manifest_hash(data) == name else None

    def put_manifest(self, name: str, data: bytes) -> None:
        if manifest_hash(data) != name:
            raise ValueError("the list of files is not the one that was offered")
        unpack(TreeEntry, data)
        os.makedirs(self._manifests, mode=0o700, exist_ok=True)
        partial = os.path.join(self._manifests, f"{_INCOMING}{os.urandom(8).hex()}")
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _write_all(fd, memoryview(data))
            finally:
                os.close(fd)
            os.rename(partial, self._manifest_path(name))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise

    def missing(self, entries: Sequence[TreeEntry]) -> list[TreeEntry]:
        """One entry for each content that is not here, in the order of the entries. An empty content needs none."""
        wanted = {entry.digest: entry for entry in entries if entry.size_bytes}
        return [entry for entry in wanted.values() if self._size(entry.digest) != entry.size_bytes]

    def receive(self, wanted: Sequence[TreeEntry]) -> Incoming:
        os.makedirs(self._blobs, mode=0o700, exist_ok=True)
        return Incoming(self._blobs, wanted)

    def make_tree(self, entries: Sequence[TreeEntry], root: str) -> None:
        """Lay out the entries below `root`, which must not exist. Files are copies: a job may change its own.

        Raises:
            ValueError: an entry does not lie in a folder of this tree.
        """
        os.makedirs(root, mode=0o700)
        folders = {"": 0o700}
        for entry in entries:
            above, _, name = entry.path.rpartition("/")
            if above not in folders or name in ("", ".", ".."):  # a symlink is no folder
                raise ValueError(f"not a path inside the working directory: {entry.path!r}")
            path = f"{root}/{entry.path}"
            if entry.link is not None:
                os.symlink(entry.link, path)
            elif entry.folder:
                os.mkdir(path, 0o700)
                folders[entry.path] = entry.mode
            else:
                self._copy(entry, path)
        for folder, mode in reversed(folders.items()):  # last, for one may forbid writing
            if mode != 0o700:
                os.chmod(f"{root}/{folder}", mode)

    def collect(self, used: Container[str]) -> None:
        """Remove all but these trees. Nobody may be sending or laying out a tree meanwhile; a job has copies, so none loses a file."""
        names = _names(self._manifests)
        unused = [name for name in names if name not in used]  # those that were coming too
        if unused:
            wanted = {entry.digest for name in names if name in used for entry in self.manifest(name) or ()}
            for folder in _names(self._blobs):
                for digest in _names(os.path.join(self._blobs, folder)):
                    if digest not in wanted:
                        os.unlink(os.path.join(self._blobs, folder, digest))
            for name in unused:
                os.unlink(self._manifest_path(name))
        for name in _names(self._blobs):
            if name.startswith(_INCOMING):
                os.unlink(os.path.join(self._blobs, name))

    def _copy(self, entry: TreeEntry, path: str) -> None:
        to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            left = entry.size_bytes
            if left:
                blob = os.open(_blob(self._blobs, entry.digest), os.O_RDONLY)
                try:
                    while left and (part := os.read(blob, min(left, _READ_BYTES))):
                        _write_all(to, memoryview(part))
                        left -= len(part)
                finally:
                    os.close(blob)
            if left:
                raise ValueError(f"what this node keeps of {entry.path} is damaged")
            os.fchmod(to, entry.mode)
        finally:
            os.close(to)

    def _size(self, digest: str) -> int:
        """Of a content that is here; after a crash of the machine it may be shorter than it was."""
        try:
            return os.stat(_blob(self._blobs, digest)).st_size
        except FileNotFoundError:
            return -1

    def _manifest_path(self, name: str) -> str:
        return os.path.join(self._manifests, name)


class Incoming:
    """The contents that are missing, as one stream, in the order of the entries."""

    def __init__(self, folder: str, wanted: Sequence[TreeEntry]) -> None:
        self.left_bytes = sum(entry.size_bytes for entry in wanted)
        self._folder = folder
        self._wanted = iter(wanted)
        self._partial = os.path.join(folder, f"{_INCOMING}{os.urandom(8).hex()}")
        self._entry: Optional[TreeEntry] = None  # that is being received
        self._fd = -1
        self._is_broken = False

    def take(self, data: bytes) -> None:
        """Take the next bytes of the stream. After an error the rest is only counted.

        Raises:
            ValueError: a content is not what its digest says.
        """
        self.left_bytes -= len(data)
        if self._is_broken:
            return
        try:
            self._take(memoryview(data))
        except BaseException:
            self._is_broken = True
            self.close()
            raise

    def close(self) -> None:
        """Forget what was received of a content that never came to its end."""
        if self._entry is not None:
            self._entry = None
            os.close(self._fd)
            os.unlink(self._partial)

    def _take(self, view: memoryview) -> None:
        while view:
            if self._entry is None:
                self._begin(next(self._wanted))
            part = view[: self._left]
            _write_all(self._fd, part)
            self._digest.update(part)
            self._left -= len(part)
            view = view[len(part) :]
            if not self._left:
                self._end()

    def _begin(self, entry: TreeEntry) -> None:
        self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._entry, self._left, self._digest = entry, entry.size_bytes, _new_digest()

    def _end(self) -> None:
        entry = self._entry
        assert entry is not None
        if self._digest.hexdigest() != entry.digest:
            raise ValueError(f"{entry.path} changed while it was sent")
        path = _blob(self._folder, entry.digest)
        try:
            os.rename(self._partial, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.rename(self._partial, path)
        self._entry = None
        os.close(self._fd)


def inside(root: str, path: str) -> str:
    """`path` below `root`; never through a symlink that lies there, and never out of it."""
    parts = path.split("/")
    if path.startswith("/") or not path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"not a path inside the folder: {path!r}")
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


def read_parts(path: str, size_bytes: int) -> Iterator[bytes]:
    """A file's content, or as much of it as it had when it was looked at: a log may grow while it is sent."""
    with open(path, "rb", buffering=0) as file:
        while size_bytes > 0 and (part := file.read(min(CHUNK_BYTES, size_bytes))):
            size_bytes -= len(part)
            yield part


def _blob(folder: str, digest: str) -> str:
    return f"{folder}/{digest[:2]}/{digest}"


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]
