"""What the command line says instead of the files: `--cluster`, `--nodes`, `--exclude`, `--set KEY=VALUE`, `-- ARG...`.

A setting is put into the document before that is checked, so a value from an option is typed, and answered, like one that
stands in the file.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from dtrain.errors import InOption, Problem, SpecError
from dtrain.spec.cluster import ClusterSpec, Instance
from dtrain.spec.document import MAX_DEPTH, Document, Value, ends_in_comment, parse_document
from dtrain.spec.environment import argument_mistakes
from dtrain.spec.hosts import MAX_HOSTS, expand
from dtrain.spec.mistake import Place, is_text, named, nearest, nearest_word, typed

_CLUSTER = "cluster"
_ENV = "env"
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Overrides:
    cluster: Path | None = None  # takes the place of the job's own
    nodes: str | None = None  # "a,b[1-3]": these alone
    exclude: str | None = None  # all but these
    settings: tuple[str, ...] = ()  # "trainer.epochs=3"
    arguments: tuple[str, ...] = ()  # appended to the job's args

    def as_typed(self) -> tuple[str, ...]:
        """Each as a shell would take it: what a job's record says of how it was launched."""
        single = (("--cluster", self.cluster), ("--nodes", self.nodes), ("--exclude", self.exclude))
        options = [f"{option} {shlex.quote(str(value))}" for option, value in single if value is not None]
        options += [f"--set {shlex.quote(setting)}" for setting in self.settings]
        return (*options, *([f"-- {shlex.join(self.arguments)}"] if self.arguments else []))

    def problems(self) -> list[Problem]:
        """What is wrong with them whatever the files say."""
        problems: list[Problem] = []
        for option, value in (("--cluster", self.cluster), ("--nodes", self.nodes), ("--exclude", self.exclude)):
            if value is not None and not is_text(str(value)):
                problems.append(Problem(InOption(option), f"{typed(str(value))} is not UTF-8 text", "write it as UTF-8"))
        if self.nodes is not None and self.exclude is not None:
            problems.append(Problem(InOption("--exclude"), "--nodes and --exclude stand here", "keep one of them"))
        for argument in self.arguments:
            if not is_text(argument):
                problems.append(Problem(InOption("-- ARG..."), f"the argument {typed(argument)} is not UTF-8 text", "write it as UTF-8"))
            problems += [Problem(InOption("-- ARG..."), each.message, each.hint) for each in argument_mistakes(argument, ())]
        return problems


@dataclass(frozen=True, slots=True)
class Setting:
    """One `--set`, read."""

    option: str  # where its mistakes are: "--set trainer.epochs"
    at: tuple[str, ...]
    value: Value
    plain: frozenset[Place]  # scalars without quotes, below the value

    @property
    def is_for_the_clusters_file(self) -> bool:
        """Where the cluster is a file of its own."""
        return len(self.at) > 1 and self.at[0] == _CLUSTER

    def below_cluster(self) -> Setting:
        """The same for a cluster file, whose keys have no `cluster` above them."""
        return replace(self, at=self.at[1:])


def read_settings(texts: Sequence[str]) -> tuple[list[Setting], list[Problem]]:
    settings: list[Setting] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            setting = _read_setting(text)
        except SpecError as error:
            problems += error.problems
            continue
        if any(setting.at == other.at for other in settings):
            problems.append(Problem(InOption(setting.option), "stands here a second time", "keep one of them"))
        settings.append(setting)
    return settings, problems


def _read_setting(text: str) -> Setting:
    """Raises SpecError, at the option, where the value is no good YAML."""
    key, equals, typed_value = text.partition("=")
    where = InOption(f"--set {key if key.isprintable() else typed(key)}")
    at = tuple(key.split(".", 1 if key.startswith(f"{_ENV}.") else -1))  # a variable's name is one key, whatever is in it
    if not is_text(text):
        raise SpecError([Problem(where, "is not UTF-8 text", "write it as UTF-8")])
    if brackets := re.fullmatch(r"(.*)\[(\d+)\](.*)", key):
        hint = f"write --set {brackets[1]}.{brackets[2]}{brackets[3]}=..."
        raise SpecError([Problem(where, "an item of a list is named by its number alone, counted from 0", hint)])
    if len(at) > MAX_DEPTH:
        raise SpecError(
            [Problem(InOption(f"--set {key[:40]}..."), f"names a place more than {MAX_DEPTH} levels deep", "no key is that deep")]
        )
    if not equals or not all(at):
        raise SpecError([Problem(where, "is not KEY=VALUE", "such as --set trainer.learning_rate=0.01")])
    if at[0] == _ENV and len(at) == 2 and typed_value[:1] not in ("", "'", '"'):
        return Setting(where.option, at, typed_value, frozenset({()}))  # as it is typed, be it a comment or a list in YAML
    x = next(key for key in map("x{}".format, count()) if key not in typed_value)  # no second line of the value has that key
    try:
        document = parse_document(f"{x}: {typed_value}".encode(), "the value", example="x: 1")
    except SpecError as error:
        raise SpecError([replace(problem, place=where) for problem in error.problems]) from None
    faults = [replace(problem, place=where) for _, problem in document.faults]
    if set(document.values) != {x}:
        faults.append(Problem(where, "the value goes on in a second line", "put quotes around the value"))
    elif ends_in_comment(f"{x}: {typed_value}"):
        faults.append(Problem(where, "what stands behind '#' is a comment", "put quotes around the value, within those of your shell"))
    if faults:
        raise SpecError(faults)
    return Setting(where.option, at, document.values[x], frozenset(place[1:] for place in document.plain))


def overridden(document: Document, settings: Sequence[Setting]) -> tuple[Document, list[Problem]]:
    """The document with the settings in it, one after the other, and what could not be set."""
    if not settings:
        return document, []
    values = copy.deepcopy(document.values)
    problems: list[Problem] = []
    for setting in settings:
        try:
            at = _set(values, setting)
        except _NoSuchPlace as error:
            message, hint = error.args
            problems.append(Problem(InOption(setting.option), message, hint))
            continue
        document = _with_option(document, setting, at)
    return replace(document, values=values), problems


class _NoSuchPlace(Exception):
    """(message, hint): the file has something else on the way to the value."""


def _set(values: dict[str, Value], setting: Setting) -> Place:
    """Put the value where it belongs, make the mappings on the way, and say where that was."""
    holder: Value = values
    at: list[str | int] = []
    for part, following in zip(setting.at, (*setting.at[1:], None), strict=True):
        key: str | int = part
        if isinstance(holder, list):
            key = _index(holder, part, at)
            if following is None and setting.value is None:
                hint = f"set that as a whole: {setting.option.removesuffix(f'.{part}')}=[...]"
                raise _NoSuchPlace(f"{named((*at, key))} cannot be taken out of its list", hint)
        elif not isinstance(holder, dict):
            found = "a number" if str(holder).isdecimal() else f"the text {typed(str(holder))}"
            raise _NoSuchPlace(f"{named(tuple(at))} is {found}, which has no '{part}' in it", f"set {'.'.join(map(str, at))} as a whole")
        at.append(key)
        if following is None:
            holder[key] = setting.value  # type: ignore[index]
            break
        inside: Value = holder.get(part) if isinstance(holder, dict) else holder[key]  # type: ignore[index]
        if inside is None and _INDEX.fullmatch(following):
            if isinstance(holder, dict) and (
                meant := nearest_word(part, [key for key, value in holder.items() if isinstance(value, list)])
            ):
                path = setting.option.removeprefix("--set ").split(".")[: -(len(setting.at) - len(at) + 1)]
                raise _NoSuchPlace(f"there is no {named(tuple(at))}", f"did you mean '{'.'.join([*path, meant])}'?")
            hint = f"set it as a whole: {setting.option.removesuffix(f'.{following}')}=[...]"
            raise _NoSuchPlace(f"no {named(tuple(at))} is there, to set an item of", hint)
        if inside is None:
            inside = {}
        elif isinstance(inside, str) and at[-2:-1] == ["instances"]:
            inside = {"host": inside}  # a host that stands by itself, whose other keys are now given
        holder[key] = inside  # type: ignore[index]
        holder = inside
    return tuple(at)


def _index(items: Sequence[Value], part: str, at: Sequence[str | int]) -> int:
    if _INDEX.fullmatch(part) and int(part) < len(items):
        return int(part)
    there = f"its items are 0 to {len(items) - 1}" if items else "it is empty"
    raise _NoSuchPlace(f"{named(tuple(at))} is a list and has no item {typed(part)}", f"{there}, as they stand in the file")


def _with_option(document: Document, setting: Setting, at: Place) -> Document:
    """The place belongs to the option now, and so does all below it and what had to be made above it."""
    options = {place: option for place, option in document.options.items() if place[: len(at)] != at}
    for length in range(1, len(at)):
        if at[:length] not in document.positions and at[:length] not in options:
            options[at[:length]] = setting.option
    options[at] = setting.option
    hosts = {(*at[:length], "host") for length in range(1, len(at)) if at[:length] in document.plain}
    plain = {place for place in document.plain if place[: len(at)] != at} | hosts | {(*at, *place) for place in setting.plain}
    positions = {place: position for place, position in document.positions.items() if place[: len(at)] != at}
    return replace(document, positions=positions, plain=frozenset(plain), options=options)


def selected(cluster: ClusterSpec, overrides: Overrides) -> tuple[ClusterSpec, list[Problem]]:
    """The cluster with the nodes that --nodes and --exclude leave, in the order of its file."""
    option, text = ("--exclude", overrides.exclude) if overrides.nodes is None else ("--nodes", overrides.nodes)
    if text is None:
        return cluster, []
    there = [instance.name for instance in cluster.instances]
    try:
        named_ones = _node_names(text)
    except ValueError as error:
        message, hint = error.args
        return cluster, [Problem(InOption(option), message, hint)]
    unknown = [name for name in named_ones if name not in there]
    if unknown:
        hint = _as_range(unknown[0]) or nearest(unknown[0], there) or f"its nodes: {_shortened(there)}"
        others = len(unknown) - 1
        also = f" (nor {others} other{'s' if others > 1 else ''} of these)" if others else ""
        return cluster, [Problem(InOption(option), f"the cluster has no node {typed(unknown[0])}{also}", hint)]
    left = _left(cluster.instances, set(named_ones), keep=option == "--nodes")
    if not left:
        return cluster, [Problem(InOption(option), "no node is left", "leave some of the nodes")]
    return replace(cluster, instances=left), []


def _as_range(name: str) -> str | None:
    """What to write for n1-n3, or n1-3."""
    ends = re.fullmatch(r"(.*?)(\d+)(\D*)-\1?(\d+)\3", name)
    return ends and f"a range is written {ends[1]}[{ends[2]}-{ends[4]}]{ends[3]}"


def _node_names(text: str) -> dict[str, None]:
    """Raises ValueError: (message, hint)."""
    names: dict[str, None] = {}
    num_named = 0
    for part in re.split(r",(?![^\[]*\])", text):  # no comma of a range
        if not part.strip():
            raise ValueError("a name is missing", "such as gpu1,gpu2 or gpu[1-4]")
        if len(names_of_part := part.split()) > 1 and "[" not in part:
            raise ValueError(f"{typed(part)} is no node's name", f"separate names by commas: {','.join(names_of_part)}")
        try:
            hosts = expand(part.strip())
        except ValueError as error:
            message, hint = error.args
            raise ValueError(f"{typed(part)} {message}", hint) from None
        names |= dict.fromkeys(hosts)
        num_named += len(hosts)
        if num_named > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} names stand here", "write each once")
    return names


def _left(instances: Sequence[Instance], named_ones: Collection[str], *, keep: bool) -> tuple[Instance, ...]:
    return tuple(instance for instance in instances if (instance.name in named_ones) is keep)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
