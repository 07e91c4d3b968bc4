"""The built-in models and data sets by name, and how a name in a job file becomes a function. No torch at import.

A new one is one line here and its function, which takes no arguments: a model's returns a torch.nn.Module, a data
set's returns (train, test), each a torch data set of (input, label).
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from dtrain.trainers.errors import TargetError
from dtrain.trainers.partition import Layer


@dataclass(frozen=True)
class BuiltinModel:
    """A model whose layers are known without building it, so that a plan can show the stages of a pipeline."""

    target: str
    data: str  # the built-in data set that it reads
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class BuiltinDataset:
    """A data set whose sizes are known without loading it, so that a plan can show the iterations of an epoch."""

    target: str
    num_train: int
    num_test: int


MODELS: dict[str, BuiltinModel] = {
    "digits_cnn": BuiltinModel(
        "dtrain.trainers.digits:digits_cnn",
        "digits",
        (
            Layer("conv1", 160),
            Layer("relu1", 0),
            Layer("conv2", 4640),
            Layer("relu2", 0),
            Layer("pool", 0),
            Layer("flatten", 0),
            Layer("linear1", 32832),
            Layer("relu3", 0),
            Layer("linear2", 650),
        ),
    ),
    "gpt": BuiltinModel(
        "dtrain.trainers.gpt:gpt",
        "text",
        (Layer("embed", 20480), *(Layer(f"block{number}", 49984) for number in range(4)), Layer("head", 16768)),
    ),
}
DATASETS: dict[str, BuiltinDataset] = {
    "digits": BuiltinDataset("dtrain.trainers.digits:digits", num_train=1437, num_test=360),
    "text": BuiltinDataset("dtrain.trainers.text:text", num_train=16384, num_test=512),
}

Kind = Literal["model", "data"]  # the keys in a job file


def target_of(kind: Kind, name: str) -> str:
    """The `package.module:function` that a job file's name stands for.

    Raises:
        TargetError: the name is neither built in nor of that form.
    """
    targets = {known: builtin.target for known, builtin in (MODELS if kind == "model" else DATASETS).items()}
    if name in targets:
        return targets[name]
    module, colon, function = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name.lower(), targets, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"built in: {', '.join(sorted(targets))}; your own is package.module:function"
        raise TargetError(f"{kind}: there is no built-in {name!r}", hint=hint)
    if module.endswith(".py"):
        own = f"{module.removesuffix('.py').replace('/', '.')}:{function}"
        raise TargetError(f"{kind}: {name!r} names a file, and a module is wanted", hint=f"write {own}")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise TargetError(f"{kind}: {name!r} is not of the form package.module:function", hint="for example my_task:build")
    return name


def resolve(kind: Kind, name: str) -> Callable[[], Any]:
    """The function itself. A user's own module is found as in `python script.py`: the working directory is on sys.path.

    Raises:
        TargetError: no such name, module or function. An error inside the user's module stays the user's own error.
    """
    target = target_of(kind, name)
    module_name, _, function_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise  # the module is there, something that it imports is not
        file = module_name.replace(".", "/") + ".py"
        raise TargetError(
            f"{kind}: '{target}' names a module that does not exist: {missing}",
            hint=f"it is looked for as {file} in the job's workdir, and among what is installed for {sys.executable}",
        ) from None
    function = getattr(module, function_name, None)
    if function is None:
        close = difflib.get_close_matches(function_name, vars(module), n=1)
        hint = f"did you mean '{module_name}:{close[0]}'?" if close else f"define it in {file_of(module)}"
        raise TargetError(f"{kind}: module {module_name} has no '{function_name}'", hint=hint)
    if not callable(function):
        raise TargetError(
            f"{kind}: {target} is of type {type(function).__name__}, which cannot be called", hint="name a function that returns it"
        )
    return function  # type: ignore[no-any-return]


def file_of(module: ModuleType) -> str:
    """Where the user finds a module: as in the job's workdir, of which a worker's working directory is a copy."""
    file = os.path.relpath(module.__file__ or "")
    return (module.__file__ or module.__name__) if file.startswith("..") or not module.__file__ else file
