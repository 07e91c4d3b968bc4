"""What all tests share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Workspace
from tests.lan import Lan, why_not
from tests.ssh import SSHD, Sshd, write_user_files


def _skipped(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else [report.nodeid for report in reporter.stats.get("skipped", [])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out, by name, what this machine has not the parts for."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        lacking = ("not installed: sshd" if "sshd" in names and SSHD is None else None) or ("lan" in names and why_not()) or None
        if lacking:
            item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """CI has all that the tests need, so there (DTRAIN_NO_SKIP) a skip is a test lost, and the run fails."""
    if os.environ.get("DTRAIN_NO_SKIP") and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("DTRAIN_NO_SKIP"):
        for nodeid in _skipped(terminalreporter.config):
            terminalreporter.write_line(f"skipped, which DTRAIN_NO_SKIP forbids: {nodeid}", red=True)


def _shared_files() -> set[str]:
    return {f"{folder}/{name}" for folder in ("/var/tmp", "/dev/shm") for name in os.listdir(folder)}


def _without_user(paths: set[str]) -> set[str]:
    """Those that no process has mapped, open or as its working directory: what has one belongs to a test that runs beside this one."""
    for name in filter(str.isdigit, os.listdir("/proc")) if paths else ():
        process = Path("/proc", name)
        try:
            used = process.joinpath("maps").read_text().splitlines()
            used += [os.readlink(link) for link in (process / "cwd", *process.joinpath("fd").iterdir())]
        except OSError:  # ended meanwhile, or another user's
            continue
        paths = {path for path in paths if not any(line.endswith(path) or f"{path}/" in line for line in used)}
    return paths


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A place to launch from. A test that leaves a process, or a file outside of it, fails."""
    before = _shared_files()
    here = Workspace(tmp_path)
    yield here
    left = here.close()
    assert not left, f"still running: {left}"
    deadline = time.monotonic() + 5.0
    while (new := _without_user(_shared_files() - before)) and time.monotonic() < deadline:  # or is about to be used, or removed
        time.sleep(0.05)
    assert not new, f"left outside the test's folder: {sorted(new)}"


@pytest.fixture
def sshd(workspace: Workspace) -> Iterator[Sshd]:
    """An sshd on loopback that the workspace's user reaches by the name `box`."""
    server = Sshd(workspace.root / "sshd")
    try:
        write_user_files(workspace.root / "home", server.user_key, [server.host()])
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def _three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    lan = Lan(tmp_path_factory.mktemp("lan") / "lan", num_nodes=3)
    try:
        yield lan
    finally:
        lan.close()
    assert lan.remains() == []


@pytest.fixture
def lan(_three_nodes: Lan, workspace: Workspace) -> Iterator[Lan]:
    """Three machines, n1 to n3, empty and unharmed, which lan.yaml names. A test that leaves a process or a file on them fails."""
    _three_nodes.admit(workspace.root / "home")
    workspace.write("lan.yaml", _three_nodes.cluster())
    yield _three_nodes
    _three_nodes.heal()
    deadline = time.monotonic() + 5.0
    while (running := _three_nodes.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    files = {node.name: found for node in _three_nodes.nodes if (found := node.files())}
    for node in _three_nodes.nodes:
        node.wipe()
    assert not running, f"still running on the nodes: {running}"
    assert not files, f"left outside of dtrain's folder on the nodes: {files}"
