"""Commands in lines of the console's width, with what is not known yet standing out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dtrain.shell_words import shell_word

_OPEN = re.compile("<(?:address|bundle|cluster size|device|GPUs|interface|job|job folder|mpirun|orted|output folder|port|ranks|threads)>")
_QUOTED = re.compile(rf"\$'(?:[^'\\]|\\.)*'|'[^']*'|\"(?:[^\"\\]|\\.)*\"|{_OPEN.pattern}")


def open_word(text: str) -> str:
    """As bash wants it, but for what only the nodes can say."""
    known = _OPEN.sub("", text)
    return text if known != text and known == (shell_word(known) if known else "") else shell_word(text)


def print_text(console: Console, text: str) -> None:
    """A command's text, line by line. Of several lines, each that had to be broken goes on behind a backslash."""
    lines = text.expandtabs().split("\n")
    for line in lines:
        words = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", "\0"), line).split(" ")
        print_words(console, [word.replace("\0", " ") for word in words], broken=" \\" if len(lines) > 1 else "")


def print_words(console: Console, words: Sequence[str], *, broken: str = "") -> None:
    """Words in a line, or more of them, the second and later ones further in; none is broken.

    Args:
        broken: stands at the end of a line that goes on in the next one.
    """
    most = console.width - cell_len(broken)  # asked of the terminal once: there may be a million words
    lines, line, width = [], " ", 1
    for word in words:
        of_word = 1 + cell_len(word)
        if width + of_word > most and line.strip():
            lines.append(line + broken)
            line, width = "   ", 3
        line += " " + word
        width += of_word
    for each in (*lines, line):
        text = Text(each.rstrip(" "))
        text.highlight_regex(_OPEN, "yellow")
        console.print(text, soft_wrap=True)
