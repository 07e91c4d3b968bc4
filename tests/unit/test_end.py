"""What a person reads when a job has failed."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from dtrain.jobstate import Failure
from dtrain.render.end import describe, hint, print_failure

TOLD = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: [bold]bad[/bold]'


def shown(folder: Path, log: str, *, width: int = 80, traceback: str = TOLD) -> str:
    path = folder / "n2/logs/rank3.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(log)
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False, no_color=True, force_terminal=True)
    failure = Failure(1.0, "n2", 3, 1, None, "exception", traceback, "", symptom=False)
    print_failure(console, failure, folder, "/var/tmp/dtrain-0/jobs/j/n2")
    return out.getvalue()


def test_the_last_thirty_lines_stand_as_on_a_screen(tmp_path: Path) -> None:
    steps = "".join(f"\x1b[31mstep {i}\x1b[0m [bold]x[/bold]\n" for i in range(50))
    text = shown(tmp_path, steps + "\x1b]0;title\x07 1%\r99%\n" + "".join(f"[rank3]: {line}\n" for line in TOLD.splitlines()))
    plain = text.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert "\x1b" not in plain
    lines = plain.splitlines()
    assert lines[:3] == [
        "rank 3 on n2 failed with exit code 1: exception",
        "hint: the last line of the traceback says what was wrong, the line above it where",
        "last 30 lines of its log:",
    ]
    assert lines[3:5] == ["  step 24 [bold]x[/bold]", "  step 25 [bold]x[/bold]"]
    assert lines[29:33] == [
        "  99%",
        "  Traceback (most recent call last):",
        '    File "a.py", line 1, in <module>',
        "  ValueError: [bold]bad[/bold]",
    ]
    assert lines[33:] == [f"log: {tmp_path}/n2/logs/rank3.log", "     n2:/var/tmp/dtrain-0/jobs/j/n2/logs/rank3.log"]


def test_a_traceback_further_up_is_shown_first_and_long_lines_are_not_cut(tmp_path: Path) -> None:
    text = shown(tmp_path, TOLD + "\n" + "summary " * 30 + "\n" * 40 + "bye\n")
    assert text.index("ValueError") < text.index("last 30 lines") < text.index("bye")
    assert "summary " * 30 in shown(tmp_path, "summary " * 30 + "\n", width=80)


def test_the_kernels_word_follows_the_hint() -> None:
    failure = Failure(1.0, "n2", 3, 137, 9, "killed", "", "neither the kernel log nor its cgroup shows it", symptom=False)
    assert describe(failure) == "rank 3 on n2 failed with SIGKILL (exit code 137): killed"
    assert hint(failure).startswith("out of memory is the usual cause") and hint(failure).endswith("; " + failure.detail)
    assert describe(Failure(1.0, "n2", 3, 163, 35, "terminated", "", "", symptom=False)).startswith("rank 3 on n2 failed with signal 35 (")
