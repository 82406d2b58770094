"""Steps under a clock that is set by hand, events without a GPU, and figures of runs of any length."""

import pytest

from lockstep.callbacks.step_times import StepFigures, StepTimes


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def test_validation_and_checkpoints_belong_to_no_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("lockstep.callbacks.step_times.time", clock)
    rows = []
    steps = StepTimes(rows.append)

    def step(wait, forward, rest):
        clock.now += wait
        steps.batch_arrived()
        clock.now += forward
        steps.forward_done()
        clock.now += rest
        steps.batch_done(stepped=True)

    step(9, 1, 2)  # the wait before the first batch is start-up
    step(3, 1, 2)
    steps.pause()
    clock.now += 100
    step(9, 1, 4)
    assert rows == [(3, 0, 1), (6, 3, 4), (5, 0, 1)]


class Event:
    """A CUDA event on a device whose clock is `now` and that has passed everything before `passed`."""

    now, passed, synchronized = 0.0, 0.0, 0

    def record(self):
        Event.now += 10.0
        self.at = Event.now

    def query(self):
        return self.at <= Event.passed

    def synchronize(self):
        Event.synchronized += 1
        Event.passed = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_events_are_read_only_when_they_have_passed():
    Event.now = Event.passed = 0.0
    Event.synchronized = 0
    rows = []
    steps = StepTimes(rows.append, Event)
    for _ in range(3):
        steps.batch_arrived()
        steps.forward_done()
        steps.batch_done(stepped=True)
    assert rows == [] and Event.synchronized == 0
    Event.passed = 50.0
    steps.collect()
    assert [(round(whole, 3), round(own, 3)) for whole, _, own in rows] == [(0.02, 0.01)] * 2
    steps.collect(wait=True)
    assert len(rows) == 3 and Event.synchronized == 1


def test_the_first_steps_are_left_out_and_in_short_runs_the_first_one_only():
    for steps, counted in [(0, 0), (1, 0), (5, 4), (20, 19), (21, 11), (22, 12)]:
        figures = StepFigures(warmup_steps=10)
        for step in range(steps):
            figures.add((float(step), 0.5, 0.25))
        sums = figures.sums()
        assert (sums.count, sums.waits) == (counted, 0.5 * counted)
        assert sums.seconds == sum(range(steps - counted, steps)) and len(sums.wholes.values) == counted


def test_what_is_kept_does_not_grow_with_the_run_and_the_mean_is_exact():
    figures = StepFigures(warmup_steps=10)
    for step in range(50_000):
        figures.add((1.0 + step % 2, 0.0, 0.5))
    sums = figures.sums()
    assert figures.early is None and len(sums.wholes.values) < 2048 > len(sums.owns.values)
    assert sums.seconds / sums.count == pytest.approx(1.5, abs=1e-4)
