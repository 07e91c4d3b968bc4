"""First code on a node: sent as text to a Python that reads it from stdin, it makes sure of the bundle and starts a session.

node:  MAGIC
here:  a line in hexadecimal, run by the one constant command of the transport, that reads and runs what follows: this file
here:  a line of JSON: {"hash": ..., "size": bytes of the zip, "code_bytes": of the files in it, "dir": ...}
node:  "have\n" or "want\n"; after "want" the zip follows
then:  frames (wire.py)
"""

import errno
import json
import os
import sys


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    return line


def _read(size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            sys.exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _bundle() -> str:
    wanted = json.loads(_read_line())
    root = wanted["dir"] if wanted["dir"] != "auto" else f"/var/tmp/dtrain-{os.getuid()}"
    folder = os.path.join(root, "bundles", wanted["hash"])
    if _is_whole(folder, wanted["code_bytes"]):
        os.write(1, b"have\n")
        return folder
    os.write(1, b"want\n")
    _unpack(_read(wanted["size"]), root, folder, wanted["code_bytes"])
    return folder


def _is_whole(folder: str, code_bytes: int) -> bool:
    """Whether it is there, ours, and neither a crash of the machine nor who cleans up has left less of it."""
    code = [os.path.join(above, name) for above, _, names in os.walk(folder) for name in names if name.endswith(".py")]
    try:
        return sum(map(os.path.getsize, code)) == code_bytes and os.stat(folder).st_uid == os.getuid()
    except FileNotFoundError:  # another session replaces it
        return False


def _unpack(data: bytes, root: str, folder: str, code_bytes: int) -> None:
    import io
    import shutil
    import tempfile
    import zipfile

    os.makedirs(root, mode=0o700, exist_ok=True)
    if os.lstat(root).st_uid != os.getuid() or os.path.islink(root):
        raise OSError(errno.EACCES, f"{os.strerror(errno.EACCES)}, for it is a symlink or another user's", root)
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    unpacked = tempfile.mkdtemp(dir=os.path.dirname(folder))
    try:
        zipfile.ZipFile(io.BytesIO(data)).extractall(unpacked)
    except OSError as error:
        shutil.rmtree(unpacked, ignore_errors=True)
        raise OSError(error.errno, error.strerror, folder) from error
    try:
        if os.path.isdir(folder) and not _is_whole(folder, code_bytes):
            os.rename(folder, f"{unpacked}-damaged")
            shutil.rmtree(f"{unpacked}-damaged", ignore_errors=True)
        os.rename(unpacked, folder)
    except OSError:  # another session was faster
        shutil.rmtree(unpacked)


try:
    sys.path.insert(0, _bundle())
except OSError as error:
    sys.exit(f"{error.strerror}: {error.filename}")
from dtrain.node.session import main  # noqa: E402

sys.exit(main([]))
