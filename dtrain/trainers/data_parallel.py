"""Data parallel training: every worker holds a replica of the model and sees its part of each global batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.trainers.batch import BatchPlan, permutation
from dtrain.trainers.errors import NonFiniteLoss
from dtrain.trainers.examples import Examples
from dtrain.trainers.loss import Evaluation, LossSum, loss_sum
from dtrain.trainers.world import World


class DataParallelTrainer:
    """One replica; its model is on the world's device. Every rank makes the same calls in the same order, and rank 0's
    values of the model hold for all.

    After each iteration on_iteration hears of this replica's loss in it, at once and on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: Examples,
        *,
        plan: BatchPlan,
        seed: int,
        world: World,
        on_iteration: Callable[[LossSum], None] = lambda loss: None,
    ) -> None:
        assert plan.iterations_per_epoch is not None and plan.num_examples == len(train) and plan.replicas == world.world_size
        self.iteration = 0  # iterations done
        self.model = model
        self._replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = optimizer
        self._train = train
        self._seed = seed
        self._plan = plan
        self._iterations_per_epoch = plan.iterations_per_epoch
        self._world = world
        self._on_iteration = on_iteration
        self._order = torch.empty(0, dtype=torch.int64)  # of the examples in this epoch
        self._order_epoch = -1
        self._loss_reader = _CudaLossReader() if world.device.type == "cuda" else _CpuLossReader()

    def run_iterations(self, num_iterations: int) -> LossSum:
        """Train for so many more iterations; the loss of this replica over them.

        Raises:
            NonFiniteLoss: the loss of this replica became infinite or not a number; its parameters are those before that iteration.
        """
        self.model.train()
        total, count = 0.0, 0
        for _ in range(num_iterations):
            loss = self.step(*self._next_batch())
            total += loss.total
            count += loss.count
            self._on_iteration(loss)
        return LossSum(total, count)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> LossSum:
        """One iteration on this replica's part of a global batch.

        The parts of all replicas hold equally many labels. DDP averages the gradients over replicas, so the sum of
        losses divided by the labels of *one* replica gives the gradient of the mean over the global batch.
        """
        count = labels.numel()
        size = self._plan.micro_batch_size
        self._optimizer.zero_grad()
        for part in range(self._plan.micro_batches - 1):
            with self._replica.no_sync():
                chunk = slice(part * size, (part + 1) * size)
                loss = loss_sum(self._replica(inputs[chunk]), labels[chunk])
                self._loss_reader.add(loss)
                (loss / count).backward()  # type: ignore[no-untyped-call]
        if self._plan.micro_batches > 1:
            inputs, labels = inputs[-size:], labels[-size:]
        loss = loss_sum(self._replica(inputs), labels)
        self._loss_reader.add(loss, last=True)
        (loss / count).backward()  # type: ignore[no-untyped-call]
        total = self._loss_reader.total()
        if not math.isfinite(total):
            raise NonFiniteLoss(
                f"the loss is {total} in iteration {self.iteration + 1}, on rank {self._world.rank}",
                hint="lower the learning rate, and look for values in the data that are not finite",
            )
        self._optimizer.step()
        self.iteration += 1
        return LossSum(total, count)

    def evaluate(self, test: Examples) -> Evaluation:
        """Loss and accuracy over all of `test`: each rank takes a contiguous part, none is padded or left out."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)  # running statistics differ between replicas; DDP trains on with rank 0's
        rank, world_size = self._world.rank, self._world.world_size
        part = torch.arange(rank * len(test) // world_size, (rank + 1) * len(test) // world_size)
        loss, num_correct, count = 0.0, 0, 0
        self.model.eval()
        with torch.no_grad():  # not inference_mode: what a model caches here may be needed in a later backward
            for index in torch.split(part, max(256, self._plan.micro_batch_size)):
                inputs, labels = self._on_device(*test.take(index))
                output = self.model(inputs)  # not through DDP: ranks may have unequally many batches
                loss += loss_sum(output, labels).item()
                num_correct += int((output.argmax(1) == labels).sum().item())
                count += labels.numel()
        loss, correct, labels_seen = self._world.sum_over_ranks([loss, num_correct, count])
        return Evaluation(accuracy=correct / labels_seen, loss=loss / labels_seen)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the model's state_dict()."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, iteration = divmod(self.iteration, self._iterations_per_epoch)
        if epoch != self._order_epoch:
            self._order = permutation(len(self._train), seed=self._seed, epoch=epoch)
            self._order_epoch = epoch
        return self._on_device(*self._train.take(self._order[self._plan.replica_slice(iteration, self._world.rank)]))

    def _on_device(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._world.device
        if device.type == "cpu":
            return inputs, labels
        return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class _CpuLossReader:
    """The loss of an iteration, summed over its micro-batches."""

    def __init__(self) -> None:
        self._total = 0.0

    def add(self, loss: torch.Tensor, *, last: bool = False) -> None:
        self._total += loss.item()

    def total(self) -> float:
        total, self._total = self._total, 0.0
        return total


class _CudaLossReader:
    """The same without a stall: the copy to the host starts before the last backward and is over long before that is.

    So the loss is known before the optimizer's step while the GPU still has work queued.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def add(self, loss: torch.Tensor, *, last: bool = False) -> None:
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        if last:
            self._host.copy_(self._sum, non_blocking=True)
            self._copied.record()
            self._sum = None

    def total(self) -> float:
        self._copied.synchronize()
        return self._host.item()
