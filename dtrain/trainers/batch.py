"""The batch arithmetic, and which examples a replica sees in an iteration. Pure; torch is imported only for `permutation`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dtrain.trainers.config import BatchConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BatchPlan:
    """How an iteration's global batch is shared out; every division here is exact.

    global_batch_size + padding = replicas x per_replica_batch_size, per_replica_batch_size = micro_batches x
    micro_batch_size. Padding are rows of weight 0, which make up for a remainder where a plan may have one.
    """

    global_batch_size: int
    replicas: int
    per_replica_batch_size: int
    micro_batches: int
    micro_batch_size: int
    num_examples: int | None  # None: the data set's size is not known yet
    iterations_per_epoch: int | None  # floor: an epoch's remainder is dropped, the next epoch's shuffle covers it

    @property
    def padding(self) -> int:
        """Rows of weight 0 in an iteration, over all replicas."""
        return self.replicas * self.per_replica_batch_size - self.global_batch_size

    @property
    def equation(self) -> str:
        """The arithmetic as a person checks it."""
        parts = f" (micro-batches {self.micro_batches} x {self.micro_batch_size})" if self.micro_batches > 1 else ""
        padding = f" + {self.padding} of weight 0" if self.padding else ""
        return (
            f"global batch {self.global_batch_size}{padding} = replicas {self.replicas} x per-replica {self.per_replica_batch_size}{parts}"
        )

    def replica_slice(self, iteration: int, replica: int) -> slice:
        """Where in an epoch's permutation the replica's examples stand; iteration counts from 0 within the epoch."""
        start = iteration * self.global_batch_size
        begin, end = (start + part * self.global_batch_size // self.replicas for part in (replica, replica + 1))
        return slice(begin, end)


def plan_batches(config: BatchConfig, *, replicas: int, num_examples: int | None, pad: bool = False) -> BatchPlan:
    """The plan for so many replicas and a training set of num_examples.

    Args:
        pad: make up for a remainder with rows of weight 0, as a pipeline does, whose micro-batches all have one shape.

    Raises:
        ValueError: a division leaves a remainder; says the equation and the nearest sizes that work.
    """
    _check_counts(config, replicas)
    if config.global_ is not None and config.per_replica is not None and config.global_ != replicas * config.per_replica:
        raise ValueError(_contradiction(config, config.global_, config.per_replica, replicas, num_examples, pad=pad))
    if pad:
        return _padded(config, replicas, num_examples)
    if config.global_ is not None:
        global_batch_size = config.global_
        if global_batch_size % (replicas * config.micro_batches):
            raise ValueError(_global_remainder(global_batch_size, replicas, config, num_examples))
        per_replica = global_batch_size // replicas
    else:
        assert config.per_replica is not None
        per_replica = config.per_replica
        global_batch_size = replicas * per_replica
        if per_replica % config.micro_batches:
            sizes = _nearest(per_replica, config.micro_batches, None if num_examples is None else num_examples // replicas)
            equation = _micro_equation(per_replica, config.micro_batches)
            raise ValueError(f"no whole number: {equation}; {_hint(sizes, replicas, config.micro_batches)}")
    if num_examples is not None and num_examples < global_batch_size:
        raise ValueError(_too_few_examples(global_batch_size, replicas, config, num_examples))
    return BatchPlan(
        global_batch_size=global_batch_size,
        replicas=replicas,
        per_replica_batch_size=per_replica,
        micro_batches=config.micro_batches,
        micro_batch_size=per_replica // config.micro_batches,
        num_examples=num_examples,
        iterations_per_epoch=None if num_examples is None else num_examples // global_batch_size,
    )


def _padded(config: BatchConfig, replicas: int, num_examples: int | None) -> BatchPlan:
    global_batch_size = replicas * config.per_replica if config.per_replica is not None else config.global_
    assert global_batch_size is not None
    least = replicas * config.micro_batches
    if global_batch_size < least:
        most = num_examples if num_examples is not None else least
        sizes = [] if most < least else [least if config.global_ is not None else config.micro_batches]
        raise ValueError(
            f"global batch {global_batch_size} is less than one example for each of replicas {replicas} x micro-batches "
            f"{config.micro_batches}; {_hint(sizes, replicas, config.micro_batches)}"
        )
    micro_batch_size = -(-global_batch_size // least)
    plan = plan_batches(
        BatchConfig(global_=least * micro_batch_size, micro_batches=config.micro_batches), replicas=replicas, num_examples=None
    )
    if num_examples is not None and num_examples < global_batch_size:
        raise ValueError(_too_few_examples(global_batch_size, replicas, config, num_examples))
    iterations_per_epoch = None if num_examples is None else num_examples // global_batch_size
    return replace(plan, global_batch_size=global_batch_size, num_examples=num_examples, iterations_per_epoch=iterations_per_epoch)


def permutation(num_examples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """The order of an epoch's examples, int64 of shape (num_examples,): a function of (seed, epoch) alone."""
    import torch

    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()  # not seed + epoch: seed 1 would replay seed 0 one epoch later
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # >> 1: the seed is a signed 64-bit number
    return torch.randperm(num_examples, generator=generator)


def indices(plan: BatchPlan, *, seed: int, epoch: int, iteration: int, replica: int) -> list[int]:
    """The examples that a replica sees in an iteration of an epoch, both counted from 0.

    Iteration s takes [s*G, (s+1)*G) of the epoch's permutation and replica d its contiguous part of that, so the
    replicas together see the same examples at any cluster size.

    Raises:
        ValueError: the plan does not know the data set's size, or the epoch has no such iteration.
    """
    if plan.num_examples is None or plan.iterations_per_epoch is None:
        raise ValueError("the plan has no num_examples: sampling needs the data set's size")
    if not (0 <= iteration < plan.iterations_per_epoch and 0 <= replica < plan.replicas):
        raise ValueError(
            f"iteration {iteration} on replica {replica}: an epoch has {plan.iterations_per_epoch} iterations on {plan.replicas} replicas"
        )
    part: list[int] = permutation(plan.num_examples, seed=seed, epoch=epoch)[plan.replica_slice(iteration, replica)].tolist()
    return part


def _check_counts(config: BatchConfig, replicas: int) -> None:
    if config.global_ is None and config.per_replica is None:
        raise ValueError("a batch has one of global and per_replica; the other follows from the number of replicas")
    counts = {"global": config.global_, "per_replica": config.per_replica, "micro_batches": config.micro_batches, "replicas": replicas}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")


def _contradiction(
    config: BatchConfig, global_batch_size: int, per_replica: int, replicas: int, num_examples: int | None, *, pad: bool
) -> str:
    problem = f"global batch {global_batch_size} is not replicas {replicas} x per-replica {per_replica} = {replicas * per_replica}"
    ways = []
    if _works(replace(config, global_=None), replicas, num_examples, pad=pad):
        ways.append(f"write global {replicas * per_replica}, or leave it out")
    if _works(replace(config, per_replica=None), replicas, num_examples, pad=pad):
        exact = "" if global_batch_size % replicas else f"write per_replica {global_batch_size // replicas}, or "
        ways.append(f"{exact}leave per_replica out")
    sizes = _nearest(global_batch_size, replicas * config.micro_batches, num_examples)
    alone = f"leave per_replica out; {_hint(sizes, replicas, config.micro_batches)}"
    return f"{problem}; {', or '.join(ways) or alone}"


def _works(config: BatchConfig, replicas: int, num_examples: int | None, *, pad: bool) -> bool:
    try:
        plan_batches(config, replicas=replicas, num_examples=num_examples, pad=pad)
    except ValueError:
        return False
    return True


def _global_remainder(global_batch_size: int, replicas: int, config: BatchConfig, num_examples: int | None) -> str:
    micro_batches = config.micro_batches
    equation = f"global batch {global_batch_size} = replicas {replicas} x per-replica {global_batch_size / replicas:g}"
    if global_batch_size % replicas == 0:
        equation += f", {_micro_equation(global_batch_size // replicas, micro_batches)}"
    elif micro_batches > 1:
        equation += f", each of {micro_batches} micro-batches"
    sizes = _nearest(global_batch_size, replicas * micro_batches, num_examples)
    both = "" if config.per_replica is None else ", and per_replica to match"
    return f"no whole number: {equation}; {_hint(sizes, replicas, micro_batches)}{both}"


def _micro_equation(per_replica: int, micro_batches: int) -> str:
    return f"per-replica batch {per_replica} = micro-batches {micro_batches} x micro-batch {per_replica / micro_batches:g}"


def _nearest(value: int, step: int, most: int | None) -> list[int]:
    """The multiples of step on both sides of value, as far as they are not above `most`; 0 is none."""
    below = value - value % step
    if most is not None and below > most:
        below = most - most % step
    return [multiple for multiple in (below, below + step) if multiple > 0 and (most is None or multiple <= most)]


def _hint(sizes: Sequence[int], replicas: int, micro_batches: int) -> str:
    if sizes:
        return f"nearest: {', '.join(map(str, sizes))}"
    return f"{replicas} replicas x {micro_batches} micro-batches need at least {replicas * micro_batches} training examples"


def _too_few_examples(global_batch_size: int, replicas: int, config: BatchConfig, num_examples: int) -> str:
    equation = f"global batch {global_batch_size} = replicas {replicas} x per-replica {global_batch_size // replicas}"
    problem = f"{equation} is more than the {num_examples} training examples"
    step = replicas * config.micro_batches
    largest = num_examples - num_examples % step
    if largest and config.global_ is None:
        return f"{problem}; nearest per-replica batch: {largest // replicas}"
    both = "" if config.per_replica is None else ", and per_replica to match"
    return f"{problem}; {_hint([largest] if largest else [], replicas, config.micro_batches)}{both}"
