"""Ctrl-C and TERM at each moment of a launch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.cli.launch import _Signals
from dtrain.intake import Silent
from dtrain.jobstate import JobState
from dtrain.plan import make_plan
from dtrain.render import console
from dtrain.render.live import LiveView
from dtrain.spec import load_job
from dtrain.store import Store
from dtrain.supervise import Supervisor


@pytest.fixture
def signals() -> Iterator[_Signals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield _Signals(LiveView(console.person()), may_detach=False, has_key=False)
    for number, handler in before.items():
        signal.signal(number, handler)


def _followed(signals: _Signals, folder: Path) -> JobState:
    """What a job comes to that these signals are handed, once all its nodes have been left."""
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text("script: train.py\ncluster: {instances: 1, gpus_per_instance: 1, device: cpu}\n")
    spec = load_job(folder / "job.yaml", environ={})
    store, plan = Store(folder / "state"), make_plan(spec)
    store.add("aa11", plan, spec.cluster, workdir=folder, outputs="out", git_commit=None, workdir_hash=None)
    supervisor = Supervisor(store, "aa11", plan, Silent())
    signals.hand_over(supervisor, 30.0)
    return supervisor.run((), {})


def test_a_start_is_broken_off(signals: _Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGINT, "ctrl-c"), (signal.SIGTERM, "stop")])
def test_one_that_comes_while_workers_begin_to_run_stops_them(
    signals: _Signals, tmp_path: Path, number: signal.Signals, cause: str
) -> None:
    """Broken off there, they would run until the lease is over."""
    signals.committing()
    os.kill(os.getpid(), number)
    assert _followed(signals, tmp_path).stop_cause == cause


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_one_that_came_as_a_job_ended_lets_no_other_begin(signals: _Signals, number: signal.Signals, error: type[BaseException]) -> None:
    signals.committing()
    os.kill(os.getpid(), number)
    with pytest.raises(error):
        signals.start()


def test_nohup_keeps_a_launch_that_has_no_terminal_any_more(signals: _Signals) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        _Signals(LiveView(console.person()), may_detach=True, has_key=False)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_one_does_not_wait_for_nodes_that_hang(signals: _Signals) -> None:
    signals.committing()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
