"""Random faults in a row, on the same three machines (namespaces on a bridge): each ends as it has to, and nothing is left.

One of four steps kills any process at all, at any moment from the launch on; the others are faults of the matrix. What happens in
a step follows from the seed and its number alone, so `--seed S --first N --num 1` repeats step N.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.cluster import Workspace
from tests.faults import FAULTS, LAUNCHERS, LEASE_S, LOADED_S, MODES, STOP_S, Case, differences, measure
from tests.lan import Lan, why_not
from tests.scene import START_S, Scene, new_workspace, three_machines

ANYTHING = 0.25  # of the steps
MOST_DELAY_S = 1.0  # from the workers' first words to a fault
MOST_MOMENT_S = 6.0  # from the launch to the end of some process
NO_SUCH_JOB = 66


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
    with three_machines() as (lan, folder), contextlib.suppress(KeyboardInterrupt):
        for step in steps:
            draw = random.Random(f"{seed} {step}")
            print(f"{step}: ", end="", flush=True)
            try:
                with new_workspace(lan, folder / str(step), wipe=False) as workspace:
                    wrong = (_any_process if draw.random() < ANYTHING else _any_fault)(lan, workspace, draw)
            except AssertionError as error:
                wrong = [str(error)]
            if wrong:
                print(f"\nFAILED: {'; '.join(wrong)}\nagain: {sys.argv[0]} --seed {seed} --first {step} --num 1")
                return 1
            num_done += 1
            print(flush=True)
    took_s = time.monotonic() - began_s
    print(f"seed {seed}: {num_done} random faults in a row in {took_s / 60:.0f} min, no process and no byte of a log lost")
    return 0 if num_done == len(steps) else 130


def _any_fault(lan: Lan, workspace: Workspace, draw: random.Random) -> list[str]:
    case = Case(draw.choice(FAULTS), draw.choice(LAUNCHERS), draw.choice(MODES), is_short=True)
    delay_s = draw.uniform(0.0, MOST_DELAY_S)
    print(case, end="", flush=True)
    measured = measure(case, lan, workspace, delay_s)
    print(f", {measured.stop_s or 0.0:.1f} s", end="")
    return differences(case, measured)


def _any_process(lan: Lan, workspace: Workspace, draw: random.Random) -> list[str]:
    """Also while the job starts, and while what starts it is at work. What becomes of it is open; that it ends cleanly is not."""
    launcher, mode, node, moment_s = draw.choice(LAUNCHERS), draw.choice(MODES), draw.choice(lan.nodes), draw.uniform(0.0, MOST_MOMENT_S)
    print(f"a process of {node.name} is killed at {moment_s:.2f} s ({launcher}, {mode})", end="", flush=True)
    scene = Scene(lan, workspace, launcher, detached=mode == "detached", target=node, lease_s=LEASE_S)
    try:
        scene.start()
        time.sleep(moment_s)
        there = node.processes()
        victim = draw.choice(sorted(there)) if there else None
        if victim is None:
            scene.kill_launcher()
        else:
            scene.signal(node, [victim], check=False)  # it may just have ended
        print(f": {there.get(victim or 0, 'dtrain launch')[:60]}", end="", flush=True)
        wrong = _ends(scene)
        lost, left = scene.lost_bytes(lan.nodes)[1], scene.processes(lan.nodes)
        return wrong + [f"left running: {each}" for each in left] + ([f"{lost} bytes of logs are lost"] if lost else [])
    finally:
        scene.heal()
        scene.kill_launcher()


def _ends(scene: Scene) -> list[str]:
    """Whether all of it ends, at the latest when somebody stops it."""
    deadline = time.monotonic() + START_S
    stop = scene.workspace.dtrain("stop", "hurt")
    while scene.launch is not None and scene.launch.poll() is None and time.monotonic() < deadline:
        stop = scene.workspace.dtrain("stop", "hurt")
    launch_code = None if scene.launch is None else scene.ended()
    if stop.code == NO_SUCH_JOB:  # the launch had not come as far as a job
        return [] if scene.await_none(scene.lan.nodes, STOP_S + LOADED_S) is not None else ["no job, and it does not end"]
    if stop.code != 0:
        return [f"stop ended with {stop.code}: {stop.err}"]
    status = scene.status(over=True)
    if status["state"] not in ("SUCCEEDED", "FAILED", "STOPPED", "LOST"):
        return [f"it is {status['state']}"]
    if launch_code not in (None, status["exit_code"]) and not (scene.detached and launch_code == 0):
        return [f"the launch ended with {launch_code}, the job with {status['exit_code']}: {scene.said()}"]
    stop_s = scene.await_none(scene.lan.nodes, START_S)
    return [] if stop_s is not None else ["it does not end"]


if __name__ == "__main__":
    sys.exit(main())
