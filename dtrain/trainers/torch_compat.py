"""All of torch that is private, or still called alpha by torch's documentation: torch.distributed.pipelining and its company.

tests/unit/test_torch_compat.py holds what dtrain relies on, so that a new release of torch is tried by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.func import functional_call

from dtrain.trainers.occupancy import BusyClock

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def groups(device_type: str, *, stages: int, replicas: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(the stages of this worker's replica, the replicas of its stage). Every rank calls it; they are numbered as in layout.py."""
    mesh = init_device_mesh(device_type, (stages, replicas), mesh_dim_names=("stage", "replica"))
    return mesh["stage"].get_group(), mesh["replica"].get_group()


class Schedule:
    """The execution of one worker's stage; all stages of a replica make the same calls in the same order."""

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        stage: int,
        stages: int,
        micro_batches: int,
        input_meta: torch.Tensor,
        output_meta: torch.Tensor,
        device: torch.device,
        group: dist.ProcessGroup,
        loss_function: LossFunction,
        clock: BusyClock,
    ) -> None:
        """input_meta and output_meta are one micro-batch on the device `meta`.

        With both given torch infers nothing: its inference would run every stage on uninitialised numbers, which ruins
        running statistics.
        """
        self._stage = _TimedStage(module, stage, stages, device, input_args=input_meta, output_args=output_meta, group=group)
        self._stage.clock = clock
        schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[name]
        # scale_grads would divide by the number of micro-batches, and after an evaluation once more.
        self._schedule: Any = schedule(self._stage, micro_batches, loss_fn=loss_function, scale_grads=False)

    def step(self, inputs: torch.Tensor | None, labels: torch.Tensor | None) -> None:
        """Forward and backward of a replica's batch; the first stage gives the inputs, the last one the labels."""
        self._run(self._schedule.step, inputs, labels)

    def forward(self, inputs: torch.Tensor | None, labels: torch.Tensor | None) -> None:
        """Forward alone; the loss function hears of the outputs."""
        with torch.no_grad():
            self._run(self._schedule.eval, inputs, labels)

    def _run(self, run: Callable[..., object], inputs: torch.Tensor | None, labels: torch.Tensor | None) -> None:
        run(*([] if inputs is None else [inputs]), target=labels, return_outputs=False)


class _TimedStage(PipelineStage):
    """Its clock runs while it computes."""

    clock: BusyClock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.clock:
                return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # the layer's own error, which torch wraps into a list of shapes

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock:
            return super().backward_one_chunk(*args, **kwargs)


def metadata(layers: Sequence[nn.Module], inputs: torch.Tensor) -> list[torch.Tensor]:
    """What goes into each layer and comes out of the last, for these inputs, on the device `meta`; nothing is computed.

    Raises:
        TypeError: a layer gives something else than one tensor; its argument is the layer's index.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value = mode.from_tensor(inputs)
        values = [value]
        for index, layer in enumerate(layers):
            # Not with the layer's own tensors: running statistics would count this as a batch.
            own = [*layer.named_parameters(), *layer.named_buffers()]
            fake: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in own}
            value = functional_call(layer, fake, (value,))
            if not isinstance(value, torch.Tensor):
                raise TypeError(index)
            values.append(value)
        described = [(tuple(value.shape), value.dtype, value.requires_grad) for value in values]
    return [torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad) for shape, dtype, requires_grad in described]
