"""dtrain's node side as one zip, named by its hash, so that a node needs nothing installed and gets each version once."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parent
_SHIPPED = ("node", "trainers", "bench")
_ENTRY = "node/entry.py"  # becomes the zip's __main__.py


@dataclass(frozen=True, slots=True)
class Bundle:
    hash: str
    data: bytes  # zip
    code_bytes: int  # of the files in it, by which a node sees that it has lost none
    boot: bytes  # text of node/boot.py, the first code on a node

    def start(self, folder: str) -> bytes:
        """What a node's Python is sent first: a line in hexadecimal, read byte by byte, which takes boot.py at once; then boot.py, and
        what that asks for.

        Args:
            folder: `dir` of the cluster file.
        """
        wanted = {"hash": self.hash, "size": len(self.data), "code_bytes": self.code_bytes, "dir": folder}
        size = len(self.boot)
        take = f"code = bytes()\nwhile len(code) < {size}:\n code += os.read(0, {size} - len(code)) or sys.exit()\nexec(code)"
        return take.encode().hex().encode() + b"\n" + self.boot + json.dumps(wanted).encode() + b"\n"


@functools.cache
def bundle() -> Bundle:
    """The bundle of this installation: the same bytes for the same source, whenever and wherever it is made."""
    files = {"dtrain/__init__.py": (_PACKAGE / "__init__.py").read_bytes(), "__main__.py": (_PACKAGE / _ENTRY).read_bytes()}
    for name in _SHIPPED:
        for path in sorted((_PACKAGE / name).rglob("*.py")):
            files[f"dtrain/{path.relative_to(_PACKAGE).as_posix()}"] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # its date is fixed at 1980
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return Bundle(
        hash=hashlib.sha256(data).hexdigest()[:16],
        data=data,
        code_bytes=sum(map(len, files.values())),
        boot=(_PACKAGE / "node/boot.py").read_bytes(),
    )
