"""Asking the nodes of some jobs once for what the store does not have."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence

from dtrain.errors import DtrainError
from dtrain.intake import Intake, Silent
from dtrain.jobstate import NodeLost
from dtrain.link import Link, Target, make_ready_for
from dtrain.node import wire
from dtrain.store import JobRecord, Store


def catch_up(
    store: Store,
    jobs: Sequence[tuple[JobRecord, Sequence[Target]]],
    timeout_s: float,
    *,
    logs: bool = False,
    silent: Mapping[str, DtrainError] | None = None,
) -> dict[str, dict[str, str]]:
    """Bring the store up to what the nodes of some jobs know now, all nodes at once, however much that is.

    Args:
        timeout_s: how long a node may be silent.
        logs: of nodes that have not ended too. They may be long, and an `attach` goes on where they end here.
        silent: by node that has just not answered, why not; it is not asked again.

    Returns:
        By job, why each node that could not be asked in time was not, by name.
    """
    make_ready_for(target for _, targets in jobs for target in targets)
    intakes = {record.job: Intake(store, record.job, record.plan, Silent()) for record, _ in jobs}
    told: queue.SimpleQueue[tuple[Target, wire.Message | DtrainError, bytes]] = queue.SimpleQueue()
    waiting = {(target.job, target.node) for _, targets in jobs for target in targets}
    for _, targets in jobs:
        for target in targets:
            if silent is not None and target.node in silent:
                told.put((target, silent[target.node], b""))
                continue
            follow = wire.Follow(intakes[target.job].offsets(target.node), once=True, logs=logs)
            threading.Thread(target=_ask_once, args=(target, follow, told), daemon=True).start()
    problems: dict[str, dict[str, str]] = {record.job: {} for record, _ in jobs}
    silent_until_s = dict.fromkeys(waiting, time.monotonic() + timeout_s)
    heard: dict[str, dict[str, float]] = {record.job: {} for record, _ in jobs}
    while waiting and (left_s := max(silent_until_s[each] for each in waiting) - time.monotonic()) > 0:
        try:
            target, message, payload = told.get(timeout=left_s)
        except queue.Empty:
            break
        silent_until_s[target.job, target.node] = time.monotonic() + timeout_s
        if isinstance(message, DtrainError):
            problems[target.job][target.node] = message.message
        else:
            intakes[target.job].take(target.node, message, payload)
            heard[target.job][target.node] = time.time()
        if isinstance(message, (DtrainError, wire.CaughtUp)):
            waiting.discard((target.job, target.node))
    for job, node in sorted(waiting):
        problems[job][node] = f"no answer within {timeout_s:g} s"
    for record, _ in jobs:
        intake = intakes[record.job]
        for each in intake.state.nodes:
            if each.missed and not each.state.is_final and each.name in problems[record.job]:  # neither do the other nodes hear of it
                intake.take_own(NodeLost(time.time(), each.name, each.missed))
        if heard[record.job]:
            store.saw(record.job, heard[record.job])
        if intake.state.state is not record.state:
            store.keep_state(record.job, intake.state)
        if intake.unkept is not None:
            raise intake.unkept
    return problems


def _ask_once(target: Target, follow: wire.Follow, told: queue.SimpleQueue[tuple[Target, wire.Message | DtrainError, bytes]]) -> None:
    try:
        link = Link.open(target)
        try:
            link.tell(follow)
            message: wire.Message = wire.Done()
            while not isinstance(message, wire.CaughtUp):
                message, payload = link.answer()
                told.put((target, message, payload))
        finally:
            link.close()
    except DtrainError as error:
        told.put((target, error, b""))
