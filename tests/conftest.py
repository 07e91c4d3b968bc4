"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Workspace


def _skipped(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else [report.nodeid for report in reporter.stats.get("skipped", [])]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """CI has all that the tests need, so there (DTRAIN_NO_SKIP) a skip is a test lost, and the run fails."""
    if os.environ.get("DTRAIN_NO_SKIP") and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("DTRAIN_NO_SKIP"):
        for nodeid in _skipped(terminalreporter.config):
            terminalreporter.write_line(f"skipped, which DTRAIN_NO_SKIP forbids: {nodeid}", red=True)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A place to launch from. A test that leaves a process, or a file outside of it, fails."""
    before = set(os.listdir("/var/tmp")) | set(os.listdir("/dev/shm"))
    here = Workspace(tmp_path)
    yield here
    left = here.close()
    assert not left, f"still running: {left}"
    new = (set(os.listdir("/var/tmp")) | set(os.listdir("/dev/shm"))) - before
    assert not new, f"left outside the test's folder: {sorted(new)}"
