"""Times each optimizer step and keeps what a record says of all of them, at a cost that does not grow with the run."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lockstep.callbacks.percentiles import KeptSamples

Row = tuple[float, float, float]  # seconds of a step: whole, waiting for data, own


class StepSums:
    """Sums and samples of steps."""

    def __init__(self) -> None:
        self.count, self.seconds, self.waits = 0, 0.0, 0.0
        self.wholes, self.owns = KeptSamples(), KeptSamples()

    def add(self, row: Row) -> None:
        whole, wait, own = row
        self.count, self.seconds, self.waits = self.count + 1, self.seconds + whole, self.waits + wait
        self.wholes.add(whole)
        self.owns.add(own)


class StepFigures:
    """
    Args:
        warmup_steps: steps that no figure counts; up to twice as many steps, the first one only.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.early: list[Row] | None = []
        self.later = StepSums()

    def add(self, row: Row) -> None:
        if self.early is None:
            return self.later.add(row)
        self.early.append(row)
        if len(self.early) > 2 * self.warmup_steps:
            for row in self.early[self.warmup_steps :]:
                self.later.add(row)
            self.early = None

    def sums(self) -> StepSums:
        """Of the steps that count so far."""
        if self.early is None:
            return self.later
        sums = StepSums()
        for row in self.early[1:]:
            sums.add(row)
        return sums


class StepTimes:
    """Seconds of each optimizer step: whole, waiting for data, and own (until the first loss is there).

    Args:
        done: called with the three of each step, once they are known.
        new_event: makes an object with record(), query() and elapsed_time(other) in ms; None: the clock does.
    """

    def __init__(self, done: Callable[[Row], None], new_event: Callable[[], Any] | None = None) -> None:
        self.done, self.new_event = done, new_event
        self.pending: deque[tuple[Any, Any, Any, float]] = deque()
        self.pause()

    def pause(self) -> None:
        """What comes now (validation, a checkpoint, the next epoch's start) belongs to no step."""
        self.last_end: float | None = None
        self.start: Any = None
        self.loss: Any = None
        self.wait_s = 0.0

    def batch_arrived(self) -> None:
        if self.last_end is not None:
            self.wait_s += time.perf_counter() - self.last_end
        if self.start is None:
            self.start = self._mark()

    def forward_done(self) -> None:
        if self.loss is None:
            self.loss = self._mark()

    def batch_done(self, stepped: bool) -> None:
        self.last_end = time.perf_counter()
        if not stepped or self.start is None:
            return
        end = self._mark()
        self.pending.append((self.start, self.loss or end, end, self.wait_s))
        self.start, self.loss, self.wait_s = end, None, 0.0
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Take over the steps whose events have passed; `wait` synchronises with the last."""
        if wait and self.pending and self.new_event is not None:
            self.pending[-1][2].synchronize()
        while self.pending and (self.new_event is None or self.pending[0][2].query()):
            start, loss, end, wait_s = self.pending.popleft()
            self.done((self._seconds(start, end), wait_s, self._seconds(start, loss)))

    def _seconds(self, start: Any, end: Any) -> float:
        return end - start if self.new_event is None else start.elapsed_time(end) / 1000

    def _mark(self) -> Any:
        if self.new_event is None:
            return time.perf_counter()
        event = self.new_event()
        event.record()
        return event


def cuda_events() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
