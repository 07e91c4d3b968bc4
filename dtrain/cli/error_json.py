"""What went wrong, for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from dtrain.errors import MOST_MISTAKES, DtrainError, InFile, Problem, SpecError
from dtrain.shell_words import visible


def error_json(error: click.ClickException | DtrainError) -> dict[str, Any]:
    """Mistakes with their places, of which files and options have many; anything else is one error."""
    if isinstance(error, SpecError):
        told = [_mistake(problem) for problem in error.problems[:MOST_MISTAKES]]
        return {"schema_version": 1, "mistakes": told, "num_mistakes": len(error.problems)}
    message, hint = (error.message, error.hint) if isinstance(error, DtrainError) else (error.format_message(), None)
    told_of = {"message": visible(message), "hint": None if hint is None else visible(hint), "exit_code": error.exit_code}
    return {"schema_version": 1, "error": told_of}


def _mistake(problem: Problem) -> dict[str, Any]:
    if isinstance(problem.place, InFile):
        file = problem.place.file.encode(errors="replace").decode()  # a name that is no UTF-8 is no JSON either
        where = {**asdict(problem.place), "file": file}
    else:
        where = asdict(problem.place)
    return {"where": where, "message": problem.message, "hint": problem.hint}
