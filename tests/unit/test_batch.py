"""The batch arithmetic, as equations, and the sampling at every cluster size."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from dtrain.trainers.batch import BatchPlan, indices, plan_batches
from dtrain.trainers.config import BatchConfig


@pytest.mark.parametrize(
    ("config", "replicas", "num_examples", "expected"),
    [
        (BatchConfig(global_=500), 1, 5000, BatchPlan(500, 1, 500, 1, 500, 5000, 10)),
        (BatchConfig(global_=500), 4, 5000, BatchPlan(500, 4, 125, 1, 125, 5000, 10)),
        (BatchConfig(per_replica=64), 4, 1437, BatchPlan(256, 4, 64, 1, 64, 1437, 5)),  # 157 examples wait for another epoch's shuffle
        (BatchConfig(per_replica=64, micro_batches=4), 2, None, BatchPlan(128, 2, 64, 4, 16, None, None)),
        (BatchConfig(global_=8, micro_batches=2), 4, 8, BatchPlan(8, 4, 2, 2, 1, 8, 1)),
        (BatchConfig(global_=8, per_replica=4), 2, None, BatchPlan(8, 2, 4, 1, 4, None, None)),  # both, and they agree
    ],
)
def test_the_plan_of_a_batch(config: BatchConfig, replicas: int, num_examples: int | None, expected: BatchPlan) -> None:
    assert plan_batches(config, replicas=replicas, num_examples=num_examples) == expected


@pytest.mark.parametrize(
    ("config", "replicas", "num_examples", "message"),
    [
        (BatchConfig(global_=250), 4, None, "no whole number: global batch 250 = replicas 4 x per-replica 62.5; nearest: 248, 252"),
        (BatchConfig(global_=3), 4, None, "no whole number: global batch 3 = replicas 4 x per-replica 0.75; nearest: 4"),
        (
            BatchConfig(global_=250, micro_batches=4),
            4,
            None,
            "no whole number: global batch 250 = replicas 4 x per-replica 62.5, each of 4 micro-batches; nearest: 240, 256",
        ),
        (
            BatchConfig(global_=248, micro_batches=4),
            4,
            None,
            "no whole number: global batch 248 = replicas 4 x per-replica 62, "
            "per-replica batch 62 = micro-batches 4 x micro-batch 15.5; nearest: 240, 256",
        ),
        (
            BatchConfig(per_replica=62, micro_batches=4),
            4,
            None,
            "no whole number: per-replica batch 62 = micro-batches 4 x micro-batch 15.5; nearest: 60, 64",
        ),
        (
            BatchConfig(global_=2000),
            4,
            1437,
            "global batch 2000 = replicas 4 x per-replica 500 is more than the 1437 training examples; nearest: 1436",
        ),
        (
            BatchConfig(per_replica=500),
            4,
            1437,
            "global batch 2000 = replicas 4 x per-replica 500 is more than the 1437 training examples; nearest per-replica batch: 359",
        ),
        (
            BatchConfig(global_=8, micro_batches=2),
            4,
            5,
            "global batch 8 = replicas 4 x per-replica 2 is more than the 5 training examples; "
            "4 replicas x 2 micro-batches need at least 8 training examples",
        ),
        (
            BatchConfig(),
            1,
            None,
            "a batch has one of global and per_replica; the other follows from the number of replicas",
        ),
        (
            BatchConfig(global_=8, per_replica=4),
            4,
            None,
            "global batch 8 is not replicas 4 x per-replica 4 = 16; "
            "write global 16, or leave it out, or write per_replica 2, or leave per_replica out",
        ),
        (
            BatchConfig(global_=8, per_replica=4),
            3,
            None,
            "global batch 8 is not replicas 3 x per-replica 4 = 12; write global 12, or leave it out",
        ),
        (
            BatchConfig(global_=9, per_replica=2, micro_batches=4),
            2,
            100,
            "global batch 9 is not replicas 2 x per-replica 2 = 4; leave per_replica out; nearest: 8, 16",
        ),
        (BatchConfig(global_=0), 1, None, "global is 0; it must be at least 1"),
        (BatchConfig(global_=8, micro_batches=0), 1, None, "micro_batches is 0; it must be at least 1"),
    ],
)
def test_a_remainder_is_an_error_with_what_works(config: BatchConfig, replicas: int, num_examples: int | None, message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_batches(config, replicas=replicas, num_examples=num_examples)
    assert str(error.value) == message


@pytest.mark.parametrize("pad", [False, True])
def test_every_size_that_is_offered_works(pad: bool) -> None:
    num_offered = 0
    for size, replicas, micro_batches, num_examples in product(range(1, 20), range(1, 5), range(1, 4), (5, 12, None)):
        for key in ("global_", "per_replica"):
            config = BatchConfig(**{key: size}, micro_batches=micro_batches)
            try:
                plan_batches(config, replicas=replicas, num_examples=num_examples, pad=pad)
            except ValueError as error:
                for other in map(int, re.findall(r"\d+", str(error).partition("; nearest")[2])):
                    plan_batches(replace(config, **{key: other}), replicas=replicas, num_examples=num_examples, pad=pad)
                    num_offered += 1
    assert num_offered > 100


def test_the_plan_says_its_equation() -> None:
    plan = plan_batches(BatchConfig(global_=256, micro_batches=2), replicas=4, num_examples=None)
    assert plan.equation == "global batch 256 = replicas 4 x per-replica 64 (micro-batches 2 x 32)"


def test_the_replicas_see_the_same_examples_at_any_cluster_size() -> None:
    def global_batch(replicas: int, epoch: int, iteration: int) -> list[int]:
        plan = plan_batches(BatchConfig(global_=24), replicas=replicas, num_examples=100)
        parts = [indices(plan, seed=7, epoch=epoch, iteration=iteration, replica=replica) for replica in range(replicas)]
        assert {len(part) for part in parts} == {24 // replicas}
        return [index for part in parts for index in part]

    for epoch in range(2):
        for iteration in range(4):
            assert len({tuple(global_batch(replicas, epoch, iteration)) for replicas in (1, 2, 3, 4, 8)}) == 1


def test_an_epoch_sees_no_example_twice_and_each_epoch_has_its_own_order() -> None:
    plan = plan_batches(BatchConfig(global_=24), replicas=2, num_examples=100)

    def epoch_order(seed: int, epoch: int) -> list[int]:
        places = [(iteration, replica) for iteration in range(4) for replica in range(2)]
        return [
            index for iteration, replica in places for index in indices(plan, seed=seed, epoch=epoch, iteration=iteration, replica=replica)
        ]

    orders = [epoch_order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(len(set(order)) == 96 and set(order) <= set(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9  # seed 1 does not replay seed 0 an epoch later


def test_an_iteration_beyond_the_epoch_is_refused() -> None:
    plan = plan_batches(BatchConfig(global_=24), replicas=2, num_examples=100)
    with pytest.raises(ValueError, match="an epoch has 4 iterations"):
        indices(plan, seed=0, epoch=0, iteration=4, replica=0)
