"""What git says of a working directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dtrain.git import Checkout, Look


def _git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=ana", "-c", "user.email=ana@lab")
    return subprocess.run(("git", *who, *words), cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_commit_is_marked_where_the_working_directory_is_not_as_in_it(tmp_path: Path) -> None:
    """Outputs that were fetched are no change, nor is what lies beside the working directory."""
    workdir = tmp_path / "lab/code"
    workdir.mkdir(parents=True)
    (workdir / "train.py").touch()
    assert Look(workdir, "out").checkout() is None
    _git(tmp_path / "lab", "init", "--quiet")
    assert Look(workdir, "out").checkout() is None  # nothing was committed yet
    _git(tmp_path / "lab", "add", ".")
    _git(tmp_path / "lab", "commit", "--quiet", "-m", "first")
    commit = _git(tmp_path / "lab", "rev-parse", "HEAD")
    (workdir / "out[1]").mkdir()
    (workdir / "out[1]/model.pt").touch()
    (tmp_path / "lab/beside.py").touch()
    assert Look(workdir, "out[1]").checkout() == Checkout(commit, changed=False)
    (workdir / "new.py").touch()
    assert Look(workdir, "out[1]").checkout() == Look(workdir, "/scratch").checkout() == Checkout(commit, changed=True)
    assert Look(tmp_path / "not there", "out").checkout() is None


def test_a_git_that_takes_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "bin/git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\ncase $1 in rev-parse) echo c0ffee;; *) exec sleep 100;; esac\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:/usr/bin:/bin")
    assert Look(tmp_path, "out").checkout() == Checkout("c0ffee", changed=None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Look(tmp_path, "out").checkout() is None  # no git
