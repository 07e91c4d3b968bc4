"""Asking the nodes of some jobs once, for what the store does not have or for the ends of their logs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from dtrain.errors import DtrainError, NodeUnreachable
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
    intakes = {record.job: Intake(store, record.job, record.plan, Silent()) for record, _ in jobs}
    orders = [
        (target, wire.Follow(intakes[target.job].offsets(target.node), once=True, logs=logs)) for _, targets in jobs for target in targets
    ]
    problems: dict[str, dict[str, str]] = {record.job: {} for record, _ in jobs}
    heard: dict[str, dict[str, float]] = {record.job: {} for record, _ in jobs}
    for target, message, payload in _answers(orders, timeout_s, silent):
        if target.node in problems[target.job]:
            continue  # its end is not taken either, so that it is asked once more
        try:
            if isinstance(message, DtrainError):
                raise message
            intakes[target.job].take(target.node, message, payload)
            heard[target.job][target.node] = time.time()
        except DtrainError as error:
            problems[target.job][target.node] = error.message
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


def tails(
    streams: Sequence[tuple[Target, Sequence[str]]], num_lines: int, text: str | None, timeout_s: float, silent: Mapping[str, DtrainError]
) -> tuple[dict[tuple[str, str], bytes], dict[str, str]]:
    """The ends of logs as the nodes have them now. They go into no store, whose copies have no gaps.

    Args:
        streams: of which logs, by node.
        num_lines, text: the last lines, or the last of those that hold a text.
        timeout_s, silent: as for catch_up.

    Returns:
        By node and stream the lines, of all that are there; and by node why it could not be asked.
    """
    orders = [(target, wire.GetTails(tuple(names), num_lines, text)) for target, names in streams]
    found: dict[tuple[str, str], bytearray] = {}
    problems: dict[str, str] = {}
    for target, message, payload in _answers(orders, timeout_s, silent):
        if isinstance(message, DtrainError):
            problems[target.node] = message.message
        elif isinstance(message, wire.TailBytes):
            found.setdefault((target.node, message.stream), bytearray()).extend(payload)
    return {each: bytes(data) for each, data in found.items() if each[0] not in problems}, problems


_Answer: TypeAlias = tuple[Target, wire.Message | DtrainError, bytes]


def _answers(
    orders: Sequence[tuple[Target, wire.Message]], timeout_s: float, silent: Mapping[str, DtrainError] | None
) -> Iterator[_Answer]:
    """What each node answers to its order, as it comes; in the end, or where it is silent for so long, an error of each that did not
    say its last word."""
    make_ready_for(target for target, _ in orders)
    told: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    for target, order in orders:
        if silent is not None and target.node in silent:
            told.put((target, silent[target.node], b""))
        else:
            threading.Thread(target=_ask_once, args=(target, order, told), daemon=True).start()
    waiting = {(target.job, target.node): target for target, _ in orders}
    silent_until_s = dict.fromkeys(waiting, time.monotonic() + timeout_s)
    while silent_until_s and (left_s := max(silent_until_s.values()) - time.monotonic()) > 0:
        try:
            target, message, payload = told.get(timeout=left_s)
        except queue.Empty:
            break
        if isinstance(message, (DtrainError, wire.CaughtUp, wire.Done)):
            silent_until_s.pop((target.job, target.node))
        else:
            silent_until_s[target.job, target.node] = time.monotonic() + timeout_s
        yield target, message, payload
    for each in silent_until_s:
        yield waiting[each], NodeUnreachable(f"no answer within {timeout_s:g} s"), b""


def _ask_once(target: Target, order: wire.Message, told: queue.SimpleQueue[_Answer]) -> None:
    try:
        link = Link.open(target)
        try:
            link.tell(order)
            message: wire.Message = order
            while not isinstance(message, (wire.CaughtUp, wire.Done)):
                message, payload = link.answer()
                told.put((target, message, payload))
        finally:
            link.close()
    except DtrainError as error:
        told.put((target, error, b""))
