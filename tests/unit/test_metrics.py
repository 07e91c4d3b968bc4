"""Metrics of any worker, as they are taken in and shown."""

from __future__ import annotations

import json
import math

import pytest

from dtrain.metrics import read_metric
from dtrain.render.live import progress_line


def test_numbers_stay_as_they_are() -> None:
    metric = {"at": 1.5, "rank": 0, "iteration": 3, "loss": -0.25, "mine": 2**62, "evaluation": {"test accuracy": 1, "früh": 0.5}}
    assert read_metric(json.dumps(metric)) == metric
    diverged = read_metric(b'{"loss": NaN, "samples_per_s": 1e999}\n')
    assert math.isnan(diverged["loss"]) and diverged["samples_per_s"] == math.inf
    assert progress_line(diverged) == "loss nan  inf samples/s"


def test_an_evaluation_without_a_number_is_an_evaluation() -> None:
    assert read_metric('{"evaluation": {"note": "early stop", "accuracy": null, "ok": true, "a": 1}}') == {"evaluation": {"a": 1}}
    assert read_metric('{"evaluation": {"\\u001b[2J": 1, "\\ud800": 1, "a\\nb": 1}, "loss": 1}') == {"evaluation": {}, "loss": 1}
    for other in ("null", "[1]", "1", '"text"'):
        assert read_metric(f'{{"evaluation": {other}, "epoch": 2}}') == {"epoch": 2}


@pytest.mark.parametrize("value", ["null", "true", '"x"', "[1]", '{"a": 1}', "1" + "0" * 400, f"-{2**63}", "9" * 5000])
def test_what_is_no_number_is_left_out(value: str) -> None:
    names = ("iteration", "iterations", "epoch", "epochs", "loss", "samples_per_s", "bubble", "predicted_bubble")
    line = "{" + ", ".join(f'"{name}": {value}' for name in names) + "}"
    assert read_metric(line) == {} and progress_line(read_metric(line)) == ""


@pytest.mark.parametrize("line", ["", "{", "[" * 100_000, '{"a":' * 100_000, "[1]", "1", "null", b"\xff\xfe", b"\0" * 100])
def test_what_is_no_mapping_says_nothing(line: str | bytes) -> None:
    assert read_metric(line) == {}
