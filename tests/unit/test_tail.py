"""The last lines of a log."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dtrain.node.tail import drawn, last_lines

TEXTS: tuple[bytes | None, ...] = (None, b"a", b"bc")


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1 << 20])
def test_the_last_lines_are_those_of_the_whole_file(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "rank0.log"
    for data in (b"", b"\n", b"a", b"a\n", b"\n\n", b"ab\n\nc", *(bytes(random.choices(b"abc\n\r", k=20)) for _ in range(200))):
        path.write_bytes(data)
        lines = data.split(b"\n")
        unfinished = lines.pop()
        for text in TEXTS:
            held = [line for line in lines if text is None or text in drawn(line)]
            counts = bool(unfinished) and (text is None or text in drawn(unfinished))
            for num_lines in range(8):
                whole = max(0, num_lines - counts)
                want = b"".join(line + b"\n" for line in (held[-whole:] if whole else [])) + unfinished
                assert last_lines(str(path), num_lines, text, block_bytes=block_bytes) == (want, len(data)), (data, text, num_lines)


def test_no_more_is_read_than_that_takes(tmp_path: Path) -> None:
    """The file is larger than any disk here: who reads it from its start reads for hours."""
    path = tmp_path / "rank0.log"
    with path.open("wb") as file:
        file.truncate(1 << 42)
        file.seek(1 << 42)
        file.write(b"\nthe\nend\n")
    assert last_lines(str(path), 2) == (b"the\nend\n", (1 << 42) + 9)
