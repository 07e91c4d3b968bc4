"""A YAML file as plain values, with the position of every one of them and of every key.

A scalar is the text that was typed: what YAML 1.1 makes of `on`, `08`, `12:30` or `1e-3` is for nobody's good. Only a place
with nothing typed is None. shape.py turns text into a number or a bool where one is wanted.
"""

from __future__ import annotations

import copy
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from dtrain.errors import InFile, InOption, Problem, SpecError
from dtrain.spec.mistake import Mistake, Place, named, nearest_file, typed

Value: TypeAlias = "dict[str, Value] | list[Value] | str | int | float | bool | None"
Position: TypeAlias = tuple[int, int]  # line and column, from 1
Positions: TypeAlias = tuple[Position, Position]  # of the key and of the value
Order: TypeAlias = tuple[int, int, int]  # in which mistakes are told

_START: Position = (1, 1)
_MAX_BYTES = 4 * 2**20  # a stored job has the variables in it that it took from its environment, of which Linux gives no process more
_MAX_READ_TWICE = 256 * 1024  # characters
MAX_DEPTH = 20
_MAX_SHOWN = 60  # characters of a value in a hint
_MAX_VALUES = 16_000  # with aliases written out: nine lines of YAML can stand for a billion values
_MAX_NODES = 2 * _MAX_VALUES  # a key for each value


@dataclass(frozen=True, slots=True)
class Document:
    """The mapping in a file. An item of a list has no key: both of its positions are its own."""

    shown: str  # the path as the user gave it
    values: dict[str, Value]
    positions: Mapping[Place, Positions]
    plain: frozenset[Place]  # scalars without quotes
    options: Mapping[Place, str] = field(default_factory=dict)  # what an option of the command line set, in the order typed
    faults: tuple[tuple[Position, Problem], ...] = ()  # what is wrong with the YAML itself, though it could be read

    def given(self, *at: str | int) -> bool:
        """Whether something is typed at that place."""
        value: Value = self.values
        for part in at:
            match value:
                case dict() if part in value:
                    value = value[str(part)]
                case list() if isinstance(part, int) and part < len(value):
                    value = value[part]
                case _:
                    return False
        return value is not None

    def emptied(self, *at: str | int) -> bool:
        """Whether an option took away what stood there: `--set script=`."""
        return at in self.options and not self.given(*at)

    def lacking(self, at: Place, keys: Iterable[str]) -> Place:
        """Where it is told that none of these keys stands there: at the option that took one away, or else at what lacks them."""
        return next(((*at, key) for key in keys if self.emptied(*at, key)), at)

    def last(self, places: Iterable[Place]) -> Place:
        """The one that is told last: that of an option, or else of the latest line."""
        return max(places, key=lambda at: self._where(at)[0])

    def places(self) -> dict[str, InFile | InOption]:
        """Where each value stands, by its path as a person writes it."""
        return {named(at): self._where(at)[1] for at in (*self.positions, *self.options)}

    def problems(self, mistakes: Iterable[Mistake]) -> list[Problem]:
        """The document's own faults and these mistakes, in the order of the file; those of options behind them."""
        faults = [((0, *position), problem) for position, problem in self.faults]
        placed = []
        for mistake in mistakes:
            order, place = self._where(mistake.at, of_key=mistake.of_key)
            placed.append((order, Problem(place, mistake.message, mistake.hint)))
        return [problem for _, problem in sorted([*faults, *placed], key=lambda pair: pair[0])]

    def _where(self, at: Place, *, of_key: bool = False) -> tuple[Order, InFile | InOption]:
        while at and at not in self.positions and at not in self.options:
            at, of_key = at[:-1], True  # of the mapping that lacks it
        if at in self.options:
            return (1, list(self.options).index(at), 0), InOption(self.options[at])
        of_the_key, of_the_value = self.positions.get(at, (_START, _START))
        line, column = of_the_key if of_key else of_the_value
        return (0, line, column), InFile(self.shown, line, column)


def read_document(path: Path, *, example: str) -> Document:
    """Raises SpecError where no mapping can be read. `example` is the shortest useful file, for the hint."""
    return parse_document(_read_bytes(path, example), str(path), example=example)


def parse_document(data: bytes, shown: str, *, example: str) -> Document:
    text = _decoded(data, shown)
    root = _composed(text, shown)
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.style and not root.value):  # a line `---` alone
        raise _one(InFile(shown, 1, 1), "the file is empty", f"the shortest useful one is `{example}`")
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else f"the text {typed(root.value)}"
        hint = (_key_meant(root.value) if isinstance(root, yaml.ScalarNode) else None) or f"write keys and values, such as `{example}`"
        if shown.endswith(".py"):
            hint = f"this is a Python script: write `script: {os.path.basename(shown)}` into a file job.yaml"
        raise _one(_at(shown, root.start_mark), f"the file holds {found}, not keys", hint)
    reading = _Reading(shown)
    values = reading.mapping(root, ())
    return Document(shown, values, reading.positions, frozenset(reading.plain), faults=tuple(reading.faults))


def ends_in_comment(text: str) -> bool:
    """Whether something stands behind the value of the last key. The text is good YAML, and a mapping."""
    root = _composed(text, "")
    assert isinstance(root, yaml.MappingNode)
    return bool(text[root.value[-1][1].end_mark.index :].strip())


def absolute(path: Path) -> Path:
    """Without `..`, which pathlib keeps because a link may stand in front of it."""
    try:
        whole = path.absolute()
    except FileNotFoundError:
        raise _one(InFile(str(path)), "the current folder was removed", "go into one that is there") from None
    return Path(os.path.realpath(whole.parent)) / whole.name if ".." in whole.parts else whole


def _one(where: InFile, message: str, hint: str | None) -> SpecError:
    return SpecError([Problem(where, message, hint)])


def _at(shown: str, mark: Any) -> InFile:
    return InFile(shown, mark.line + 1, mark.column + 1)


def _read_bytes(path: Path, example: str) -> bytes:
    shown = str(path)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_BYTES + 1) if is_file else b""
    except FileNotFoundError:
        raise _one(InFile(shown), "there is no such file", nearest_file(shown, shown) or f"the shortest one is a line: {example}") from None
    except IsADirectoryError:
        inside = path / "job.yaml"
        hint = f"did you mean '{inside}'?" if os.path.isfile(inside) else "name a file in it"
        raise _one(InFile(shown), "is a folder, not a file", hint) from None
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else None
        raise _one(InFile(typed(shown)[1:-1]), f"cannot be read: {cause or error}", "name a file that you can read") from None
    if not is_file:
        raise _one(InFile(shown), "is no ordinary file but a pipe, a socket or a device", "name a file on a disk")
    if len(data) > _MAX_BYTES:
        raise _one(InFile(shown), f"is larger than {_MAX_BYTES // 2**20} MiB", "is this the file that you meant?")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would be waited for, for ever


def _decoded(data: bytes, shown: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        where = _behind(before, shown)
        raise _one(where, f"byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8") from None


def _behind(before: str, shown: str) -> InFile:
    lines = re.split("\r\n?|\n", before)
    return InFile(shown, len(lines), len(lines[-1]) + 1)


def _composed(text: str, shown: str) -> yaml.Node | None:
    loader: _Loader | None = None
    try:
        try:
            return _Fast(text, shown).get_single_node()
        except (yaml.YAMLError, ValueError, OverflowError):
            if len(text) > _MAX_READ_TWICE:
                raise
        loader = _Loader(text, shown)  # says better what is wrong
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        where = _behind(text[: error.position], shown)
        raise _one(
            where, f"the character U+{error.character:04X} cannot stand in YAML", 'remove it, or write it as an escape in "..."'
        ) from None
    except yaml.MarkedYAMLError as error:
        position, message, hint = _said_of_yaml(error, text)
        raise _one(InFile(shown, *position), message, hint) from None
    except (ValueError, OverflowError, TypeError) as error:  # PyYAML lets these through: "\UFFFFFFFF", %YAML 1.<5000 digits>
        where = InFile(shown, 1, 1) if loader is None else _at(shown, loader)
        raise _one(where, f"this cannot be read as YAML: {error}", "write the text in single quotes") from None


class _Counted(Composer):
    """Builds the tree by recursion, so depth counts while it is built, and so do values."""

    _shown: str
    _depth = 0
    _num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[attr-defined]  # of the parser beside it
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise self._no(event, f"more than {_MAX_NODES} keys and values", "is this the file that you meant?")
        if getattr(event, "tag", None) is not None:
            hint = "remove it, or quote a text that starts with '!'"
            raise self._no(event, f"YAML tags such as {typed(str(event.tag))} are not read", hint)
        if isinstance(event, yaml.AliasEvent):
            node = copy.copy(super().compose_node(parent, index))
            assert node is not None
            node.start_mark, node.end_mark = event.start_mark, event.end_mark  # else a mistake would be told at what it stands for
            return node
        if not isinstance(event, yaml.CollectionStartEvent):
            return super().compose_node(parent, index)
        if self._depth == MAX_DEPTH:
            raise self._no(event, f"nested more than {MAX_DEPTH} levels deep", "no key needs that")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _no(self, event: yaml.Event, message: str, hint: str) -> SpecError:
        return _one(_at(self._shown, event.start_mark), message, hint)


class _Loader(_Counted, yaml.SafeLoader):
    def __init__(self, text: str, shown: str) -> None:
        yaml.SafeLoader.__init__(self, text)
        self._shown = shown


_Fast: type[_Loader | _FastLoader] = _Loader
if yaml.__with_libyaml__:  # which reads ten times as fast
    from yaml._yaml import CParser

    class _FastLoader(_Counted, CParser, SafeConstructor, Resolver):
        def __init__(self, text: str, shown: str) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)
            self._shown = shown

    _Fast = _FastLoader


def _said_of_yaml(error: yaml.MarkedYAMLError, text: str) -> tuple[Position, str, str | None]:
    """Where the mistake is, which may be lines above the place where YAML gives up; the message and the hint."""
    lines = text.splitlines()
    slip = _slip_before(error, lines) or _comment_in_brackets(error, lines)
    if slip is not None:
        return slip
    mark = error.problem_mark or error.context_mark
    if error.context == "while scanning a quoted scalar" and (error.problem or "").startswith("found unexpected"):
        return _of(error.context_mark), "not YAML: the quote that begins here is not closed", "close the quotes"
    problem = error.problem or ""
    if "could not find expected ':'" in problem:  # told where the next line begins, which may be none
        return _of(error.context_mark), "not YAML: this is no 'key: value'", "put ': ' after the key"
    if problem.startswith("expected ',' or") and "<stream end>" in problem:
        return _of(error.context_mark), "not YAML: the bracket that opens here is not closed", "close the bracket"
    if "but found '<scalar>'" in problem and mark is not None:
        return (_of(mark), *_said_of_text(_line_of(mark, lines)[: mark.column].rstrip()))
    return (_of(mark), *_said_by_yaml(error, _line_of(mark, lines)))


def _said_of_text(before: str) -> tuple[str, str]:
    """Of a text in a place for none, by what stands before it in its line."""
    if before.endswith(("'", '"')):
        return "not YAML: a text goes on behind its quotes", "put all of it into one pair of quotes"
    if before:
        return "not YAML: a text stands behind a value", "put quotes around all of it"
    return "not YAML: this line belongs to none above it", "check the indentation here and in the line above"


def _said_by_yaml(error: yaml.MarkedYAMLError, line: str) -> tuple[str, str | None]:
    problem = error.problem or "not YAML"
    since = f" ({error.context}, which began in line {error.context_mark.line + 1})" if error.context_mark and error.context else ""
    if r"character '\t'" in problem:
        return "a tab stands where YAML wants spaces", "indent with spaces"
    if "cannot start any token" in problem:
        return f"not YAML: {problem}", "put quotes around the text"
    if problem.startswith("expected ',' or") and re.search(r"[\w.-]\[[\d,-]+\]?", line):
        return f"not YAML: {problem}", 'a range in a [...] list wants quotes: ["trn[01-16].lab"]'
    if "undefined alias" in problem or error.context == "while scanning an alias":
        return f"not YAML: {problem}", "put quotes around a text that starts with '*'"
    if "but found another document" in problem:
        return "a second document begins here", "keep one job or cluster a file, without a line '---' between"
    if "mapping values are not allowed" in problem:
        return f"not YAML: {problem}", "put a space after the key's ':' and quotes around a text that holds ': '; check the indentation"
    return f"not YAML: {problem}{since}", "check the indentation and the brackets here and in the line above"


def _slip_before(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> tuple[Position, str, str | None] | None:
    """A line `args:--lr 1` or `script = train.py`: YAML takes it for a text, and gives up at what follows."""
    number = -1
    if error.context_mark is not None and "could not find expected ':'" in (error.problem or ""):
        number = error.context_mark.line
    elif error.problem_mark is not None and "mapping values are not allowed" in (error.problem or ""):
        number = error.problem_mark.line - 1
    line = lines[number] if 0 <= number < len(lines) else ""
    hint = _key_meant(line)
    return None if hint is None else ((number + 1, len(line) - len(line.lstrip()) + 1), "not YAML: this is no 'key: value'", hint)


def _key_meant(line: str) -> str | None:
    """The hint for what is no key as it stands."""
    found = re.fullmatch(r"\s*(?:- +)*([A-Za-z_]\w*)(:| *= *)([^\s:/=].*)", line)
    if found is None:
        return None
    key, sign, value = found.groups()
    written = f"`{key}: {value if len(value) <= _MAX_SHOWN and value.isprintable() else '...'}`"
    return f"put a space after ':', as in {written}" if sign == ":" else f"write {written}"


def _comment_in_brackets(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> tuple[Position, str, str | None] | None:
    """`{TAG: run #3}`, where the comment takes the bracket with it."""
    mark = error.context_mark
    if mark is None or not (error.problem or "").startswith("expected ',' or"):
        return None
    line = re.sub(r"\"[^\"]*\"|'[^']*'", lambda quoted: "x" * len(quoted[0]), _line_of(mark, lines))
    found = re.compile(r"[^\s,\[{]\s+(#)").search(line, mark.column)  # not one that comments on what is complete
    if found is None:
        return None
    message = f"not YAML: a comment begins here, and the '{line[mark.column]}' before it is not closed"
    return (mark.line + 1, found.start(1) + 1), message, "put quotes around a text that holds ' #', or close the bracket before it"


def _of(mark: yaml.Mark | None) -> Position:
    return _START if mark is None else (mark.line + 1, mark.column + 1)


def _line_of(mark: yaml.Mark | None, lines: Sequence[str]) -> str:
    return lines[mark.line] if mark is not None and mark.line < len(lines) else ""


@dataclass
class _Reading:
    """Turns nodes into values and notes where each stands."""

    shown: str
    positions: dict[Place, Positions] = field(default_factory=dict)
    plain: set[Place] = field(default_factory=set)
    faults: list[tuple[Position, Problem]] = field(default_factory=list)
    num_values: int = 0
    around: list[yaml.Node] = field(default_factory=list)  # the nodes that the one being read stands in, outermost first

    def mapping(self, node: yaml.MappingNode, at: Place) -> dict[str, Value]:
        if not at:
            self.positions[at] = (_position(node), _position(node))
        values: dict[str, Value] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, at, values)
            if key is not None:
                self.positions[(*at, key)] = _positions(key_node, value_node)
                values[key] = self._value(value_node, (*at, key))
        return values

    def _key(self, node: yaml.Node, at: Place, before: dict[str, Value]) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._fault(node, "a key must be a text, not a list or a mapping", 'put quotes around a text that starts with "[" or "{"')
            return None
        if node.tag == "tag:yaml.org,2002:merge":
            self._fault(node, "merge keys (<<) are not read", "write the keys out")
            return None
        key = self._text(node)
        if key in before:
            (line, _), _ = self.positions[(*at, key)]
            self._fault(node, f"the key {typed(key)} stands here a second time", f"the first one is in line {line}: remove one")
            return None
        return key

    def _value(self, node: yaml.Node, at: Place) -> Value:
        self.num_values += 1
        if outer := next((other for other in self.around if other.value is node.value), None):  # which an alias of it shares
            raise self._too_much(_position(outer), f"{named(at[:1])} grows without end when its aliases (*) are written out")
        if self.num_values > _MAX_VALUES:
            message = f"with {named(at[:1])} the file has more than {_MAX_VALUES} values, when its aliases (*) are written out"
            raise self._too_much(self.positions[at[:1]][0], message)
        if len(at) > MAX_DEPTH:  # which the events cannot show: each alias is one
            message = f"{named(at[:1])} is nested more than {MAX_DEPTH} levels deep when its aliases (*) are written out"
            raise self._too_much(self.positions[at[:1]][0], message)
        if not isinstance(node, yaml.ScalarNode):
            assert isinstance(node, yaml.MappingNode | yaml.SequenceNode)
            self.around.append(node)
            inside = self.mapping(node, at) if isinstance(node, yaml.MappingNode) else self._list(node, at)
            self.around.pop()
            return inside
        if not node.style:  # None by PyYAML, "" by libyaml
            self.plain.add(at)
            if not node.value:
                return None
        return self._text(node)

    def _too_much(self, position: Position, message: str) -> SpecError:
        return _one(InFile(self.shown, *position), message, "write the values out")

    def _list(self, node: yaml.SequenceNode, at: Place) -> list[Value]:
        values: list[Value] = []
        for index, item in enumerate(node.value):
            position = _position(item)
            self.positions[(*at, index)] = (position, position)
            values.append(self._value(item, (*at, index)))
        return values

    def _text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        if "\0" in text:
            self._fault(node, "the text holds a NUL character, which no argument or variable can hold", "remove it")
        units = text.encode("utf-16", "surrogatepass")  # JSON writes one character as a pair of escapes
        try:
            return units.decode("utf-16")
        except UnicodeDecodeError:
            hint = r'write the character itself, or "\U0001F600"'
            self._fault(node, "the text holds half of a surrogate pair, which is no character", hint)
            return units.decode("utf-16", "replace")

    def _fault(self, node: yaml.Node, message: str, hint: str) -> None:
        position = _position(node)
        self.faults.append((position, Problem(InFile(self.shown, *position), message, hint)))


def _position(node: yaml.Node) -> Position:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _positions(key_node: yaml.Node, node: yaml.Node) -> Positions:
    """Both are the key's where nothing is typed behind it, and where keys or items stand in lines below it."""
    key, value = _position(key_node), _position(node)
    if isinstance(node, yaml.CollectionNode):
        has_its_own = bool(node.flow_style)
    else:
        assert isinstance(node, yaml.ScalarNode)
        has_its_own = bool(node.style or node.value)
    return (key, value) if has_its_own else (key, key)
