"""What comes from outside reaches a terminal without what would move its cursor or set its title."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from dtrain.render.console import HarmlessConsole

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b5A\rb\x08"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_whatever_is_printed_is_harmless(is_terminal: bool) -> None:
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, "red"))
    for what in (HOSTILE, Text(HOSTILE), table):
        file = io.StringIO()
        HarmlessConsole(file=file, force_terminal=is_terminal, width=80, markup=False, highlight=False).print(what, soft_wrap=True)
        said = file.getvalue()
        assert (
            "ab" in said.replace("5A", "") and not {"\x07", "\x9b", "\r", "\x08"} & set(said) and "title" not in said and "2J" not in said
        )
