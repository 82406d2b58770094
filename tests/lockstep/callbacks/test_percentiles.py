"""Percentiles from few values against those of all: short series exactly, long ones within what is promised."""

import random

import pytest

from lockstep.callbacks.percentiles import KeptSamples, percentiles


def kept(values):
    samples = KeptSamples()
    for value in values:
        samples.add(value)
    return samples


def test_percentiles():
    assert percentiles([float(value) for value in range(101)]) == {"p10": 10.0, "p50": 50.0, "p90": 90.0, "max": 100.0}
    assert percentiles([4.0]) == {"p10": 4.0, "p50": 4.0, "p90": 4.0, "max": 4.0} and percentiles([]) is None


def test_a_short_series_is_kept_whole():
    values = [float(value % 97) for value in range(2000)]
    assert kept(values).summary() == percentiles(values) and kept([]).summary() is None


SERIES = {
    "noise": lambda rng, i: rng.random(),
    "alternating": lambda rng, i: float(i % 2) * 0.5 + rng.random() * 0.5,
    "growing": lambda rng, i: i / 100_000,
    "waves": lambda rng, i: (i % 64) / 64,
}


@pytest.mark.parametrize("name", SERIES)
def test_a_day_of_seconds_takes_no_more_room_and_the_percentiles_hold(name):
    rng = random.Random(1)
    values = [SERIES[name](rng, i) for i in range(100_000)]
    at = rng.randrange(len(values))
    values[at] = 2.0  # a single peak, which is not to be lost
    samples = kept(values)
    assert 1024 <= len(samples.values) < 2048
    found, exact = samples.summary(), percentiles(values)
    assert found.pop("max") == exact.pop("max") == 2.0
    assert found == pytest.approx(exact, abs=4 * 0.016)


def test_no_training_draws_other_numbers_for_it():
    random.seed(3)
    kept([1.0] * 5000)
    drawn = random.random()
    random.seed(3)
    assert random.random() == drawn
