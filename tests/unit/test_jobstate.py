"""A job's state is what its events add up to."""

from __future__ import annotations

import pytest

from dtrain.jobstate import JobState, NodeLost, NodeState, RankState, StartFailed, State, StopAsked
from dtrain.node import wire

TWO_NODES = JobState((NodeState("a", (RankState(0, 0),)), NodeState("b", (RankState(1, 0),))))


def _ended(rank: int, code: int, at: float, *, symptom: bool = False, signal: int | None = None, traceback: str = "") -> wire.WorkerEnded:
    return wire.WorkerEnded(at, rank, 0, code, signal, traceback, symptom)


def _over(outcome: wire.Outcome, reason: str = "", at: float = 9.0) -> wire.NodeEnded:
    return wire.NodeEnded(at, outcome, reason, "", ())


def _running() -> JobState:
    state = TWO_NODES
    for rank, node in enumerate("ab"):
        state = state.after(node, wire.AgentStarted(1.0, 10, 1, "boot"))
        state = state.after(node, wire.WorkerStarted(2.0, rank, 0, 20))
    return state


def test_from_pending_to_succeeded() -> None:
    state = TWO_NODES
    assert state.state is State.PENDING
    state = state.after("a", wire.AgentStarted(1.0, 10, 1, "boot"))
    assert state.state is State.STARTING
    state = _running()
    assert (state.state, state.exit_code) == (State.RUNNING, None)
    for rank, node in enumerate("ab"):
        state = state.after(node, _ended(rank, 0, 5.0)).after(node, _over("succeeded"))
    assert (state.state, state.exit_code, state.exit_source) == (State.SUCCEEDED, 0, "worker")
    assert (state.started_at, state.ended_at) == (1.0, 9.0)


def test_a_node_of_which_nobody_has_heard_makes_no_state() -> None:
    """The others' does, but that the job is over, which it cannot be without it."""
    unknown = JobState(
        (NodeState("a", (RankState(0, 0, State.UNKNOWN),), State.UNKNOWN), NodeState("b", (RankState(1, 0, State.UNKNOWN),), State.UNKNOWN))
    )
    assert unknown.state is State.UNKNOWN
    state = unknown.after("a", wire.AgentStarted(1.0, 10, 1, "boot"))
    assert state.state is State.STARTING
    state = state.after("a", wire.WorkerStarted(2.0, 0, 0, 20))
    assert state.state is State.RUNNING
    state = state.after("a", _ended(0, 0, 5.0)).after("a", _over("succeeded"))
    assert (state.state, state.exit_code) == (State.RUNNING, None)
    assert state.after("b", _over("succeeded")).state is State.SUCCEEDED


def test_a_job_with_a_lost_node_is_not_starting_again() -> None:
    assert _running().after("", NodeLost(3.0, "b", "gone")).state is State.RUNNING


def test_the_cause_is_the_earliest_failure_that_is_no_symptom() -> None:
    """Rank 0 lost its peer and was heard of first; the peer that failed is the cause all the same."""
    state = _running().after("a", _ended(0, 1, 3.0, symptom=True)).after("b", _ended(1, 7, 3.5))
    state = state.after("a", _over("failed", "worker-failed")).after("b", _over("failed", "worker-failed"))
    assert (state.state, state.exit_code) == (State.FAILED, 7)
    assert state.first_failure is not None and state.first_failure.node == "b"


def test_a_symptom_counts_where_nothing_else_explains_the_end() -> None:
    state = _running().after("a", _ended(0, 1, 3.0, symptom=True)).after("a", _over("failed", "worker-failed")).after("b", _over("stopped"))
    assert (state.state, state.exit_code) == (State.FAILED, 1)


def test_a_job_has_no_lease_once_one_node_knows_that_it_is_detached() -> None:
    state = _running()
    assert not state.is_lease_lifted
    state = state.after("b", wire.LeaseLifted(3.0))
    assert state.is_lease_lifted and state.state is State.RUNNING


@pytest.mark.parametrize(("cause", "code"), [("ctrl-c", 130), ("stop", 143)])
def test_a_stop_is_no_failure(cause: str, code: int) -> None:
    state = _running().after("", StopAsked(3.0, cause))
    for rank, node in enumerate("ab"):
        state = state.after(node, _ended(rank, 143, 4.0, symptom=True, signal=15)).after(node, _over("stopped", cause))
    assert (state.state, state.exit_code, state.exit_source) == (State.STOPPED, code, "dtrain")


def test_a_lost_node_and_a_failed_start() -> None:
    lost = _running().after("", NodeLost(5.0, "b", "gone")).after("a", _over("stopped", "failure"))
    assert (lost.state, lost.exit_code, lost.exit_source) == (State.LOST, 69, "dtrain")
    failed = TWO_NODES.after("", StartFailed(1.0, 73, "no space"))
    assert (failed.state, failed.exit_code, failed.exit_source) == (State.FAILED, 73, "dtrain")
    for code in (130, 143):  # Ctrl-C or TERM while it was being started
        stopped = TWO_NODES.after("", StartFailed(1.0, code, "KeyboardInterrupt"))
        assert (stopped.state, stopped.exit_code, stopped.exit_source) == (State.STOPPED, code, "dtrain")


def test_causes_are_put_in_order_by_one_clock() -> None:
    """b's clock is three minutes ahead, so what came first there looks like the last by far."""
    state = _running().after("b", wire.ClockOffset(2.5, 180.0))
    state = state.after("a", _ended(0, 5, 10.0)).after("b", _ended(1, 7, 189.5))
    state = state.after("a", _over("failed", "worker-failed")).after("b", _over("failed", "worker-failed", at=190.0))
    assert state.first_failure is not None
    assert (state.first_failure.node, state.first_failure.at, state.exit_code) == ("b", 9.5, 7)


def test_the_word_of_others_is_evidence_and_a_nodes_own_word_is_better() -> None:
    missed = _running().after("a", wire.PeerLost(20.0, "b", "said nothing for 15 s", 15.0)).after("a", _over("stopped", "peer-lost"))
    assert missed.state is State.RUNNING  # b may still speak for itself
    lost = missed.after("", NodeLost(40.0, "b", "a says: said nothing for 15 s"))
    assert (lost.state, lost.exit_code) == (State.LOST, 69)
    assert lost.first_failure is not None
    assert (lost.first_failure.node, lost.first_failure.reason, lost.first_failure.at) == ("b", "node-lost", 8.0)
    own = missed.after("b", _over("failed", "agent-killed", at=30.0))
    assert own.first_failure is not None and own.first_failure.reason == "agent-killed"
    both_cut_off = missed.after("b", wire.PeerLost(21.0, "a", "said nothing for 15 s", 15.0)).after("b", _over("stopped", "peer-lost"))
    assert (both_cut_off.state, both_cut_off.exit_code, both_cut_off.exit_source) == (State.FAILED, 69, "dtrain")


def test_a_node_that_was_started_anew_is_lost() -> None:
    state = _running().after("b", _over("lost", "rebooted")).after("a", _over("stopped", "failure"))
    assert (state.state, state.exit_code) == (State.LOST, 69)
    assert state.first_failure is not None and state.first_failure.reason == "rebooted"


def test_among_causes_the_earliest_wins_whatever_was_heard_first() -> None:
    state = _running().after("b", _ended(1, 7, 3.5)).after("a", _ended(0, 5, 3.0))
    state = state.after("a", _over("failed", "worker-failed")).after("b", _over("failed", "worker-failed"))
    assert state.first_failure is not None and (state.first_failure.rank, state.exit_code) == (0, 5)


def test_a_signal_from_a_stranger_is_the_cause_where_there_is_no_other() -> None:
    """Its peers lost it and were told to end after it; each of them is a symptom as well."""
    state = _running().after("b", _ended(1, 143, 3.0, symptom=True, signal=15)).after("a", _ended(0, 1, 3.1, symptom=True))
    state = state.after("b", _over("failed", "worker-failed")).after("a", _over("stopped", "failure"))
    cause = state.first_failure
    assert cause is not None and (cause.node, cause.signal, cause.reason) == ("b", 15, "terminated")
    assert (state.state, state.exit_code, state.exit_source) == (State.FAILED, 143, "worker")


def test_a_node_is_not_blamed_for_the_worker_that_ended_it() -> None:
    state = (
        _running()
        .after("a", _ended(0, 3, 3.0))
        .after("a", _over("failed", "worker-failed", at=4.0))
        .after("b", _over("stopped", "failure"))
    )
    assert len(state.failures) == 1


TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE\n"


@pytest.mark.parametrize(
    ("before", "reason", "detail", "is_taken"),
    [
        (TWO_NODES, "launcher-failed", TAKEN, True),
        (TWO_NODES, "launcher-failed", "ImportError: no module named yaml\n", False),
        (TWO_NODES, "agent-killed", TAKEN, False),
        (_running(), "launcher-failed", TAKEN, False),
    ],
)
def test_a_port_that_was_taken_before_any_worker_began(before: JobState, reason: str, detail: str, is_taken: bool) -> None:
    state = before.after("a", wire.NodeEnded(4.0, "failed", reason, detail, ())).after("b", _over("stopped", "failure"))
    assert state.is_port_taken == is_taken
    assert not state.after("", StopAsked(5.0, "stop")).is_port_taken  # nobody wants another one


def test_a_killed_agent_is_a_cause_and_the_workers_that_lost_it_are_none() -> None:
    state = _running().after("a", _ended(0, 1, 3.0, symptom=True)).after("a", _over("failed", "worker-failed"))
    state = state.after("b", _over("failed", "agent-killed"))
    cause = state.first_failure
    assert cause is not None and (cause.node, cause.rank, state.exit_code, state.exit_source) == ("b", None, 69, "dtrain")


def test_a_worker_that_failed_although_it_was_told_to_end_counts() -> None:
    """Its exception was out before; the peer that its end took along was heard of first."""
    state = _running().after("a", _ended(0, 1, 3.0, symptom=True))
    state = state.after("b", wire.WorkerEnded(3.2, 1, 0, 1, None, "Traceback", symptom=False, failed_first=True))
    state = state.after("a", _over("failed", "worker-failed")).after("b", _over("stopped", "failure"))
    assert state.first_failure is not None and state.first_failure.rank == 1


def test_a_node_that_the_job_does_not_have_is_not_lost() -> None:
    assert _running().after("a", wire.PeerLost(3.0, "zzz", "its connection ended", 1.0)) == _running()


def test_what_the_kernel_says_of_memory_reaches_the_failure() -> None:
    finding = wire.MemoryFinding(True, "kernel log: Out of memory: Killed process 20 (python3)")
    state = _running().after("a", wire.WorkerEnded(3.0, 0, 0, 137, 9, "", False, memory=finding))
    assert (state.failures[0].reason, state.failures[0].detail) == ("out-of-memory", finding.text)
