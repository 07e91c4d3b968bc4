"""What each node runs: the first node in full, the others by what differs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console
from rich.text import Text

from dtrain.launchers import MASKED, NodeCommand
from dtrain.plan import bash_text
from dtrain.render.ranges import collapsed
from dtrain.render.shell import open_word, print_text, print_words
from dtrain.shell_words import shell_word

_MOST_VALUES = 4
_MOST_GROUPS = 20
_DAEMON = "mpirun's daemon, which dtrain's agent starts"


def print_commands(console: Console, commands: Sequence[NodeCommand], theirs: Mapping[str, str]) -> None:
    """In the form of a shell; what is open until the nodes were asked stands in angle brackets. `theirs` are the user's variables."""
    first = commands[0]
    _head(console, first.node, " runs:")
    _variables(console, first.env)
    _argv(console, first.argv)
    _head(console, "", "each worker:" if first.argv[-1:] != ("none",) else "which runs:")
    _variables(console, first.worker_env, theirs)
    _worker(console, first.worker_argv)
    whole, daemon = _parts(first), _parts(replace(first, argv=()))  # the second as if the first node, too, had a daemon alone
    differences = [(command.node, _differences(whole if command.argv else daemon, _parts(command))) for command in commands[1:]]
    # Neighbours that differ in the same things are told of together.
    groups = [[*group] for _, group in groupby(differences, key=lambda pair: (*pair[1],))]
    for group in groups[:_MOST_GROUPS]:
        nodes = collapsed([node for node, _ in group], at_most=_MOST_VALUES)
        same = [difference for _, difference in group]
        _head(console, nodes, f" {'runs' if len(group) == 1 else 'run'} the same as {first.node}" + (", but:" if same[0] else ""))
        told = {_told(part, [difference[part] for difference in same]): None for part in same[0]}  # launcher and worker may differ alike
        for text in told:
            print_text(console, text)
    if len(groups) > _MOST_GROUPS:
        console.print(f"\nand {sum(map(len, groups[_MOST_GROUPS:]))} more nodes: --json shows them all")


@dataclass(frozen=True, slots=True)
class _Part:
    """A place in a node's command: the n-th argument of the launcher or of a worker, or a variable of theirs."""

    of: str
    key: str | int


def _parts(command: NodeCommand) -> dict[_Part, str]:
    argvs = (("launcher", command.argv), ("worker", command.worker_argv))
    arguments = {_Part(of, index): argument for of, argv in argvs for index, argument in enumerate(argv)}
    envs = (("launcher", command.env), ("worker", command.worker_env))
    return {**arguments, **{_Part(of, name): value for of, env in envs for name, value in sorted(env.items())}}


def _differences(parts: Mapping[_Part, str], others: Mapping[_Part, str]) -> dict[_Part, str | None]:
    """What stands elsewhere in the second; None where nothing does."""
    differing = {part: others.get(part) for part in {**parts, **others} if others.get(part) != parts.get(part)}
    return differing if _Part("launcher", 0) in others else {_Part("launcher", -1): _DAEMON, **differing}


def _told(part: _Part, values: Sequence[str | None]) -> str:
    if part.key == -1:
        return _DAEMON
    told = [_variable(part.key, value) if isinstance(part.key, str) else open_word(value) for value in values if value is not None]
    texts = dict.fromkeys(told)
    return collapsed([*texts], at_most=_MOST_VALUES) if texts else f"no {part.key}"


def _head(console: Console, name: str, rest: str) -> None:
    console.print(Text.assemble("\n" if name else "", (name, "bold"), (rest, "dim")), soft_wrap=True)


def _variables(console: Console, env: Mapping[str, str], theirs: Mapping[str, str] | None = None) -> None:
    for name, value in sorted(env.items()):
        is_theirs = theirs is not None and theirs.get(name) == value != ""
        print_words(console, [f"{name}={shell_word(value)}" if is_theirs else _variable(name, value)])


def _variable(name: str, value: str) -> str:
    return f"{name}={value if value in ('', MASKED) else open_word(value)}"


def _argv(console: Console, argv: Sequence[str]) -> None:
    if not argv:
        console.print(Text(f"  {_DAEMON}", "dim"))
        return
    for section in _sections([open_word(argument) for argument in argv]):
        print_words(console, section)


def _worker(console: Console, argv: Sequence[str]) -> None:
    text = bash_text(argv)
    if text is not None:
        print_text(console, text)
        return
    words = [open_word(argument) for argument in argv[:2]] + [shell_word(argument) for argument in argv[2:]]  # the user's
    if argv[2:-1] == ("trainer",):
        words[-1:] = re.split("(?<=,) ", words[-1])  # its keys are long, and JSON may be broken after a comma
    print_words(console, words)


def _sections(argv: Sequence[str]) -> Iterator[list[str]]:
    """mpirun's command has one section a node: those that only count upwards are shown as one."""
    sections = [[*group] for is_colon, group in groupby(argv, key=lambda argument: argument == ":") if not is_colon]
    if len(sections) == 1:
        yield sections[0]
        return
    yield sections[0]
    rest = [(":", *section) for section in sections[1:]]
    for _, group in groupby(rest, key=lambda section: (len(section), *section[3:])):  # ":", "--host", "address:count"
        same = [*group]
        columns = zip(*same, strict=True)
        yield [collapsed(list(dict.fromkeys(column)), at_most=_MOST_VALUES) for column in columns]
