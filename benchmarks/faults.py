"""The whole fault matrix: every fault under both launchers, in the foreground and detached, on three machines (namespaces on a
bridge). Prints the table that docs/reliability.md shows, and fails where one ends in another way than it has to.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.faults import FAULTS, LAUNCHERS, MODES, RUNNING, Case, Fault, differences, measure
from tests.lan import Lan, why_not
from tests.scene import Measured, new_workspace, three_machines

COMBINATIONS = tuple(itertools.product(LAUNCHERS, MODES))
_GOES_ON = "goes on"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has it")
    parser.add_argument("--launcher", choices=LAUNCHERS)
    parser.add_argument("--mode", choices=MODES)
    options = parser.parse_args()
    if why := why_not():
        print(f"the fault matrix: not run, {why}")
        return 0
    faults = [fault for fault in FAULTS if options.only in fault.name]
    wanted = [pair for pair in COMBINATIONS if options.launcher in (None, pair[0]) and options.mode in (None, pair[1])]
    cases = [Case(fault, *pair) for fault in faults for pair in wanted]
    measured: dict[Case, Measured] = {}
    num_wrong = 0
    with three_machines() as (lan, folder):
        for number, case in enumerate(cases, 1):
            wrong = _run(case, lan, folder / str(number), measured)
            num_wrong += bool(wrong)
            stop_s = measured[case].stop_s if case in measured else None
            took = "" if stop_s is None else f" {stop_s:.1f} s"
            print(f"{number}/{len(cases)} {case}:{took} {'; '.join(wrong) or 'as it has to be'}", file=sys.stderr, flush=True)
    print_table(faults, measured)
    if num_wrong:
        print(f"{num_wrong} of {len(cases)} ended in another way than they have to", file=sys.stderr)
    return 1 if num_wrong else 0


def _run(case: Case, lan: Lan, folder: Path, measured: dict[Case, Measured]) -> list[str]:
    try:
        with new_workspace(lan, folder, wipe=True) as workspace:
            measured[case] = measure(case, lan, workspace)
    except AssertionError as error:
        return [str(error)]
    return differences(case, measured[case], slack_s=0.0)


def print_table(faults: Sequence[Fault], measured: dict[Case, Measured]) -> None:
    """Markdown. Times are seconds to the last process, those of torchrun and then of mpirun, each in the foreground and detached."""
    print("| what happens | state | exit | root cause | torchrun | mpirun | left | lost |\n|---|---|---|---|---|---|---|---|")
    for fault in faults:
        ends = [Case(fault, "mpirun", mode).end for mode in MODES]
        states = [_GOES_ON if end.state == RUNNING else end.state for end in ends]
        codes = ["" if end.exit_code is None else str(end.exit_code) for end in ends]
        times = [" ".join(_seconds(measured.get(Case(fault, launcher, mode))) for mode in MODES) for launcher in LAUNCHERS]
        found = [each for case, each in measured.items() if case.fault is fault]
        left, lost = sum(len(each.left) for each in found), sum(each.log_bytes_lost for each in found)
        columns = (fault.name, _both(states), _both(codes), str(ends[0].cause or ""), *times, str(left), str(lost))
        print(f"| {' | '.join(columns)} |")
    bytes_all, bytes_lost = sum(each.log_bytes for each in measured.values()), sum(each.log_bytes_lost for each in measured.values())
    left = sum(len(each.left) for each in measured.values())
    print(f"\n{len(measured)} runs: {left} processes left, {bytes_lost} of {bytes_all} bytes of logs lost. The slowest stop took ", end="")
    at_once, later = (
        max((each.stop_s or 0.0 for case, each in measured.items() if _waits(case.fault) is waits), default=0.0) for waits in (False, True)
    )
    print(f"{at_once:.1f} s, and {later:.1f} s where a silence or a lease had to pass first.")


def _waits(fault: Fault) -> bool:
    """For a silence or a lease to be long enough."""
    return fault.silent or fault.lease_s is not None


def _both(words: Sequence[str]) -> str:
    """One word, or where the modes differ both."""
    return words[0] if len(set(words)) == 1 else ", ".join(word or "-" for word in words)


def _seconds(measured: Measured | None) -> str:
    return "-" if measured is None or measured.stop_s is None else f"{measured.stop_s:.1f}"


if __name__ == "__main__":
    sys.exit(main())
