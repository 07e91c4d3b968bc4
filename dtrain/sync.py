"""The user's working directory, by content, to every node."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from dtrain.errors import PreflightFailed
from dtrain.link import Link
from dtrain.node import tree, wire
from dtrain.node.wire import TreeEntry

_IGNORE_FILES = (".gitignore", ".dtrainignore")


def scan_workdir(workdir: Path, outputs: str) -> tuple[TreeEntry, ...]:
    """What of the working directory goes to the nodes: all but .git, the outputs, and what the ignore files name.

    Raises:
        PreflightFailed: a file cannot be read.
    """
    rules = _IgnoreRules(workdir)

    def keep(path: str, folder: bool) -> bool:
        return path not in (".git", outputs) and not rules.ignore(path, folder)

    try:
        return tuple(tree.scan(str(workdir), keep))
    except OSError as error:
        raise PreflightFailed(
            f"the working directory cannot be read: {error.filename}: {error.strerror}", hint="name what is not needed in .dtrainignore"
        ) from error


def tree_hash(entries: Sequence[TreeEntry]) -> str:
    """One name for the whole: equal for equal files, whenever and from wherever they were read."""
    digest = hashlib.blake2b(digest_size=8)
    for entry in entries:
        digest.update(wire.to_json(entry).encode() + b"\n")
    return digest.hexdigest()


def git_commit(workdir: Path) -> str | None:
    """The commit that is checked out in the working directory; None where it is not in a git checkout."""
    git = shutil.which("git")
    if git is None:
        return None
    answer = subprocess.run(
        (git, "-C", str(workdir), "rev-parse", "HEAD"), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else None


def send_tree(link: Link, workdir: Path, entries: Sequence[TreeEntry], progress: Callable[[int, int], None]) -> None:
    """Send a node what it lacks of these files' contents.

    Args:
        progress: called with bytes sent and bytes to send.
    """
    reply = link.ask(wire.OfferTree(tuple(entries)))
    assert isinstance(reply, wire.WantFiles)
    wanted = set(reply.digests)
    files = [(entry, workdir / entry.path) for entry in {entry.digest: entry for entry in entries}.values() if entry.digest in wanted]
    total = sum(entry.size_bytes for entry, _ in files)
    sent = 0
    for entry, path in files:
        try:
            for part in tree.read_parts(str(path), entry.size_bytes):
                link.tell(wire.PutFile(entry.digest, entry.path, last=False), part)
                sent += len(part)
                progress(sent, total)
        except OSError as error:
            raise PreflightFailed(f"{path} cannot be sent: {error.strerror}", hint="name it in .dtrainignore, or launch again") from error
        link.tell(wire.PutFile(entry.digest, entry.path, last=True))
    if files:
        link.ask(wire.FilesSent())


def fetch_outputs(link: Link, into: Path, progress: Callable[[int, int], None]) -> tuple[int, int]:
    """Bring what a node keeps under the job's name into a folder; files that are the same there already are not sent.

    Returns:
        Files there now and files that were sent.
    """
    reply = link.ask(wire.ListOutputs())
    assert isinstance(reply, wire.OutputFiles)
    if reply.entries:
        into.mkdir(parents=True, exist_ok=True)
    files = []
    for entry in reply.entries:
        path = Path(tree.inside(str(into), entry.path))
        if entry.folder:
            path.mkdir(exist_ok=True)
        elif entry.link is not None:
            path.unlink(missing_ok=True)
            path.symlink_to(entry.link)
        elif path.is_symlink() or not path.is_file() or tree.file_digest(str(path)) != entry.digest:
            files.append((entry, path))
    total = sum(entry.size_bytes for entry, _ in files)
    before = 0
    for entry, path in files:
        before += _fetch_file(link, entry, path, lambda size, before=before: progress(before + size, total))  # type: ignore[misc]
    return sum(not entry.folder for entry in reply.entries), len(files)


def _fetch_file(link: Link, entry: TreeEntry, path: Path, progress: Callable[[int], None]) -> int:
    """Write a file beside its place and move it there when it is whole. Returns its size."""
    link.tell(wire.GetOutput(entry.path))
    size = 0
    fd, partial = tempfile.mkstemp(dir=path.parent, prefix=".dtrain-")
    try:
        with open(fd, "wb") as file:
            while True:
                message, part = link.answer()
                assert isinstance(message, wire.FileBytes)
                if message.last:
                    break
                file.write(part)
                size += len(part)
                progress(size)
        os.chmod(partial, entry.mode)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return size


class _IgnoreRules:
    """.gitignore and .dtrainignore files of the working directory; a deeper file's word comes first, as in git."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._of_folder: dict[str, GitIgnoreSpec] = {}

    def ignore(self, path: str, folder: bool) -> bool:
        name = path + "/" if folder else path
        parts = path.split("/")
        for depth in range(len(parts) - 1, -1, -1):
            above = "/".join(parts[:depth])
            below = name[len(above) + 1 :] if above else name
            said = self._rules(above).check_file(below).include
            if said is not None:
                return said
        return False

    def _rules(self, folder: str) -> GitIgnoreSpec:
        if folder not in self._of_folder:
            lines: list[str] = []
            for name in _IGNORE_FILES:
                file = self._workdir / folder / name
                if file.is_file():
                    lines += file.read_text(errors="replace").splitlines()
            self._of_folder[folder] = GitIgnoreSpec.from_lines(lines)
        return self._of_folder[folder]
