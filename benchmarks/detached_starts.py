"""Detached starts in a row, each from a terminal of its own that closes as soon as the launch has returned. Once the last one has
returned, every job has to be RUNNING, as its nodes say, with all of its workers. The jobs run side by side on instances of this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dtrain import api
from dtrain.jobstate import State
from dtrain.store import JobRecord, Store
from tests.cluster import Workspace

SLEEP = "import time\nprint('ready', flush=True)\ntime.sleep(3600)\n"
INSTANCES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=50)
    starts: int = parser.parse_args().starts
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        workspace.write("sleep.py", SLEEP)
        job = workspace.job("name: sleeps\nlauncher: none\nscript: sleep.py\ngrace: 1\n", instances=INSTANCES)
        try:
            took_s = [_start(workspace, job) for _ in range(starts)]
            store = Store(workspace.root / "state/dtrain")
            records = store.jobs()
            problems = {job: why for job, why in api.refresh(store, records).items() if why}
            num_running = sum(record.state is State.RUNNING and _num_workers(record) == INSTANCES for record in store.jobs())
            for record in records:
                assert workspace.dtrain("stop", record.job).code == 0
        finally:
            left = workspace.close()
    print(
        f"{starts} detached starts in a row: {num_running} alive, {len(problems)} not asked, {len(left)} processes left after "
        f"`dtrain stop`; {statistics.median(took_s):.1f} s each (median)"
    )
    return 0 if num_running == len(records) == starts and not problems and not left else 1


def _start(workspace: Workspace, job: Path) -> float:
    """Seconds until the launch has returned."""
    began_s = time.monotonic()
    launch = workspace.on_terminal("launch", job, "--detach")
    code = launch.ended()
    assert code == 0, launch.said()
    took_s = time.monotonic() - began_s
    launch.hang_up()
    return took_s


def _num_workers(record: JobRecord) -> int:
    """How many of a job's workers there are now."""
    variable = f"DTRAIN_JOB_ID={record.job}\0".encode()
    return sum(b"sleep.py" in command and variable in environ for command, environ in _processes())


def _processes() -> list[tuple[bytes, bytes]]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append((Path("/proc", name, "cmdline").read_bytes(), Path("/proc", name, "environ").read_bytes()))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
