"""The JSON Schema that editors get: it takes what dtrain takes, and says what each key means."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from dtrain.cli.main import commands
from dtrain.findings import KINDS
from dtrain.spec.json_schema import json_schema
from tests.unit.test_dump import FULL

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json_schema()
README = (ROOT / "README.md").read_text()
FILES = {
    **{path.name: path.read_text() for path in sorted((ROOT / "cluster-examples").glob("*.yaml"))},
    **{f"README: {text[:20].strip()}": text for text in re.findall(r"```yaml\n(.*?)```", README, re.S) if yaml.safe_load(text)},
    "every key": FULL,
}


def mistakes(text: str) -> list[str]:
    values = yaml.safe_load(text)
    return [error.json_path for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(values)]


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    result = CliRunner().invoke(commands, ["schema"])
    assert (result.exit_code, json.loads(result.output)) == (0, SCHEMA)


@pytest.mark.parametrize("name", FILES)
def test_what_is_shown_as_an_example_is_right(name: str) -> None:
    assert mistakes(FILES[name]) == []


@pytest.mark.parametrize(
    "text",
    [
        "script: train.py\nadress: x",
        "name: nothing to run",
        "script: a.py\nmodule: b",
        "script: a.py\nmodule:",
        "script: a.py\ncluster:",
        "script: [a.py]",
        "script: a.py\nlauncher: slurm",
        "script: a.py\nlearning_rate: 0.1",
        "script: a.py\ncluster: {instances: 2, gpus: 3}",
        "trainer: {model: gpt, data: text}",
        "trainer: {model: gpt, data: text, epochs: 1, iterations: 2}",
        "trainer: {model: gpt, data: text, epochs: 1, batch: {micro_batches: 2}}",
        "trainer: {model: gpt, data: text, epochs: two}",
        "trainer: {model: gpt, data: text, epochs: 0}",
        "trainer: {model: gpt, data: text, epochs: }",
        "trainer: {model: gpt, data: text, epochs: 1, learning_rate: 0.0}",
        "trainer: {model: gpt, data: text, epochs: 1, seed: -1}",
        "script: a.py\ngrace: -1",
        "instances: [a]\nscript: a.py",
        "instances: {a: b}",
        "instances: [{gpus: 2}]",
        "instances: [a]\nssh: {port: a}",
        "instances: [a]\ndevice: tpu",
    ],
)
def test_an_editor_marks_what_dtrain_refuses(text: str) -> None:
    assert mistakes(text)


def test_a_key_without_a_value_is_as_good_as_none() -> None:
    assert mistakes("trainer: {model: gpt, data: text, epochs: 3, iterations: , batch: {global: , per_replica: 2}}") == []


def keys() -> list[tuple[str, dict[str, Any]]]:
    return [(f"{name}.{key}", value) for name, each in SCHEMA["$defs"].items() for key, value in each["properties"].items()]


def test_every_key_says_what_it_means() -> None:
    assert len(keys()) > 40
    assert [name for name, schema in keys() if not schema.get("description", "").endswith(".")] == []


def test_the_page_of_findings_tells_each_of_them() -> None:
    made = subprocess.run((sys.executable, ROOT / "tools/preflight_docs.py"), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert made == (ROOT / "docs/preflight.md").read_text(), "run `make docs`"
    assert [name for name, kind in KINDS.items() if f"| `{name}`" not in made or kind.cure not in made] == []


def test_the_page_of_keys_is_made_from_that() -> None:
    made = subprocess.run((sys.executable, ROOT / "tools/job_file_docs.py"), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert made == (ROOT / "docs/job-file.md").read_text(), "run `make docs`"
    for name, schema in keys():
        assert f"| `{name.partition('.')[2]}` |" in made and schema["description"] in made
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)", made, re.MULTILINE)}
    assert set(re.findall(r"\(#(.*?)\)", made)) <= anchors
