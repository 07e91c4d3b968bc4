"""Random faults in a row, on the same three machines (namespaces on a bridge): each ends as it has to, and nothing is left.

What happens in a step follows from the seed and its number alone, so `--seed S --first N --num 1` repeats step N.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.faults import FAULTS, LAUNCHERS, MODES, Case, differences, measure
from tests.lan import Lan, why_not
from tests.scene import new_workspace

MOST_DELAY_S = 1.0  # from the workers' first words to the fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=200, help="faults in a row (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--first", type=int, default=1, help="number of the first step")
    options = parser.parse_args()
    if why := why_not():
        print(f"random faults: not run, {why}")
        return 0
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    steps = range(options.first, options.first + options.num)
    began_s, num_done = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        lan = Lan(Path(folder) / "lan", num_nodes=3)
        try:
            for step in steps:
                case, delay_s = _drawn(seed, step)
                print(f"step {step}: {case}, after {delay_s:.2f} s", end="", flush=True)
                try:
                    with new_workspace(lan, Path(folder) / str(step), wipe=False) as workspace:
                        measured = measure(case, lan, workspace, delay_s)
                    wrong = differences(case, measured)
                except AssertionError as error:
                    wrong = [str(error)]
                if wrong:
                    print(f"\nFAILED: {'; '.join(wrong)}\nagain: {sys.argv[0]} --seed {seed} --first {step} --num 1")
                    return 1
                num_done += 1
                print(f": {measured.stop_s:.1f} s", flush=True)
        except KeyboardInterrupt:
            print()
        finally:
            lan.close()
    took_s = time.monotonic() - began_s
    print(f"seed {seed}: {num_done} random faults in a row in {took_s / 60:.0f} min, no process and no byte of a log lost")
    return 0 if num_done == len(steps) else 130


def _drawn(seed: int, step: int) -> tuple[Case, float]:
    draw = random.Random(f"{seed} {step}")
    return Case(draw.choice(FAULTS), draw.choice(LAUNCHERS), draw.choice(MODES)), draw.uniform(0.0, MOST_DELAY_S)


if __name__ == "__main__":
    sys.exit(main())
