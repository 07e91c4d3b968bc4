from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from dtrain.node import record
from dtrain.node.wire import Dial, DialTarget, Done, Open, Ping, from_json, to_json

ONE = DialTarget("n1", "10.0.0.1", 29500)


def test_messages_are_values() -> None:
    assert DialTarget(node="n1", address="10.0.0.1", port=29500) == ONE != record.replace(ONE, port=29501)
    assert len({ONE, record.replace(ONE), record.replace(ONE, node="n2")}) == 2
    assert repr(ONE) == "DialTarget(node='n1', address='10.0.0.1', port=29500)"
    other: object = Open("auto", "j", "name", "n1")
    same_fields: object = Done()
    assert other != ONE and same_fields != Ping()
    with pytest.raises(AttributeError, match="frozen"):
        ONE.node = "n2"  # type: ignore[misc]


def test_dataclasses_knows_them() -> None:
    assert dataclasses.replace(ONE, port=1) == DialTarget("n1", "10.0.0.1", 1)
    assert dataclasses.asdict(Dial("t", (ONE,))) == {"token": "t", "targets": ({"node": "n1", "address": "10.0.0.1", "port": 29500},)}
    assert [field.name for field in dataclasses.fields(Open)] == ["dir", "job", "name", "node", "outputs"]
    assert not dataclasses.fields(Done)


@pytest.mark.parametrize(
    ("values", "named", "why"),
    [
        (("n1", "10.0.0.1"), {}, "DialTarget lacks 'port'"),
        (("n1", "10.0.0.1", 1, 2), {}, "DialTarget takes node, address, port, each once"),
        (("n1", "10.0.0.1", 1), {"node": "n2"}, "DialTarget takes node"),
        (("n1", "10.0.0.1", 1), {"host": "n2"}, "DialTarget takes node"),
    ],
)
def test_what_makes_no_message_is_refused(values: tuple[Any, ...], named: dict[str, Any], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        DialTarget(*values, **named)


def test_a_message_that_a_newer_side_has_more_to_say_in_is_read() -> None:
    assert from_json(to_json(ONE)[:-1] + ', "colour": "blue"}') == ONE


def test_a_session_defines_them_without_dataclasses() -> None:
    code = "import sys; from dtrain.node import session; sys.exit('dataclasses' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", code)).returncode == 0
