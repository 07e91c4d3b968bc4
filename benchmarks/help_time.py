"""How soon `dtrain --help` answers, against `python -c "import click"`. At most twice as long."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=31)
    repeats = parser.parse_args().repeats
    help_argv = (str(Path(sys.executable).parent / "dtrain"), "--help")
    click_argv = (sys.executable, "-c", "import click")
    _run(help_argv), _run(click_argv)
    pairs = [(_run(help_argv), _run(click_argv)) for _ in range(repeats)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    figures = f"{ours * 1000:.0f} ms / {theirs * 1000:.0f} ms, medians of {repeats}"
    print(f"dtrain --help / import click: {ours / theirs:.2f} ({figures}; at most {LIMIT})")
    return 0 if ours / theirs <= LIMIT else 1


def _run(argv: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
