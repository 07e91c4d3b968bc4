"""Jobs as a table. Loads little: who asks for the list waits for that more than for the list."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.render.console import duration
from dtrain.store import JobSummary, this_user

STYLES = {"SUCCEEDED": "green", "FAILED": "red", "LOST": "red", "RUNNING": "cyan"}
_COMMIT_LENGTH = 7
_GAP = 2  # between columns
_LEAST_WIDTH = 9  # of a column that is cut off


def print_jobs(console: Console, jobs: Sequence[JobSummary]) -> None:
    """As much of each job as the console has room for: who launched it where that is not all the same, and of its overrides what
    no other job of that name has."""
    columns = {
        "job": [job.job for job in jobs],
        "name": [job.name for job in jobs],
        "state": [job.state.value for job in jobs],
        "size": [str(job.cluster_size) for job in jobs],
        "took": [_took(job) for job in jobs],
        "exit": ["" if job.exit_code is None else str(job.exit_code) for job in jobs],
    }
    more = {
        "commit": [short_commit(job.git_commit, job.git_changed) for job in jobs],
        "by": [job.launched_by for job in jobs] if any(job.launched_by != this_user() for job in jobs) else [],
        "overrides": [" ".join(words) for words in _telling(jobs)],
    }
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in ("size", "exit") else "left")
    left = console.width - sum(_width(name, texts) + _GAP for name, texts in columns.items())
    for name, texts in more.items():
        if any(texts) and left >= min(_width(name, texts), _LEAST_WIDTH):
            table.add_column(name, no_wrap=True)
            columns[name] = [_end_of(text, left) for text in texts]
            left -= _width(name, texts) + _GAP
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(text, STYLES.get(text, "")) for text in row))
    console.print(table)


def _telling(jobs: Sequence[JobSummary]) -> list[list[str]]:
    """The words of each job's overrides, less those that all overridden jobs of its name have; all where they have the same."""
    words = [" ".join(job.overrides).split(" ") for job in jobs]
    sets: dict[str, list[set[str]]] = {}
    for job, each in zip(jobs, words, strict=True):
        if job.overrides:
            sets.setdefault(job.name, []).append(set(each))
    common = {name: set.intersection(*found) for name, found in sets.items()}
    return [[word for word in each if word not in common.get(job.name, ())] or each for job, each in zip(jobs, words, strict=True)]


def _width(name: str, texts: Sequence[str]) -> int:
    return max(map(cell_len, (name, *texts)))


def _end_of(text: str, width: int) -> str:
    """The value is what differs, and stands behind its key."""
    if cell_len(text) <= width:
        return text
    while cell_len(text) >= width:
        text = text[1:]
    return f"…{text}"


def short_commit(commit: str | None, changed: bool | None) -> str:
    """With a + where the working directory had changes besides."""
    return "" if commit is None else commit[:_COMMIT_LENGTH] + ("+" if changed else "")


def _took(job: JobSummary) -> str:
    if job.started_at is None:
        return ""
    return duration(max(0.0, (job.ended_at or time.time()) - job.started_at))
