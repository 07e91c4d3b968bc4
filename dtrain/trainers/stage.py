"""A model as its layers in order, and the part of them that one worker runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dtrain.trainers.errors import TargetError
from dtrain.trainers.layout import PipelinePlan
from dtrain.trainers.partition import Layer
from dtrain.trainers.torch_compat import metadata
from dtrain.trainers.zoo import file_of, target_of


@dataclass(frozen=True)
class LayeredModel:
    """Modules of one tensor to one tensor, whose application one after the other is the model."""

    model: nn.Module
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        sizes = (sum(parameter.numel() for parameter in module.parameters()) for module in self.modules)
        return tuple(Layer(name, size) for name, size in zip(self.names, sizes, strict=True))


@dataclass(frozen=True)
class Stage:
    """One worker's part of a model, and what passes its ends."""

    index: int
    module: nn.Sequential
    names: dict[str, str]  # of its parameters and buffers: here -> in the model
    input_meta: torch.Tensor  # one micro-batch, on the device `meta`
    output_meta: torch.Tensor

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """By the model's names."""
        return {self.names[name]: parameter for name, parameter in self.module.named_parameters()}

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of its part of the model's state_dict()."""
        return {self.names[name]: value.clone() for name, value in self.module.state_dict().items()}


def layered(model: nn.Module, name: str, example: torch.Tensor) -> LayeredModel:
    """The layers of a model: what `pipeline_layers(model)` beside its function says, or the children of a nn.Sequential.

    Args:
        name: of the model in the job file.
        example: a batch of inputs to try the layers with.

    Raises:
        TargetError: there is neither, or the layers are not the model.
    """
    module_name = target_of("model", name).partition(":")[0]
    module = importlib.import_module(module_name)
    pipeline_layers: Any = getattr(module, "pipeline_layers", None)
    if pipeline_layers is None:
        if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
            return LayeredModel(model, tuple(model._modules), tuple(model))  # not named_children(), which leaves out repetitions
        raise TargetError(
            f"pipeline: {name} returned a {type(model).__name__}, and nothing says what its layers are",
            hint=f"return a torch.nn.Sequential, or define pipeline_layers(model) in {file_of(module)}: its layers in order",
        )
    layers: Any = pipeline_layers(model)
    if not isinstance(layers, list | tuple) or not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise TargetError(
            f"pipeline: {module_name}:pipeline_layers returned no list of layers", hint="return a list of torch.nn.Module, in order"
        )
    names = {id(part): path for path, part in model.named_modules()}
    named = tuple(names.get(id(layer)) or type(layer).__name__ for layer in layers)
    found = LayeredModel(model, named, tuple(layers))
    _refuse_other_layers(found, f"{module_name}:pipeline_layers", example)
    return found


def cut_stage(layered: LayeredModel, plan: PipelinePlan, index: int, micro_batch: torch.Tensor) -> Stage:
    """The part of the model that is the plan's stage of that index, for inputs like micro_batch.

    Raises:
        TargetError: two stages share a parameter, or a layer gives something else than one tensor.
    """
    assert plan.layers is not None
    ends = [0]
    for layers in plan.layers:
        ends.append(ends[-1] + len(layers))
    parts = [layered.modules[begin:end] for begin, end in pairwise(ends)]
    names = {id(value): name for name, value in _named_tensors(layered.model)}
    _refuse_shared_parameters(parts, names)
    try:
        values = metadata(layered.modules, micro_batch)
    except TypeError as error:
        if len(error.args) != 1 or not isinstance(error.args[0], int):
            raise
        name = layered.names[error.args[0]]
        raise TargetError(
            f"pipeline: layer {name} gives something else than one tensor", hint="let each layer take one tensor and give one"
        ) from None
    module = nn.Sequential(*parts[index])
    own_names = {name: names.get(id(value), name) for name, value in _named_tensors(module)}
    return Stage(index, module, own_names, values[ends[index]], values[ends[index + 1]])


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under every name they have; the first name of a tensor last, so that a dict keeps that one."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)][::-1]


def _refuse_other_layers(found: LayeredModel, function: str, example: torch.Tensor) -> None:
    """Silently, a model of other layers would be trained."""
    covered = {id(parameter) for layer in found.modules for parameter in layer.parameters()}
    left_out = [name for name, parameter in found.model.named_parameters() if id(parameter) not in covered]
    if left_out:
        raise TargetError(f"pipeline: no layer of {function} has the parameter {left_out[0]}", hint="return every layer of the model")
    found.model.eval()  # without dropout, both ways give the same
    with torch.no_grad():
        expected, output = found.model(example), example
        for layer in found.modules:
            output = layer(output)
    found.model.train()
    if not (isinstance(output, torch.Tensor) and output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-3, atol=1e-5)):
        raise TargetError(
            f"pipeline: the layers of {function}, one after the other, do not give what the model gives",
            hint="return them in the order in which the model's forward applies them, each taking one tensor and giving one",
        )


def _refuse_shared_parameters(parts: Sequence[Sequence[nn.Module]], names: dict[int, str]) -> None:
    owners: dict[int, int] = {}
    for index, part in enumerate(parts):
        for parameter in (parameter for layer in part for parameter in layer.parameters()):
            owner = owners.setdefault(id(parameter), index)
            if owner != index:
                raise TargetError(
                    f"pipeline: stages {owner} and {index} share the parameter {names.get(id(parameter), 'of one layer')}, "
                    "and each would train a copy of its own",
                    hint="give each its own parameter, or fewer stages, so that both layers stand in one",
                )
