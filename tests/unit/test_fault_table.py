"""The fault matrix and the page that shows it (tests/faults.py, docs/reliability.md)."""

from __future__ import annotations

from pathlib import Path

from tests.faults import FAULTS, MODES, RUNNING, Case

PAGE = Path(__file__).parents[2] / "docs/reliability.md"


def test_every_fault_has_a_name_of_its_own() -> None:
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS) >= 20


def test_the_page_shows_every_fault_and_how_it_has_to_end() -> None:
    table = PAGE.read_text().partition("<!-- make faults -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    shown = {row[0]: row for row in rows[1:]}
    assert list(shown) == [fault.name for fault in FAULTS]
    for fault in FAULTS:
        ends = [Case(fault, "torchrun", mode).end for mode in MODES]
        _, states, codes, cause, _, _, left, lost = shown[fault.name]
        for end in ends:
            assert ("goes on" if end.state == RUNNING else end.state) in states
            assert end.exit_code is None or str(end.exit_code) in codes
        assert (cause, left, lost) == (str(ends[0].cause or ""), "0", "0")
