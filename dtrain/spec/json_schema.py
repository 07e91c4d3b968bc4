"""The JSON Schema of job and cluster files, for editors: completion, and mistakes while one types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from dtrain.spec.cluster import ClusterFile
from dtrain.spec.job import RUN_KEYS, JobFile

_ONE_OF = {"JobFile": RUN_KEYS, "TrainerConfig": ("epochs", "iterations")}
_ANY_OF = {"BatchConfig": ("global", "per_replica")}
_NEVER_EMPTY = ("cluster", *RUN_KEYS)  # keys of a job file; any other optional one may stand there with nothing behind it


def json_schema() -> dict[str, Any]:
    """One for both: a file with `instances` is a cluster file."""
    job, cluster = (TypeAdapter(file).json_schema() for file in (JobFile, ClusterFile))
    found = {**job.pop("$defs"), **cluster.pop("$defs"), "JobFile": job, "ClusterFile": cluster}
    definitions = {name: _for_an_editor(definition) for name, definition in sorted(found.items())}
    for key in _NEVER_EMPTY:
        definitions["JobFile"]["properties"][key]["anyOf"].remove({"type": "null"})
    for kind, table in (("oneOf", _ONE_OF), ("anyOf", _ANY_OF)):
        for name, keys in table.items():
            definitions[name][kind] = [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job file or a cluster file of dtrain",
        "type": "object",
        "if": {"required": ["instances"]},
        "then": {"$ref": "#/$defs/ClusterFile"},
        "else": {"$ref": "#/$defs/JobFile"},
        "$defs": definitions,
    }


def _for_an_editor(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without pydantic's titles. And an editor sees a number in `08`, which dtrain takes as the text that was typed."""
    kept = {key: value for key, value in schema.items() if key != "title" and not (key == "default" and value is None)}
    if kept.get("type") == "string" and not {"enum", "const"} & kept.keys():
        kept["type"] = ["string", "number", "boolean"]
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = _for_an_editor(kept[key])
    if "anyOf" in kept:
        kept["anyOf"] = [_for_an_editor(branch) for branch in kept["anyOf"]]
    if "properties" in kept:
        kept["properties"] = {key: _for_an_editor(value) for key, value in kept["properties"].items()}
    return kept
