"""What rank 0 says about a training: numbers for dtrain, at a bounded rate, and a line per epoch for people."""

from __future__ import annotations

import time
from collections.abc import Callable

from dtrain.node.metrics import log_metrics
from dtrain.trainers.loss import Evaluation, LossSum
from dtrain.trainers.occupancy import Occupancy

INTERVAL_S = 0.25  # a person reads no faster, and the job's store is spared


class Report:
    """Progress of one training. On other ranks than 0 it says nothing.

    The loss reported within an epoch is of what rank 0 hears since the last report: without a pipeline that is of its own
    examples (asking the other ranks would cost a collective); at an epoch's end it is of all ranks' examples in that epoch.
    The measured bubble of a pipeline leaves out the first iteration, which opens the connections.
    """

    def __init__(
        self,
        *,
        is_rank_0: bool,
        num_iterations: int,
        iterations_per_epoch: int,
        global_batch_size: int,
        predicted_bubble: float | None = None,  # of a pipeline
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_rank_0 = is_rank_0
        self._num_iterations = num_iterations
        self._iterations_per_epoch = iterations_per_epoch
        self._global_batch_size = global_batch_size
        self._clock = clock
        self._iteration = 0
        self._reported_at = clock()
        self._reported_iteration = 0
        self._loss = LossSum()  # since the last report
        self._predicted_bubble = predicted_bubble
        self._occupancy = Occupancy()  # since the last report
        self._epoch_occupancy = Occupancy()

    @property
    def epochs(self) -> int:
        """Of the whole training; the last one may be cut short by its number of iterations."""
        return -(-self._num_iterations // self._iterations_per_epoch)

    def after_iteration(self, loss: LossSum, occupancy: Occupancy | None = None) -> None:
        self._iteration += 1
        if not self._is_rank_0:
            return
        self._loss += loss
        if occupancy is not None and self._iteration > 1:
            self._occupancy += occupancy
            self._epoch_occupancy += occupancy
        ends_epoch = self._iteration % self._iterations_per_epoch == 0 or self._iteration == self._num_iterations
        if not ends_epoch and self._clock() - self._reported_at >= INTERVAL_S:
            log_metrics(**self._progress(self._loss), **self._bubble(self._occupancy))
            self._start_interval()

    def after_epoch(self, loss: LossSum, evaluate: Callable[[], Evaluation]) -> Evaluation:
        """Report the epoch that ends now, with its loss over all ranks; the time to evaluate counts as no training."""
        progress = self._progress(loss)
        evaluation = evaluate()
        if self._is_rank_0:
            bubble = self._bubble(self._epoch_occupancy)
            log_metrics(**progress, **bubble, evaluation={"test accuracy": evaluation.accuracy, "test loss": evaluation.loss})
            said = [
                f"epoch {progress['epoch']}/{progress['epochs']}",
                f"loss {loss.mean:{'.3f' if abs(loss.mean) < 1e6 else '.3e'}}",
                f"test accuracy {evaluation.accuracy:.1%}",
                *([f"bubble {bubble['bubble']:.1%} (predicted {bubble['predicted_bubble']:.1%})"] if bubble else []),
            ]
            print("  ".join(said), flush=True)
        self._epoch_occupancy = Occupancy()
        self._start_interval()
        return evaluation

    def _bubble(self, occupancy: Occupancy) -> dict[str, float]:
        if self._predicted_bubble is None or not occupancy.total_s:
            return {}
        return {"bubble": occupancy.bubble, "predicted_bubble": self._predicted_bubble}

    def _progress(self, loss: LossSum) -> dict[str, float]:
        elapsed_s = max(self._clock() - self._reported_at, 1e-9)
        num_samples = (self._iteration - self._reported_iteration) * self._global_batch_size
        return {
            "iteration": self._iteration,
            "iterations": self._num_iterations,
            "epoch": -(-self._iteration // self._iterations_per_epoch),
            "epochs": self.epochs,
            "loss": loss.mean,
            "samples_per_s": num_samples / elapsed_s,
        }

    def _start_interval(self) -> None:
        self._reported_at = self._clock()
        self._reported_iteration = self._iteration
        self._loss = LossSum()
        self._occupancy = Occupancy()
