"""The workers' variables: the keys `env` and `secrets`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dtrain.spec.mistake import Mistake, Place, is_text, typed

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GLUED = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99}):([!-~]{1,60})")  # a name and its value, in one

MOST_BYTES = 128 * 1024  # that Linux gives a process as one variable: name, =, value and a zero byte; or as one argument

_RANKS = "leave it out: the launcher gives every worker its own"
_SIZES = "leave it out: it follows from instances and gpus_per_instance"

# What dtrain or the launcher sets in every worker, and what to write instead.
_SET_BY_US = {
    "RANK": "leave it out: the launcher gives every worker its own $RANK",
    "LOCAL_RANK": _RANKS,
    "GROUP_RANK": _RANKS,
    "ROLE_RANK": _RANKS,
    "NODE_RANK": "leave it out: a node's place in instances is its rank",
    "WORLD_SIZE": _SIZES,
    "LOCAL_WORLD_SIZE": _SIZES,
    "MASTER_ADDR": "leave it out: the nodes prove an address to each other; `network` in the cluster narrows the choice",
    "MASTER_PORT": "leave it out: a free port is proved before the start; `ports` in the cluster narrows the choice",
    "CUDA_VISIBLE_DEVICES": "list the GPUs in the cluster: `gpus_per_instance: [0, 1]`, or `gpus` of an instance",
    "CUDA_DEVICE_ORDER": "leave it out: GPUs are numbered as nvidia-smi does",
}
_SET_UNDER_NONE = {"NNODES": _SIZES, "GPUS_PER_NODE": _SIZES, "CLUSTER_SIZE": _SIZES}


def env_of(texts: Mapping[str, str | None], launcher: str, environ: Mapping[str, str]) -> tuple[dict[str, str], list[Mistake]]:
    """The variables with those that are taken from here, and what is wrong with them."""
    env: dict[str, str] = {}
    mistakes: list[Mistake] = []
    for name, text in texts.items():
        at = ("env", name)
        if text is None and (glued := _GLUED.fullmatch(name)):
            hint = f"put a space after ':', as in {glued[1]}: {glued[2]}"
            mistakes.append(Mistake(at, f"{typed(name)} cannot be a variable's name", hint, of_key=True))
        elif wrong := _name_mistake(name, launcher, at):
            mistakes.append(wrong)
        elif text is not None:
            env[name] = text
            mistakes += _length_mistakes(name, text, at)
        elif name not in environ:
            mistakes.append(Mistake(at, f"{name} is not set here, and env gives it no value", f"export {name}, or write {name}: value"))
        elif not is_text(environ[name]):
            mistakes.append(Mistake(at, f"the value of {name} here is not UTF-8", f"write {name}: value"))
        else:
            env[name] = environ[name]
            mistakes += _length_mistakes(name, environ[name], at)
    return env, mistakes


def secrets_mistakes(names: Sequence[str], env: Mapping[str, str], launcher: str, environ: Mapping[str, str]) -> list[Mistake]:
    mistakes: list[Mistake] = []
    seen: set[str] = set()
    for index, name in enumerate(names):
        at = ("secrets", index)
        if not name or "=" in name:
            hint = "a secret's value never stands in a file: write the name, and export the value before the launch"
            mistakes.append(Mistake(at, "a secret is listed by its name alone", hint))
        elif name in seen:
            mistakes.append(Mistake(at, f"{name} stands here a second time", "remove one"))
        elif name in env:
            mistakes.append(Mistake(at, f"{name} stands in env too, which is shown and stored", "remove it from env"))
        elif wrong := _name_mistake(name, launcher, at):
            mistakes.append(wrong)
        elif name not in environ:
            mistakes.append(Mistake(at, f"the secret {name} is not set here", f"export {name} before the launch"))
        elif not is_text(environ[name]):
            mistakes.append(Mistake(at, f"the value of the secret {name} is not UTF-8", "set it to text"))
        else:
            mistakes += _length_mistakes(name, environ[name], at)
        seen.add(name)
    return mistakes


def argument_mistakes(text: str, at: Place) -> list[Mistake]:
    """Of what becomes one argument of a process, as lines for bash do."""
    size = len(text.encode(errors="surrogateescape")) + 1
    if size <= MOST_BYTES:
        return []
    problem = f"the argument {typed(text)} has {size:,} bytes, and Linux gives no process one of more than {MOST_BYTES:,}"
    return [Mistake(at, problem, "put it in a file")]


def _length_mistakes(name: str, value: str, at: Place) -> list[Mistake]:
    size = len(name.encode()) + len(value.encode()) + 2
    if size <= MOST_BYTES:
        return []
    return [
        Mistake(at, f"{name} has {size:,} bytes, and Linux gives no process a variable of more than {MOST_BYTES:,}", "put it in a file")
    ]


def _name_mistake(name: str, launcher: str, at: Place) -> Mistake | None:
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^A-Za-z0-9_]+", "_", name.partition("=")[0]).strip("_")[:60]
        such = near if _NAME.fullmatch(near) else "NAME"
        letters = f"letters, digits and '_', no digit first, such as {such}: value"
        return Mistake(at, f"{typed(name)} cannot be a variable's name", letters, of_key=True)
    ours = {**_SET_BY_US, **(_SET_UNDER_NONE if launcher == "none" else {})}
    hint = ours.get(name)
    if hint is None and name.startswith("DTRAIN_"):
        hint = "names that begin with DTRAIN_ are dtrain's own: choose another"
    return None if hint is None else Mistake(at, f"{name} is set by dtrain in every worker", hint, of_key=True)
