"""Text so that a person reads what it is, though it may hold anything: as a word of bash, or with what a terminal obeys escaped."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

_SHORT = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'"}


def shell_word(text: str) -> str:
    """As bash would be given it: `''` for nothing, $'...' where there are characters that cannot be seen."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(_SHORT.get(char) or _visible(char) for char in text) + "'"


def shell_words(argv: Iterable[str]) -> str:
    return " ".join(map(shell_word, argv))


def visible(text: str) -> str:
    """For a message of several lines: all else that cannot be seen, or moves a cursor, as its escape."""
    return "".join(char if char == "\n" else _visible(char) for char in text)


def _visible(char: str) -> str:
    code = ord(char)
    if char.isprintable():
        return char
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as Python holds it
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
