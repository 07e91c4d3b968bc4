"""The user's working directory, by content, to every node."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from dtrain.digests import Digests, digests_in
from dtrain.errors import InFile, PreflightFailed, Problem, SpecError
from dtrain.link import Link
from dtrain.node import tree, wire
from dtrain.node.folder import root_of
from dtrain.node.tree import Found, TreeEntry
from dtrain.spec import JobSpec, Module, Run, Script
from dtrain.trainers.config import TrainerConfig

LIMIT_BYTES = 500_000_000  # of a working directory
_LOOK_ON_S = 1.0  # beyond the limit, so that all that is large is named at once; but a workdir may be a whole disk
_MOST_LARGEST = 5
_IGNORE_FILES = (".gitignore", ".dtrainignore")
_PARTIAL = ".dtrain-partial-"
_OLD_S = 86400.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What of a working directory goes to the nodes, by content."""

    root: Path
    entries: tuple[TreeEntry, ...]
    manifest: bytes  # the entries as they are sent

    @property
    def hash(self) -> str:
        return tree.manifest_hash(self.manifest)


def read_workdir(spec: JobSpec, state: Path) -> Snapshot:
    """What of a job's working directory goes to the nodes.

    Args:
        state: dtrain's folder on this machine.

    Raises:
        PreflightFailed: a file cannot be read, or they are too many.
    """
    own = [state, Path(root_of(spec.cluster.dir)), *([Path(spec.outputs)] if os.path.isabs(spec.outputs) else [])]
    return scan_workdir(spec.workdir, spec.outputs, digests_in(state), own)


def scan_workdir(workdir: Path, outputs: str, digests: Path, own: Collection[Path] = ()) -> Snapshot:
    """All of the working directory but .git folders, the outputs, and what the ignore files name.

    Args:
        digests: folder that keeps digests of files from one launch to the next.
        own: folders that grow with each launch, if a node is this machine or shares them with it; left out where they lie in there.

    Raises:
        PreflightFailed: a file cannot be read, or they are too many.
    """
    rules = _IgnoreRules(workdir)
    real = workdir.resolve()
    if itself := next((folder for folder in own if folder.resolve() == real), None):
        raise PreflightFailed(
            f"{itself} is the working directory itself, and each launch would send what the one before it left there",
            hint="name a folder of its own with dir: in the cluster file, or outputs:",
            finding="workdir-unfit",
        )
    left_out = {outputs, *(str(folder.resolve().relative_to(real)) for folder in own if folder.resolve().is_relative_to(real))}

    def keep(path: str, folder: bool) -> bool:
        return path not in left_out and path.rpartition("/")[2] != ".git" and not rules.ignore(path, folder)

    known = Digests(digests, workdir)
    entries = []
    try:
        for found in _within_limit(workdir, tree.scan(str(workdir), keep)):
            is_file = not found.folder and found.link is None
            with contextlib.suppress(FileNotFoundError):  # it vanished meanwhile
                digest = known.of(found) if is_file else ""
                entries.append(TreeEntry(found.path, found.mode, found.size_bytes, digest, found.link, found.folder))
    except OSError as error:
        raise PreflightFailed(
            f"the working directory cannot be read: {error.filename}: {error.strerror}",
            hint="name what is not needed in .dtrainignore",
            finding="workdir-unfit",
        ) from error
    known.save()
    return Snapshot(workdir, tuple(entries), tree.pack(entries))


def check_is_sent(spec: JobSpec) -> None:
    """Whether the files of its working directory that the job runs are among those that go to the nodes.

    Raises:
        SpecError: it lies in the outputs, or an ignore file names it.
    """
    problems = []
    for key, path in _files(spec.run) if spec.sync else ():
        if os.path.lexists(spec.workdir / path) and (why := kept_back(spec.workdir, spec.outputs, os.path.normpath(path))):
            where = spec.places.get(key, InFile(str(spec.path)))
            problems.append(Problem(where, f"{key}: {path} is not sent to the nodes: {why[0]}", why[1]))
    if problems:
        raise SpecError(problems)


def _files(run: Run) -> list[tuple[str, str]]:
    """Those that a job runs, where they are in its working directory at all, and the keys that say so."""
    match run:
        case Script(path):
            return [("script", path)]
        case Module(name):
            inner = name.replace(".", "/")
            return [("module", f"{inner}.py"), ("module", f"{inner}/__main__.py")]
        case TrainerConfig(model=model, data=data):
            targets = [(key, name.partition(":")[0].replace(".", "/")) for key, name in (("model", model), ("data", data)) if ":" in name]
            return [(f"trainer.{key}", f"{inner}{ending}") for key, inner in targets for ending in (".py", "/__init__.py")]
        case _:
            return []


def kept_back(workdir: Path, outputs: str, path: str) -> tuple[str, str] | None:
    """(cause, hint) where a file is none of those that `scan_workdir` finds."""
    rules = _IgnoreRules(workdir)
    parts = path.split("/")
    for part in ("/".join(parts[:length]) for length in range(1, len(parts) + 1)):
        if workdir / part == workdir / outputs:
            return f"{part} is the folder of the job's outputs", "move it, or name another folder with outputs:"
        is_link = os.path.islink(workdir / part)
        if rules.ignore(part, part != path and not is_link):
            folder, name = os.path.split(workdir / part)
            return f"{' or '.join(_IGNORE_FILES)} names {part}", f"write a line !/{name} into {folder}/.dtrainignore"
        if is_link:
            return None  # what is sent is the link
    return None


def _within_limit(workdir: Path, scan: Iterator[Found]) -> list[Found]:
    """What was found.

    Raises:
        PreflightFailed: it is too much.
    """
    files: list[Found] = []
    total, until_s = 0, math.inf
    try:
        for found in scan:
            files.append(found)
            total += found.size_bytes
            if total > LIMIT_BYTES:
                until_s = min(until_s, time.monotonic() + _LOOK_ON_S)
                if time.monotonic() > until_s:
                    break
    except OSError:
        if total <= LIMIT_BYTES:
            raise
    if total > LIMIT_BYTES:
        largest = ", ".join(f"{path} {_megabytes(size)}" for path, size in _largest(files))
        raise PreflightFailed(
            f"{workdir} is too large: {_megabytes(total)} or more, where at most {_megabytes(LIMIT_BYTES)} are sent; largest: {largest}",
            hint="name what is not needed in .dtrainignore, or put it where all nodes see it and set sync: false",
            finding="workdir-unfit",
        )
    return files


def _largest(files: Sequence[Found]) -> list[tuple[str, int]]:
    """What takes most of the room, each as deep below as nearly all of it is in one place."""
    sizes: dict[str, int] = {}
    inner: dict[str, dict[str, None]] = {}
    for found in files:
        path = found.path
        while path:
            sizes[path] = sizes.get(path, 0) + found.size_bytes
            above = path.rpartition("/")[0]
            inner.setdefault(above, {})[path] = None
            path = above
    largest = []
    for path in sorted(inner[""], key=sizes.__getitem__, reverse=True)[:_MOST_LARGEST]:
        while path in inner and sizes[deeper := max(inner[path], key=sizes.__getitem__)] > 0.9 * sizes[path]:
            path = deeper
        largest.append((path, sizes[path]))
    return largest


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


def send_tree(link: Link, snapshot: Snapshot, progress: Callable[[int, int], None]) -> None:
    """Send a node what it lacks of these files' contents: one question where that is nothing, else one stream.

    Args:
        progress: called with bytes sent and bytes to send.
    """
    reply = link.ask(wire.OfferTree(snapshot.hash))
    if isinstance(reply, wire.WantFiles) and reply.manifest:
        reply = link.ask(wire.PutManifest(snapshot.hash), snapshot.manifest)
    assert isinstance(reply, wire.WantFiles)
    if not reply.digests:
        return
    by_digest = {entry.digest: entry for entry in snapshot.entries}
    wanted = [by_digest[digest] for digest in reply.digests]
    sent, total = 0, sum(entry.size_bytes for entry in wanted)
    for part in _stream(snapshot.root, wanted):
        link.tell(wire.PutBytes(), part)
        sent += len(part)
        progress(sent, total)
    link.answer()


def _stream(root: Path, wanted: Sequence[TreeEntry]) -> Iterator[bytes]:
    """The contents one after the other, cut into frames."""
    gathered = bytearray()
    for entry in wanted:
        path, left = root / entry.path, entry.size_bytes
        try:
            for part in tree.read_parts(str(path), left):
                left -= len(part)
                gathered += part
                if len(gathered) >= wire.CHUNK_BYTES:
                    yield bytes(gathered)
                    gathered.clear()
        except OSError as error:
            raise _unsent(path, error.strerror or str(error)) from error
        if left:
            raise _unsent(path, "it became shorter meanwhile")
    if gathered:
        yield bytes(gathered)


def _unsent(path: Path, cause: str) -> PreflightFailed:
    return PreflightFailed(f"{path} cannot be sent: {cause}", hint="name it in .dtrainignore, or launch again")


def fetch_outputs(link: Link, into: Path, progress: Callable[[int, int], None]) -> tuple[int, int]:
    """Bring what a node keeps under the job's name into a folder, but for files of the size and time that are there already.

    Returns:
        Files there now and files that were sent.
    """
    link.tell(wire.ListOutputs())
    entries = tree.unpack(Found, link.answer()[1])
    if entries:
        into.mkdir(parents=True, exist_ok=True)
        _remove_old_partials(into)
    files = []
    for entry in entries:
        path = Path(tree.inside(str(into), entry.path))
        if entry.folder:
            _make_way(path, for_folder=True)
            path.mkdir(exist_ok=True)
        elif entry.link is not None:
            _make_way(path, for_folder=False)
            path.unlink(missing_ok=True)
            path.symlink_to(entry.link)
        elif not _is_same(path, entry):
            _make_way(path, for_folder=False)
            files.append(entry)
    link.tell(wire.GetOutputs(tuple(entry.path for entry in files)))
    total = sum(entry.size_bytes for entry in files)
    before = num_gone = 0
    for entry in files:
        path = Path(tree.inside(str(into), entry.path))  # anew: a folder above it may be a link by now
        size = _fetch_file(link, entry, path, into, lambda size, before=before: progress(before + size, total))  # type: ignore[misc]
        num_gone += size is None
        before += size or 0
    return sum(not entry.folder for entry in entries) - num_gone, len(files) - num_gone


def _is_same(path: Path, entry: Found) -> bool:
    try:
        here = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(here.st_mode) and (here.st_size, here.st_mtime_ns) == (entry.size_bytes, entry.mtime_ns)


def _make_way(path: Path, *, for_folder: bool) -> None:
    """Remove what is of the other kind; a folder with something in it stays, and is an error of rmdir's."""
    if for_folder and (path.is_symlink() or path.is_file()):
        path.unlink()
    elif not for_folder and path.is_dir() and not path.is_symlink():
        path.rmdir()


def _fetch_file(link: Link, entry: Found, path: Path, into: Path, progress: Callable[[int], None]) -> int | None:
    """Write a file and move it to its place when it is whole. Returns its size; None where it is gone."""
    size, message = 0, wire.FileBytes(last=False)
    fd, partial = tempfile.mkstemp(dir=into, prefix=f"{_partials_here()}{os.getpid()}-")
    try:
        with open(fd, "wb") as file:
            while not message.last:
                answer, part = link.answer()
                assert isinstance(answer, wire.FileBytes)
                message = answer
                file.write(part)
                size += len(part)
                progress(size)
        if message.gone:
            os.unlink(partial)
            return None
        os.chmod(partial, entry.mode & 0o777)  # no setuid from elsewhere
        os.utime(partial, ns=(entry.mtime_ns, entry.mtime_ns))
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    return size


def _partials_here() -> str:
    """How the names begin of the partial files that processes of this machine write; the id of one comes next."""
    return f"{_PARTIAL}{socket.gethostname()}-"


def _remove_old_partials(into: Path) -> None:
    """Of a fetch that was killed; not of one that is under way, here or on a machine that shares the folder."""
    for partial in into.glob(f"{_PARTIAL}*"):
        pid = partial.name.removeprefix(_partials_here()).partition("-")[0]
        is_dead = partial.name.startswith(_partials_here()) and pid.isdigit() and not os.path.exists(f"/proc/{pid}")
        with contextlib.suppress(FileNotFoundError):
            if is_dead or time.time() - partial.lstat().st_mtime > _OLD_S:
                partial.unlink()


class _IgnoreRules:
    """.gitignore and .dtrainignore files of the working directory; a deeper file's word comes first, as in git."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._of_folder: dict[str, GitIgnoreSpec | None] = {}

    def ignore(self, path: str, folder: bool) -> bool:
        name = path + "/" if folder else path
        above = path
        while above:
            above = above.rpartition("/")[0]
            rules = self._rules(above)
            if rules is not None:
                said = rules.check_file(name[len(above) + 1 :] if above else name).include
                if said is not None:
                    return said
        return False

    def _rules(self, folder: str) -> GitIgnoreSpec | None:
        """Of the ignore files in a folder; None where it has none."""
        if folder not in self._of_folder:
            files = [self._workdir / folder / name for name in _IGNORE_FILES]
            lines = [line for file in files if file.is_file() for line in file.read_text(errors="replace").splitlines()]
            self._of_folder[folder] = _spec(lines) if lines else None
        return self._of_folder[folder]


def _spec(lines: Sequence[str]) -> GitIgnoreSpec:
    """As in git a line that is no pattern, such as `!` alone, names nothing."""
    patterns: list[GitIgnoreSpecPattern] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what `[[]` may mean to Python one day
        for line in lines:
            with contextlib.suppress(re.error, GitIgnorePatternError):
                patterns += GitIgnoreSpec.from_lines([line]).patterns
    return GitIgnoreSpec(patterns)
