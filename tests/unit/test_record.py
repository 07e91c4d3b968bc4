from __future__ import annotations

from dataclasses import asdict, replace

from dtrain.node.wire import DialTarget, Open


def test_messages_are_values() -> None:
    one = DialTarget("n1", "10.0.0.1", 29500)
    assert one == DialTarget(node="n1", address="10.0.0.1", port=29500) != replace(one, port=29501)
    assert len({one, replace(one), replace(one, node="n2")}) == 2
    assert repr(one) == "DialTarget(node='n1', address='10.0.0.1', port=29500)"
    assert asdict(Open("auto", "j", "name", "n1")) == {"dir": "auto", "job": "j", "name": "name", "node": "n1", "outputs": ""}
    other: object = Open("auto", "j", "name", "n1")
    assert one != other
