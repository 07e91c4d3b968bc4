"""Print docs/job-file.md, made from what dtrain says of each key: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.spec.json_schema import json_schema

_HEAD = """\
# The keys of job and cluster files

Made by `make docs` from the descriptions in `dtrain/spec` and `dtrain/trainers/config.py`, which `dtrain schema` prints too.
A path is relative to the file that names it. A text is taken exactly as it is typed: `1e-4`, `08` and `on` stay what they are.
Only a ` #` begins a comment, as in all YAML: a text that holds one stands in quotes.
"""
_TYPES = {"integer": "whole number", "number": "number", "boolean": "true or false", "object": "mapping"}


def main() -> None:
    definitions = json_schema()["$defs"]
    print(_HEAD)
    titles = {"JobFile": "job.yaml", "ClusterFile": "cluster.yaml"}
    for name in (names := [*titles]):  # which grows: what is below comes later
        for key, schema in definitions[name]["properties"].items():
            for inner in _refs(schema):
                if inner not in titles:
                    titles[inner] = f"{titles[name]}: {key}" if titles[name].endswith(".yaml") else f"{titles[name]}.{key}"
                    names.append(inner)
    print("\n\n".join("\n".join(_section(titles[name], definitions[name], titles)) for name in titles))


def _refs(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from _refs(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _refs(value)


def _section(title: str, definition: Mapping[str, Any], titles: Mapping[str, str]) -> Iterator[str]:
    yield f"## {title}\n"
    for kind, words in (("oneOf", "Exactly one of"), ("anyOf", "At least one of")):
        if kind in definition:
            keys = [f"`{branch['required'][0]}`" for branch in definition[kind]]
            yield f"{words} {', '.join(keys)}.\n"
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for key, schema in definition["properties"].items():
        default = "required" if key in definition.get("required", ()) else _default(schema)
        yield f"| `{key}` | {_value(schema, titles)} | {default} | {schema['description']} |"


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return "" if default is None else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _value(schema: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(_value(branch, titles) for branch in schema["anyOf"] if branch.get("type") != "null"))
    if "$ref" in schema:
        title = titles[schema["$ref"].rpartition("/")[2]]
        anchor = "".join(each for each in title.lower().replace(" ", "-") if each.isalnum() or each in "-_")
        return f"[mapping](#{anchor})"
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        items = _value(schema["items"], titles)
        return f"list of {items}s" if items in _TYPES.values() else f"list of {items.replace(', or ', ' or ')}"
    if isinstance(schema.get("type"), list):
        return "text"
    return _TYPES[schema["type"]]


if __name__ == "__main__":
    main()
