"""A document's values against a dataclass, by pydantic: unknown keys, missing ones, and text where a number is wanted."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dtrain.spec.document import Document, Value
from dtrain.spec.mistake import Mistake, Place, named, typed
from dtrain.spec.words import meant, not_yet, one_letter_off, synonym
from dtrain.trainers.zoo import MODELS

_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "dataclass_type": "a mapping",
}
_MOST_GUESSES = 100  # at what was meant by an unknown key; of so many none is read anyway
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def fit(shape: TypeAdapter[Any], document: Document, *, elsewhere: Mapping[str, str]) -> tuple[Any, list[Mistake]]:
    """The document in that shape, and what is wrong with it.

    With mistakes the object is made of what remains without them, so that its meaning can be checked too; None if too little
    remains. `elsewhere` has hints for keys that belong into another file.
    """
    values: dict[str, Value] = copy.deepcopy(document.values)
    for at in document.options:
        if document.emptied(*at) and at[-1] in keys_at(shape, at[:-1]):  # a variable is none of these: its value is taken from here
            _cut(values, at, again=False)
    fitted, errors = _validate(shape, values)
    if any([_convert(values, at, error["type"], document.plain) for at, error in errors]):
        fitted, errors = _validate(shape, values)
    mistakes = _mistakes(errors, shape, document, elsewhere)
    remaining = mistakes
    cut: set[Place] = set()
    while remaining:
        if not all([_cut(values, at, again=at in cut) for at in {mistake.at for mistake in remaining}]):
            return None, mistakes
        cut |= {mistake.at for mistake in remaining}
        fitted, errors = _validate(shape, values)
        remaining = _mistakes(errors, shape, document, elsewhere)
    return fitted, mistakes


def keys_at(shape: TypeAdapter[Any], at: Place) -> Sequence[str]:
    """The keys that may stand in the mapping at that place."""
    schema = _schema(shape)
    branches = [schema]
    for part in at:
        branches = [inner for branch in branches for inner in _inside(branch, part, schema.get("$defs", {}))]
    return [key for branch in branches for key in branch.get("properties", ())]


def _validate(shape: TypeAdapter[Any], values: dict[str, Value]) -> tuple[Any, list[tuple[Place, Any]]]:
    """As JSON and strict, because pydantic then turns no text into a number by rules of its own."""
    try:
        return shape.validate_json(json.dumps(values), strict=True), []
    except ValidationError as error:
        return None, [(_place(values, e["loc"]), e) for e in error.errors(include_url=False, include_input=False)]


def _place(values: Value, loc: Iterable[str | int]) -> Place:
    """The document's path in pydantic's location, which also names the branch taken at a union, and keys that are missing."""
    at: list[str | int] = []
    for part in loc:
        match values:
            case dict() if isinstance(part, str) and part in values:
                values = values[part]
            case list() if isinstance(part, int) and part < len(values):
                values = values[part]
            case _:
                continue
        at.append(part)
    return tuple(at)


def _convert(values: Value, at: Place, error_type: str, plain: frozenset[Place]) -> bool:
    """Pydantic wants something other than text at that place: make it of the text, where the text is plainly that."""
    if not at or at not in plain:
        return False
    holder = _value_at(values, at[:-1])
    text = _value_at(values, at)
    if not isinstance(text, str):
        return False
    converted: Value = None
    if error_type == "int_type" and _WHOLE.fullmatch(text):
        converted = int(text)
    elif error_type == "float_type" and _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        converted = float(text)
    elif error_type == "bool_type" and text in ("true", "false"):
        converted = text == "true"
    else:
        return False
    holder[at[-1]] = converted  # type: ignore[index]
    return True


def _value_at(values: Value, at: Place) -> Value:
    for part in at:
        values = values[part]  # type: ignore[index]
    return values


def _cut(values: Value, at: Place, *, again: bool) -> bool:
    """Take out a value, or the mapping that lacks it. In a list an empty text stands in its place, for the others are to stay where
    they are; where that is no good either, the list goes as a whole.
    """
    while again and at and isinstance(at[-1], int):
        at = at[:-1]
    if not at:
        return False
    try:
        holder = _value_at(values, at[:-1])
    except (KeyError, IndexError, TypeError):  # cut with one of its holders
        return True
    if isinstance(holder, dict):
        if str(at[-1]) not in holder:
            return _cut(values, at[:-1], again=False)
        holder.pop(str(at[-1]))
    elif isinstance(holder, list):
        holder[int(at[-1])] = ""
    return True


def _mistakes(
    errors: Sequence[tuple[Place, Any]], shape: TypeAdapter[Any], document: Document, elsewhere: Mapping[str, str]
) -> list[Mistake]:
    mistakes: list[Mistake] = []
    wanted: dict[Place, list[str]] = {}
    for at, error in errors:
        if error["type"] in _UNKNOWN:
            mistakes.append(_unknown_key(at, shape, elsewhere if len(at) == 1 else {}, guess=len(mistakes) < _MOST_GUESSES))
        elif error["type"] == "missing":
            owner = f"{named(at)} " if at else ""
            key = str(error["loc"][-1])
            mistakes.append(Mistake(document.lacking(at, [key]), f"{owner}lacks the key '{key}'", "add it", of_key=True))
        elif error["type"] == "literal_error":
            wanted.setdefault(at, []).append(error["ctx"]["expected"])
        else:
            wanted.setdefault(at, []).append(_WANTED.get(error["type"], error["msg"]))
    # A union reports every branch. What is wrong inside of one branch says more than that the others want another type.
    deepest = [at if error["type"] == "missing" else at[:-1] for at, error in errors]
    inner = {place[:length] for place in deepest for length in range(len(place) + 1)}
    for at, wants in wanted.items():
        if at not in inner:
            mistakes.append(_wrong_type(at, list(dict.fromkeys(wants)), document))
    return mistakes


def _unknown_key(at: Place, shape: TypeAdapter[Any], elsewhere: Mapping[str, str], *, guess: bool) -> Mistake:
    known = keys_at(shape, at[:-1])
    key = str(at[-1])
    if instead := not_yet(at):
        return Mistake(at, f"{key} is not supported yet", instead, of_key=True)
    hint = (elsewhere.get(key) or _likely(shape, at, known)) if guess else None
    return Mistake(at, f"unknown key {typed(key)}", hint or f"known here: {', '.join(known)}", of_key=True)


def _likely(shape: TypeAdapter[Any], at: Place, known: Sequence[str]) -> str | None:
    """For a key that is misspelt, or stands at the wrong level of its file, or both."""
    key, here = str(at[-1]), at[:-1]
    homes = _homes(shape)
    elsewhere = synonym(key, homes) or key if key in homes else None  # `gpus` is also a key of an instance
    found = synonym(key, known) or elsewhere or one_letter_off(key, known) or meant(key, (*known, *homes))
    if found is None or found in known:
        return None if found is None else f"did you mean '{found}'?"
    level = tuple(part for part in here if isinstance(part, str))
    inner = [home[len(level) :] for home in homes[found] if home[: len(level)] == level]
    place = (*here, *inner[0]) if inner else homes[found][0]
    home = (
        f"it is a key of `{named(place)}`: write it there, further in"
        if place
        else "it stands at the top level: write it without indentation"
    )
    return home if found == key else f"did you mean '{found}'? {home}"


def _wrong_type(at: Place, wants: Sequence[str], document: Document) -> Mistake:
    found = _value_at(document.values, at)
    said = "but nothing is there" if found is None else f"not {_described(found)}"
    wanted = wants[0] if len(wants) == 1 else f"{', '.join(wants[:-1])} or {wants[-1]}"
    form = found if isinstance(found, str) else _described(found)
    if instead := not_yet((*at, form)):
        return Mistake(at, f"{named(at)}: {form} is not supported yet", instead)
    if isinstance(found, str) and at in document.plain and "a whole number" in wants and re.fullmatch(r"[-+]?[1-9][0-9]{18,}", found):
        return Mistake(at, f"{named(at)} is a number of {len(found.lstrip('-+'))} digits", "a whole number has at most 18 digits here")
    return Mistake(at, f"{named(at)} must be {wanted}, {said}", _hint_for(at, found, wants, at in document.plain))


def _described(value: Value) -> str:
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return typed(str(value))


def _hint_for(at: Place, found: Value, wants: Sequence[str], is_plain: bool) -> str:
    if found is None:
        return 'write "" for an empty text' if wants == ["text"] and isinstance(at[-1], int) else "give it a value, or remove the key"
    if at == ("cluster",) and isinstance(found, list):
        return f"write cluster: {{instances: [{', '.join(map(_in_flow, found[:3]))}{', ...' if len(found) > 3 else ''}]}}"
    if isinstance(found, dict | list):
        if isinstance(found, dict) and "a list" in wants and "text" not in wants:
            return _EXAMPLES["a list"]
        if rewritten := _as_text(at, found):
            return rewritten
        return 'put quotes around a text that starts with "[" or "{"' if "text" in wants else _example(wants)
    text = str(found)
    if not is_plain and any(fits(text) for want, fits in _FITS.items() if want in wants):
        return "remove the quotes, or the '|' or '>' before it"
    if "true or false" in wants and text.lower() in _SWITCHES:
        return f"write {_SWITCHES[text.lower()]}"
    if {"a whole number", "a number"} & {*wants} and (decimal := re.fullmatch(r"0+([1-9][0-9]{0,17})", text)):
        return f"write {decimal[1]}"
    if "a whole number" in wants and _NUMBER.fullmatch(text) and abs(float(text)) < 1e15 and float(text).is_integer():
        return f"write {float(text):.0f}"
    words = [word for want in wants for word in re.findall(r"'([^']*)'", want)]
    if likely := meant(text, words):
        return f"did you mean '{likely}'?"
    if "'auto'" in wants and (span := re.fullmatch(r"([0-9]{1,2})-([0-9]{1,2})", text)) and int(span[1]) <= int(span[2]):
        return f"write {list(range(int(span[1]), int(span[2]) + 1))}"
    if "a list" in wants and ("'auto'" not in wants or re.fullmatch(r"[0-9, ]+", text)):
        listed = _listed(text)
        also = ", or a number in digits, such as 2" if listed and "a whole number" in wants and "'auto'" not in wants else ""
        return f"write {listed}{also}" if listed else "write one item a line, each after '- '"
    if "a mapping" in wants and (keys := _as_mapping(str(at[-1]), text)):
        return f"write `{at[-1]}: {{{keys}}}`"
    if "a mapping" in wants and (pair := re.fullmatch(r"([A-Za-z_]\w*)[:=](\S*)", text)):
        return f"write '{pair[1]}: {pair[2]}' below it, further in"
    return _example(wants)


def _as_text(at: Place, found: Value) -> str | None:
    """What stands as a list or a mapping where a text was meant."""
    match at, found:
        case ("script" | "module" as key,), [str() as first, *rest]:
            return f"write `{key}: {first}`" + (" and what follows it under args" if rest else "")
        case ("args",), dict() if all(isinstance(value, str | None) for value in found.values()):
            words = [
                word
                for name, value in found.items()
                for word in (name if name.startswith("-") else f"--{name}", value)
                if isinstance(word, str)
            ]
            return f"write `args: {shlex.join(words)}`, or a list of them"
        case _:
            return None


def _as_mapping(key: str, text: str) -> str | None:
    """The keys that a text was meant to give where a mapping is wanted."""
    match key:
        case "batch" | "pipeline" if _WHOLE.fullmatch(text):
            return f"{'global' if key == 'batch' else 'stages'}: {text}"
        case "trainer":
            model = text if text in MODELS else "digits_cnn"
            return f"model: {model}, data: {MODELS[model].data}, epochs: 3"
        case "ssh" if re.fullmatch(r"[\w.-]+", text):
            return f"user: {text}"
        case _:
            return None


def _in_flow(value: Value) -> str:
    """As it stands within [...]."""
    match value:
        case dict():
            return f"{{{', '.join(f'{_in_flow(key)}: {_in_flow(inner)}' for key, inner in value.items())}}}"
        case list():
            return f"[{', '.join(map(_in_flow, value))}]"
        case _:
            text = "" if value is None else str(value)
            return text if re.fullmatch(r"[\w./][\w./@-]*", text) else json.dumps(text, ensure_ascii=False)


def _listed(text: str) -> str | None:
    """Words, names or ranges of them, as the list that was meant."""
    items = re.split(r"[,\s]+(?![^\[]*\])", text.strip(", "))  # at no comma of a range
    if not all(re.fullmatch(r"[\w.@-]+(\[[\d,-]+\][\w.-]*)*", item) for item in items):
        return None
    return f"[{', '.join(map(_in_flow, items))}]"


def _example(wants: Sequence[str]) -> str:
    examples = [_EXAMPLES[want] for want in wants if want in _EXAMPLES]
    return examples[0] if examples else "write one of these, or leave the key out"


_FITS: Mapping[str, Callable[[str], object]] = {
    "a whole number": _WHOLE.fullmatch,
    "a number": _NUMBER.fullmatch,
    "true or false": ("true", "false").__contains__,
}
_EXAMPLES = {
    "a whole number": "digits alone, such as 8",
    "a number": "such as 30, 0.5 or 1e-3",
    "true or false": "write true or false",
    "a mapping": "write 'key: value' lines below it, further in",
    "a list": "write one item a line, each after '- '",
}
_SWITCHES = {
    **dict.fromkeys(("true", "yes", "y", "on", "1"), "true"),
    **dict.fromkeys(("false", "no", "n", "off", "0"), "false"),
}


@lru_cache
def _schema(shape: TypeAdapter[Any]) -> dict[str, Any]:
    return shape.json_schema()


@lru_cache
def _homes(shape: TypeAdapter[Any]) -> dict[str, list[Place]]:
    """The mappings that each key belongs to, the outermost first."""
    schema = _schema(shape)
    definitions = schema.get("$defs", {})
    homes: dict[str, list[Place]] = {}
    waiting: list[tuple[Place, Any]] = [((), schema)]
    for at, found in waiting:
        for key, inner in found.get("properties", {}).items():
            homes.setdefault(key, []).append(at)
            for branch in _branches(inner, definitions):
                inside = _branches(branch["items"], definitions) if "items" in branch else [branch]
                waiting += [((*at, key), each) for each in inside]
    return homes


def _inside(schema: Mapping[str, Any], part: str | int, definitions: Mapping[str, Any]) -> list[Any]:
    """What a JSON Schema says of one key or item, every branch resolved."""
    found = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
    return _branches(found, definitions) if found is not None else []


def _branches(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Any]:
    if "$ref" in schema:
        return [definitions[schema["$ref"].rpartition("/")[2]]]
    return [branch for inner in schema["anyOf"] for branch in _branches(inner, definitions)] if "anyOf" in schema else [schema]
