"""Jobs as a table. Loads little: who asks for the list waits for that more than for the list."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.render.console import duration
from dtrain.store import JobSummary, this_user

STYLES = {"SUCCEEDED": "green", "FAILED": "red", "LOST": "red", "RUNNING": "cyan"}
_COMMIT_LENGTH = 7


def print_jobs(console: Console, jobs: Sequence[JobSummary]) -> None:
    """A line each, as wide as the console is: who launched a job where that is not all the same, and the start of its overrides."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("job", "name", "state", "size", "took", "exit"):
        table.add_column(name, overflow="fold", justify="right" if name in ("size", "exit") else "left")
    launchers = [job.launched_by for job in jobs] if any(job.launched_by != this_user() for job in jobs) else []
    commits = [short_commit(job.git_commit, job.git_changed) for job in jobs]
    overrides = [" ".join(job.overrides) for job in jobs]
    more = [(name, texts) for name, texts in (("by", launchers), ("commit", commits), ("overrides", overrides)) if any(texts)]
    for name, _ in more:
        table.add_column(name, overflow="fold" if name == "commit" else "ellipsis", no_wrap=True)
    for at, job in enumerate(jobs):
        table.add_row(
            job.job,
            job.name,
            Text(job.state.value, STYLES.get(job.state.value, "")),
            str(job.cluster_size),
            _took(job),
            "" if job.exit_code is None else str(job.exit_code),
            *(Text(texts[at]) for _, texts in more),
        )
    console.print(table)


def short_commit(commit: str | None, changed: bool | None) -> str:
    """With a + where the working directory had changes besides."""
    return "" if commit is None else commit[:_COMMIT_LENGTH] + ("+" if changed else "")


def _took(job: JobSummary) -> str:
    if job.started_at is None:
        return ""
    return duration(max(0.0, (job.ended_at or time.time()) - job.started_at))
