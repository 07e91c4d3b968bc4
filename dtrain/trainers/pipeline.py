"""Pipeline training: every worker runs one stage of the model, and a replica's batch passes the stages in micro-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dtrain.trainers.batch import BatchPlan, permutation
from dtrain.trainers.errors import NonFiniteLoss
from dtrain.trainers.examples import Examples
from dtrain.trainers.gradients import FlatGradients
from dtrain.trainers.layout import PipelinePlan
from dtrain.trainers.loss import NO_LABEL, Evaluation, LossSum, loss_sum
from dtrain.trainers.occupancy import BusyClock, Occupancy, busy_clock
from dtrain.trainers.stage import Stage
from dtrain.trainers.torch_compat import Schedule, groups
from dtrain.trainers.world import World


class PipelineTrainer:
    """One worker: a stage of one replica, on the world's device. Every rank makes the same calls in the same order.

    After each iteration on_iteration hears of the loss over all replicas, on every rank, and of how busy all workers were.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: torch.optim.Optimizer | None,
        train: Examples,
        *,
        pipeline: PipelinePlan,
        plan: BatchPlan,
        seed: int,
        world: World,
        on_iteration: Callable[[LossSum, Occupancy], None] = lambda loss, occupancy: None,
    ) -> None:
        """Every rank calls it, after `join`. optimizer: of the stage's module, None where it has no parameters."""
        assert plan.iterations_per_epoch is not None and plan.num_examples == len(train) and plan.replicas == pipeline.replicas
        self.iteration = 0  # iterations done
        self.stage = stage
        self._is_first, self._is_last = stage.index == 0, stage.index == pipeline.stages - 1
        self._replica = pipeline.replica_of(world.rank)
        self._train = train
        self._plan = plan
        self._iterations_per_epoch = plan.iterations_per_epoch
        self._seed = seed
        self._world = world
        self._on_iteration = on_iteration
        self._order = torch.empty(0, dtype=torch.int64)  # of the examples in this epoch
        self._order_epoch = -1
        self._stages, self._replicas = groups(world.device.type, stages=pipeline.stages, replicas=pipeline.replicas)
        self._gradients = FlatGradients(stage.module.parameters())
        self._optimizer = optimizer
        self._clock = busy_clock(world.device)
        self._loss = _Loss(self._clock)
        self._schedule = Schedule(
            stage.module,
            name=pipeline.schedule,
            stage=stage.index,
            stages=pipeline.stages,
            micro_batches=plan.micro_batches,
            input_meta=stage.input_meta,
            output_meta=stage.output_meta,
            device=world.device,
            group=self._stages,
            loss_function=self._loss,
            clock=self._clock,
        )

    def run_iterations(self, num_iterations: int) -> LossSum:
        """Train for so many more iterations; the loss of this replica over them on its last stage, none on the others.

        Raises:
            NonFiniteLoss: on every rank; the loss became infinite or not a number; all parameters are those before that iteration.
        """
        self.stage.module.train()
        loss = LossSum()
        for _ in range(num_iterations):
            loss += self.step(*self._next_batch())
        return loss

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> LossSum:
        """One iteration on this replica's part of a global batch, at most per_replica_batch_size rows.

        Its losses are divided by the number of labels in the global batch, so the sum of the replicas' gradients is that of
        the mean loss, however unequal their parts are.
        """
        began_s = time.perf_counter()
        self._gradients.zero()
        self._loss.denominator = self._plan.global_batch_size * labels[0].numel()
        self._schedule.step(*self._fed(inputs, labels))
        mine = self._loss.take()
        total, count, busy_s = self._world.sum_over_ranks([mine.total, mine.count, self._clock.take_s()])
        occupancy = Occupancy(busy_s, self._world.world_size * (time.perf_counter() - began_s))  # all ranks waited for the last
        if not math.isfinite(total):
            raise NonFiniteLoss(
                f"the loss is {total} in iteration {self.iteration + 1}",
                hint="lower the learning rate, and look for values in the data that are not finite",
            )
        if self._plan.replicas > 1:
            self._gradients.add_up(self._replicas)
        if self._optimizer is not None:
            self._optimizer.step()
        self.iteration += 1
        self._on_iteration(LossSum(total, round(count)), occupancy)
        return mine

    def evaluate(self, test: Examples) -> Evaluation:
        """Loss and accuracy over all of `test`: each replica takes a contiguous part; what fills up its last batch counts nothing."""
        for buffer in self.stage.module.buffers():
            dist.broadcast(buffer, group=self._replicas, group_src=0)  # running statistics differ between replicas
        replicas = self._plan.replicas
        part = torch.arange(self._replica * len(test) // replicas, (self._replica + 1) * len(test) // replicas)
        self.stage.module.eval()
        self._loss.denominator = 1
        for index in torch.split(part, self._plan.per_replica_batch_size) if len(part) else ():
            self._schedule.forward(*self._fed(*test.take(index)))
        num_correct, loss = self._loss.num_correct(), self._loss.take()
        self._clock.take_s()
        total, correct, count = self._world.sum_over_ranks([loss.total, num_correct, loss.count])
        return Evaluation(accuracy=correct / count, loss=total / count)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of this stage's part of the model's state_dict()."""
        return self.stage.state()

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, iteration = divmod(self.iteration, self._iterations_per_epoch)
        if epoch != self._order_epoch:
            self._order = permutation(len(self._train), seed=self._seed, epoch=epoch)
            self._order_epoch = epoch
        return self._train.take(self._order[self._plan.replica_slice(iteration, self._replica)])

    def _fed(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What this stage needs of a batch, on its device and filled up to the size that all batches have."""
        missing = self._plan.per_replica_batch_size - len(labels)
        if missing:  # rows that a model can take, such as bytes, not zeros
            inputs = torch.cat([inputs, inputs[:1].expand(missing, *inputs.shape[1:])])
            labels = torch.cat([labels, labels.new_full((missing, *labels.shape[1:]), NO_LABEL)])
        device = self._world.device
        return (
            inputs.to(device, non_blocking=True) if self._is_first else None,
            labels.to(device, non_blocking=True) if self._is_last else None,
        )


class _Loss:
    """What the last stage computes from a micro-batch's outputs, and what has come together of it."""

    def __init__(self, clock: BusyClock) -> None:
        self.denominator = 1
        self._clock = clock
        self._sums: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._correct: list[torch.Tensor] = []

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self._clock:
            loss = loss_sum(output, labels)
            self._sums.append(loss.detach())
            self._counts.append((labels != NO_LABEL).sum())
            if not torch.is_grad_enabled():
                self._correct.append((output.argmax(1) == labels).sum())
            return loss / self.denominator

    def take(self) -> LossSum:
        """Since it was asked before."""
        total, count = _sum(self._sums), _sum(self._counts)
        return LossSum(total, round(count))

    def num_correct(self) -> float:
        return _sum(self._correct)


def _sum(parts: list[torch.Tensor]) -> float:
    """In float64, on the device; the parts are then gone."""
    total = torch.stack(parts).double().sum().item() if parts else 0.0
    parts.clear()
    return total
