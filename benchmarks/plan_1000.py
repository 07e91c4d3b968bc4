"""How long a job file for 1,000 instances takes to be loaded, checked and planned, against PyYAML reading the same file.

The reference is yaml.load with SafeLoader, PyYAML's own Python code, which gives neither positions nor a plan. At most three
times as long. Every instance has a mapping of its own, the longest that a cluster file makes of a machine.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.console import Console

from dtrain.launchers import node_commands
from dtrain.plan import make_plan
from dtrain.render.commands import print_commands
from dtrain.render.plan import print_plan
from dtrain.spec import load_job

LIMIT = 3.0
INSTANCES = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        job = _job_file(Path(folder))
        _plan(job), _read(job)
        pairs = [(_time(lambda: _plan(job)), _time(lambda: _read(job))) for _ in range(repeats)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    figures = f"{ours * 1000:.0f} ms / {theirs * 1000:.0f} ms, medians of {repeats}"
    print(f"plan of {INSTANCES} instances / yaml.SafeLoader: {ours / theirs:.2f} ({figures}; at most {LIMIT})")
    return 0 if ours / theirs <= LIMIT else 1


def _job_file(folder: Path) -> Path:
    (folder / "train.py").touch()
    item = "    - {{host: trn{0:04}.lab, gpus: {1}, address: 10.0.{2}.{3}, ssh: {{port: {4}}}}}"
    rows = [item.format(index, 4 + index % 2 * 4, index // 250, index % 250 + 1, 2000 + index) for index in range(INSTANCES)]
    job = folder / "job.yaml"
    job.write_text("script: train.py\ncluster:\n  device: cuda\n  instances:\n" + "\n".join(rows) + "\n")
    return job


def _plan(job: Path) -> None:
    """All that a dry run does behind the command line."""
    spec = load_job(job, environ={})
    plan = make_plan(spec)
    console = Console(file=io.StringIO(), width=80)
    print_plan(console, plan, None)
    print_commands(console, node_commands(spec, plan, "<job>"), spec.env)


def _read(job: Path) -> None:
    yaml.load(job.read_text(), yaml.SafeLoader)


def _time(work: Callable[[], None]) -> float:
    """CPU seconds: neither waits for anything, and what else the machine does is left out."""
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
