"""`dtrain status`: forty jobs of one name told apart, a line each."""

from __future__ import annotations

import io

from rich.console import Console

from dtrain.jobstate import State
from dtrain.render.jobs import print_jobs
from dtrain.store import JobSummary, this_user

COMMIT = "0123456789abcdef" * 2 + "01234567"


def _job(
    number: int, *, by: str = "", commit: str | None = COMMIT, changed: bool | None = False, overrides: tuple[str, ...] = ()
) -> JobSummary:
    return JobSummary(f"{number:08x}", "train", by or this_user(), commit, changed, overrides, State.SUCCEEDED, 16, 0, 1.0, 61.0)


def _lines(*jobs: JobSummary, width: int = 80) -> list[str]:
    file = io.StringIO()
    print_jobs(Console(file=file, width=width, color_system=None), jobs)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_each_line_says_by_what_its_job_differs() -> None:
    rates = [_job(number, changed=number % 2 == 1, overrides=(f"--set trainer.learning_rate=0.{number}",)) for number in range(40)]
    lines = _lines(*rates)
    assert lines[0].split() == ["job", "name", "state", "size", "took", "exit", "commit", "overrides"]
    assert len(lines) == 41 and all(len(line) <= 80 for line in lines)
    assert lines[1].endswith("  0123456   …ner.learning_rate=0.0") and lines[40].endswith("  0123456+  …er.learning_rate=0.39")
    assert _lines(*rates, width=120)[40].endswith("  trainer.learning_rate=0.39")
    assert _lines(rates[39], width=120)[1].endswith("  --set trainer.learning_rate=0.39")


def test_what_all_jobs_of_a_name_have_is_left_out() -> None:
    swept = [_job(i, overrides=(f"--set env.LR=0.{i}", "--set env.BS=32", "-- --epochs 3 --wd 0.1")) for i in range(3)]
    other = _job(7, overrides=("--nodes n1",))
    assert [line.split("0123456")[1].strip() for line in _lines(*swept)[1:]] == ["env.LR=0.0", "env.LR=0.1", "env.LR=0.2"]
    assert [line.split("0123456")[1].strip() for line in _lines(other, _job(8))[1:]] == ["--nodes n1", ""]
    assert _lines(swept[0], swept[0], width=120)[1].endswith("--set env.LR=0.0 --set env.BS=32 -- --epochs 3 --wd 0.1")


def test_who_launched_is_shown_where_it_was_somebody_else() -> None:
    assert "by" not in _lines(_job(1))[0]
    head, *rows = _lines(_job(1, commit=None), _job(2, commit=None, by="eva@box"), width=100)
    assert head.split()[-1] == "by" and rows[1].endswith("eva@box") and rows[0].endswith(this_user())
