"""First code on a node: sent as text to a Python that reads it from stdin, it makes sure of the bundle and starts a session.

node:  MAGIC
here:  a line in hexadecimal, run by the one constant command of the transport, that reads and runs what follows: this file
here:  a line of JSON: {"hash": ..., "size": bytes, "dir": ...}
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
    if os.path.isdir(folder) and os.stat(folder).st_uid == os.getuid():
        os.write(1, b"have\n")
        return folder
    os.write(1, b"want\n")
    _unpack(_read(wanted["size"]), root, folder)
    return folder


def _unpack(data: bytes, root: str, folder: str) -> None:
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
        os.rename(unpacked, folder)
    except OSError:  # another session was faster
        shutil.rmtree(unpacked)


try:
    sys.path.insert(0, _bundle())
except OSError as error:
    sys.exit(f"{error.strerror}: {error.filename}")
from dtrain.node.session import main  # noqa: E402

sys.exit(main([]))
