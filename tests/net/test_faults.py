"""The fault matrix (tests/faults.py): here every fault once, spread over launchers and modes, and none longer than it
needs; `make faults` runs all combinations.

Most run under mpirun, which starts in a tenth of torchrun's time; nothing of it but its processes takes part in most faults.
"""

from __future__ import annotations

import itertools

import pytest

from tests.cluster import Workspace, needs_mpirun
from tests.faults import FAULTS, LAUNCHERS, MODES, Case, differences, measure
from tests.lan import Lan

pytestmark = [pytest.mark.net, pytest.mark.root]

_TURNS = (
    ("mpirun", "foreground"),
    ("mpirun", "detached"),
    ("torchrun", "foreground"),
    ("mpirun", "detached"),
    ("mpirun", "foreground"),
    ("torchrun", "detached"),
    ("mpirun", "detached"),
)
CASES = tuple(Case(fault, *turn, is_short=True) for fault, turn in zip(FAULTS, itertools.cycle(_TURNS), strict=False))
assert {(case.launcher, case.mode) for case in CASES} == set(itertools.product(LAUNCHERS, MODES))


_MARKED = [pytest.param(case, marks=needs_mpirun if case.launcher == "mpirun" else (), id=str(case)) for case in CASES]


@pytest.mark.parametrize("case", _MARKED)
def test_a_fault(lan: Lan, workspace: Workspace, case: Case) -> None:
    assert differences(case, measure(case, lan, workspace)) == []
