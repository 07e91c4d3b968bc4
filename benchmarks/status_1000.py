"""How soon `dtrain status` answers where the store knows 1,000 jobs, all of them over. At most 0.3 s."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.intake import Intake, Silent
from dtrain.node import wire
from dtrain.plan import LaunchPlan, make_plan
from dtrain.spec import load_job
from dtrain.store import Store

NUM_JOBS = 1000
LIMIT_S = 0.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    dtrain = str(Path(sys.executable).parent / "dtrain")
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_STATE_HOME": folder}
        began = time.perf_counter()
        job = _fill(Store.default(env), Path(folder))
        print(f"a store of {NUM_JOBS} jobs on 2 nodes x 4 workers, filled in {time.perf_counter() - began:.1f} s")
        commands = {"status": ("status",), "status --json": ("status", "--json"), "status JOB": ("status", job), "--help": ("--help",)}
        for words in commands.values():  # byte code, page cache
            _run((dtrain, *words), env)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, words in commands.items():
                times[name].append(_run((dtrain, *words), env))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        print(f"dtrain {name}: {median * 1000:.0f} ms, at best {min(times[name]) * 1000:.0f} ms")
    print(f"dtrain status: {medians['status']:.3f} s, median of {repeats} (at most {LIMIT_S})")
    return 0 if medians["status"] <= LIMIT_S else 1


def _fill(store: Store, folder: Path) -> str:
    """Jobs as a launcher leaves them. Returns the id of the last one."""
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text("name: train\nscript: train.py\ncluster: {instances: 2, gpus_per_instance: 4, device: cpu}\n")
    spec = load_job(folder / "job.yaml")
    plan = make_plan(spec)
    job = ""
    for number in range(NUM_JOBS):
        job = store.new_job_id()
        store.add(
            job,
            plan,
            spec.cluster,
            workdir=folder,
            outputs="out",
            git_commit="0123456789abcdef" * 2 + "01234567",
            workdir_hash="0" * 64,
            overrides=(f"--set trainer.learning_rate={number}",),
            files={"plan.json": "{}"},
        )
        _run_through(Intake(store, job, plan, Silent()), plan)
    return job


def _run_through(intake: Intake, plan: LaunchPlan) -> None:
    for node in plan.nodes:
        events = [wire.AgentStarted(1.0, 1, 1, "boot")]
        events += [wire.WorkerStarted(2.0, worker.rank, worker.local_rank, 5) for worker in node.workers]
        events += [wire.WorkerEnded(3.0, worker.rank, worker.local_rank, 0, None, "", False) for worker in node.workers]
        events += [wire.NodeEnded(4.0, "succeeded", "", "", ())]
        intake.take(node.name, wire.StreamBytes(wire.EVENTS, 0), b"".join(wire.to_json(event).encode() + b"\n" for event in events))
        losses = b"".join(b'{"iteration": %d, "loss": 0.5}\n' % iteration for iteration in range(20))
        intake.take(node.name, wire.StreamBytes(wire.METRICS, 0), losses)


def _run(argv: Sequence[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
