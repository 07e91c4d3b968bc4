"""What dtrain relies on in torch's pipelining and fake tensors. A new release of torch is tried by running this."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from dtrain.trainers.loss import loss_sum
from dtrain.trainers.occupancy import CpuClock
from dtrain.trainers.torch_compat import Schedule, groups, metadata


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """A pipeline of one stage in this process: the whole path through torch but for the network, which other tests have."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield groups("cpu", stages=1, replicas=1)[0]
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)).double()


def schedule(module: nn.Module, group: dist.ProcessGroup, clock: CpuClock, name: str = "1F1B") -> Schedule:
    input_meta, *_, output_meta = metadata([module], torch.zeros(2, 4, dtype=torch.float64))
    return Schedule(
        module,
        name=name,
        stage=0,
        stages=1,
        micro_batches=3,
        input_meta=input_meta,
        output_meta=output_meta,
        device=torch.device("cpu"),
        group=group,
        loss_function=loss_sum,
        clock=clock,
    )


def test_metadata_says_shapes_and_touches_nothing() -> None:
    module = network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    values = metadata([*module], torch.zeros(5, 4, dtype=torch.float64))
    assert [(tuple(value.shape), value.dtype, value.device.type) for value in values] == [
        ((5, width), torch.float64, "meta") for width in (4, 6, 6, 6, 3)
    ]
    assert [value.requires_grad for value in values] == [False, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())  # running statistics too
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_a_step_adds_up_gradients_of_sums_and_an_evaluation_touches_none(group: dist.ProcessGroup, name: str) -> None:
    module = network()
    module[2].eval()  # no dropout
    inputs, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    for part in range(3):
        loss_sum(module(inputs[2 * part : 2 * part + 2]), labels[2 * part : 2 * part + 2]).backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad for parameter in module.parameters()]
    module = network()
    module[2].eval()
    clock = CpuClock()
    trained = schedule(module, group, clock, name)
    trained.step(inputs, labels)
    trained.forward(inputs, labels)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert parameter.grad is not None and gradient is not None
        assert (parameter.grad - gradient).abs().max() < 1e-14  # of the sum: no scale_grads, not even after the evaluation
    assert module[1].num_batches_tracked == 6  # 3 micro-batches in training mode, twice; none by inference of shapes
    assert clock.take_s() > 0 and clock.take_s() == 0


def test_a_layers_own_error_comes_out_of_a_step(group: dist.ProcessGroup) -> None:
    class Broken(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if input.device.type == "cpu" and type(input) is torch.Tensor and input.sum() > 0:
                raise ValueError("this layer broke")
            return super().forward(input)

    trained = schedule(Broken(4, 3).double(), group, CpuClock())
    with pytest.raises(ValueError, match="this layer broke"):
        trained.step(torch.ones(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.int64))


def test_torch_still_has_what_is_used() -> None:
    parameters = {"input_args", "output_args", "group"}
    assert parameters <= inspect.signature(PipelineStage.__init__).parameters.keys()
    for kind in (ScheduleGPipe, Schedule1F1B):
        assert inspect.signature(kind.__init__).parameters["scale_grads"].default is True  # which dtrain must set to False
        assert {"target", "return_outputs"} <= inspect.signature(kind.step).parameters.keys()
