"""Lines of ranks: whole, one after another, and harmless, whatever workers print and however it is cut on its way."""

from __future__ import annotations

import os
import queue
import random

import pytest

from dtrain.node import wire
from dtrain.render.fold import FoldedLines
from dtrain.render.lines import RankLines

# What it is: what a worker prints, and what is shown of it.
PRINTED: dict[str, tuple[bytes, list[str]]] = {
    "markup": (b"[/red] [bold]x[/bold] :smile:\n", ["[/red] [bold]x[/bold] :smile:"]),
    "a progress bar": (b"\r 1%\r50%\r100%\r\ndone\r\n", ["100%", "done"]),
    "invalid UTF-8": (b"\xff\xfe a\xc3\n\x80b\n", ["\ufffd\ufffd a\ufffd", "\ufffdb"]),
    "a character cut in two": ("ü🚀\n".encode(), ["ü🚀"]),
    "colours": (b"\x1b[31mred\x1b[0m\n\x1b[1;32mopen\n", ["\x1b[31mred\x1b[0m", "\x1b[1;32mopen\x1b[0m"]),
    "the cursor": (b"\x1b[2J\x1b[10;10Hx\x1b7\x1b[?1049h\x08\x07\n", ["x"]),
    "the keyboard": (b"\x1b[>4;2mx\x1b[?25l\n", ["x"]),
    "title and clipboard": (b"\x1b]0;title\x07a\x1b]52;c;eA==\x1b\\b\x1b]8;;http://x\n", ["ab"]),
    "controls of one byte": ("\u009b31mx\u009d0;t\u009c\u0085\n".encode(), ["31mx0;t"]),
    "half an escape": (b"x\x1b\n\x1b[\ny\n", ["x", "", "y"]),
    "zeros": (b"a\0b\n", ["ab"]),
    "no newline at the end": (b"a\nb", ["a", "b"]),
    "empty lines": (b"\n\nx\n\n", ["", "", "x", ""]),
}


@pytest.mark.parametrize("cut", ["whole", "bytes", "at random"])
@pytest.mark.parametrize("what", PRINTED)
def test_what_a_worker_prints_is_harmless(what: str, cut: str) -> None:
    printed, shown = PRINTED[what]
    longest = {"whole": len(printed), "bytes": 1, "at random": 7}[cut]
    written: list[str] = []
    lines = RankLines(written.append, colour=False)
    while printed:
        size = random.randint(1, longest) if cut == "at random" else longest
        lines.take("n1", wire.rank_log(3), printed[:size])
        printed = printed[size:]
    lines.end()
    assert "".join(written) == "".join(f"[3] {line}\n" for line in shown)


def test_lines_of_ranks_are_never_mixed() -> None:
    """Every rank prints lines of its own letter, and they arrive in pieces, in any order."""
    streams = {rank: b"".join(bytes([97 + rank]) * random.randint(0, 50) + b"\n" for _ in range(200)) for rank in range(4)}
    want = {rank: [f"[{rank}] {line.decode()}" for line in data.splitlines()] for rank, data in streams.items()}
    written: list[str] = []
    lines = RankLines(written.append, colour=False)
    while left := [rank for rank in streams if streams[rank]]:
        rank, size = random.choice(left), random.randint(1, 100)
        lines.take("n1", wire.rank_log(rank), streams[rank][:size])
        streams[rank] = streams[rank][size:]
    got = "".join(written).splitlines()
    assert {rank: [line for line in got if line.startswith(f"[{rank}]")] for rank in want} == want


def test_a_line_of_forty_megabytes_in_small_pieces() -> None:
    piece, written = os.urandom(wire.CHUNK_BYTES // 2).hex().encode(), list[str]()
    lines = RankLines(written.append, colour=False)
    for _ in range(160):
        lines.take("n1", wire.rank_log(0), piece)
    lines.take("n1", wire.rank_log(0), b"\n")
    assert written == [f"[0] {piece.decode() * 160}\n"]


@pytest.mark.parametrize("state", [b"\r%d of many", b"%d of many\r"])
def test_a_progress_bar_of_days_takes_no_room(state: bytes) -> None:
    lines = RankLines(lambda _: None, colour=False)
    for i in range(1000):
        lines.take("n1", wire.rank_log(0), state % i)
    assert sum(len(part) for parts in lines._partial.values() for part in parts) < 100


def test_lines_that_hold_a_text() -> None:
    """The text is no pattern, and is looked for in what is shown: neither in the rank nor in what a bar has drawn over."""
    written: list[str] = []
    lines = RankLines(written.append, colour=False, text=b"a.c")
    lines.take("n1", wire.rank_log(0), b"abc\na.c\nxa.c\x1b[2J\ra.cy\na.c\rgone\n[0]\nlast a.")
    lines.take("n1", wire.rank_log(0), b"c")
    lines.end()
    assert written == ["[0] a.c\n[0] a.cy\n", "[0] last a.c\n"]


def _folded(printed: list[tuple[int, str]]) -> list[str]:
    """What is shown of lines that ranks print at one moment."""
    written: list[str] = []
    lines = FoldedLines(written.append, colour=False)
    for rank, text in printed:
        lines.take("n1", wire.rank_log(rank), text.encode())
    lines.end()
    return "".join(written).splitlines()


def test_the_same_lines_of_many_ranks_are_one() -> None:
    warning = "train.py:3: UserWarning: old\n  warnings.warn('old')\n"
    assert _folded([(rank, warning + f"rank {rank}\n") for rank in range(3)]) == [
        "[3 ranks: 0-2] train.py:3: UserWarning: old", "[3 ranks: 0-2]   warnings.warn('old')", "[0] rank 0", "[1] rank 1", "[2] rank 2",
    ]  # fmt: skip
    assert _folded([(rank, "x\n") for rank in range(0, 64, 2)]) == ["[32 ranks] x"]
    assert _folded([(0, "x\nx\n"), (1, "x\n")]) == ["[2 ranks: 0-1] x", "[0] x"]  # what one rank says twice stands there twice
    assert _folded([(0, "a\nb\n"), (1, "b\na\n")]) == ["[0] a", "[2 ranks: 0-1] b", "[1] a"]
    flood = "x\n" * 50_000
    assert _folded([(0, flood), (1, flood)]) == ["[0] x"] * 50_000 + ["[1] x"] * 50_000


def test_folding_takes_no_line_and_changes_no_order() -> None:
    for _ in range(100):
        printed = [(random.randrange(4), "".join(random.choices(["a\n", "b\n", "c\n"], k=3))) for _ in range(20)]
        want: dict[int, list[str]] = {rank: [] for rank in range(4)}
        for rank, text in printed:
            want[rank] += text.splitlines()
        got: dict[int, list[str]] = {rank: [] for rank in range(4)}
        for shown in _folded(printed):
            who, line = shown[1:].split("] ")
            for part in who.rpartition(" ")[2].split(","):
                first, _, last = part.partition("-")
                for rank in range(int(first), int(last or first) + 1):
                    got[rank].append(line)
        assert got == want


def test_a_line_is_shown_before_the_next_one_comes() -> None:
    written: queue.SimpleQueue[str] = queue.SimpleQueue()
    FoldedLines(written.put, colour=False).take("n1", wire.rank_log(0), b"x\n")
    assert written.get(timeout=60) == "[0] x\n"


def test_the_bar_that_the_first_rank_draws_is_there_to_be_shown() -> None:
    lines = RankLines(lambda text: None, colour=False)
    seen = []
    for rank, data in ((10, b"\r1%"), (2, b"no bar"), (9, b"1%\r2"), (9, b"%"), (9, b"\r3%\x1b[2J"), (9, b"\ndone\n"), (10, b"\r2%\r\n")):
        lines.take("n1", wire.rank_log(rank), data)
        seen.append(lines.bar())
    assert seen == ["[10] 1%", "[10] 1%", "[9] 2", "[9] 2%", "[9] 3%", "[10] 1%", ""]


def test_a_bar_of_any_kind_is_a_short_text_without_escapes() -> None:
    """Also in the middle of an escape, and with a colour whose number no integer of Python's holds."""
    for data in (b"\r\x1b[" + b"1" * 5000 + b"m50%", b"\r" + b"\x1b[31mx\x1b[0m" * 100_000, b"\r50%\x1b[3"):
        lines = RankLines(lambda text: None, colour=True)
        lines.take("n1", wire.rank_log(0), data)
        assert lines.bar().startswith("[0] ") and lines.bar().isprintable() and len(lines.bar()) < 5000
