"""Intervals of pairs: scipy's figures, few false differences, and sentences that claim no more."""

import math
import statistics

import numpy as np
import pytest
import scipy.stats

from lockstep.logbook.paired import (
    Sample,
    describe_difference,
    format_rounded,
    format_with_error,
    is_significant,
    pairs_needed,
    t_quantile,
)

REPETITIONS = 2000


def test_the_figures_are_scipys():
    generator = np.random.default_rng(0)
    for pairs in (3, 5, 20):
        one = generator.normal(0.9, 0.02, pairs)
        other = generator.normal(0.8, 0.02, pairs)
        sample = Sample(list(one - other))
        expected = scipy.stats.ttest_rel(one, other).confidence_interval(0.95)
        assert sample.mean - sample.half_width == pytest.approx(expected.low)
        assert sample.mean + sample.half_width == pytest.approx(expected.high)
        assert sample.error == pytest.approx(scipy.stats.sem(one - other))
        assert t_quantile(0.975, pairs) == pytest.approx(scipy.stats.t.ppf(0.975, pairs))


def test_folds_have_nadeau_and_bengios_interval():
    values = [0.1, 0.3, 0.2, 0.4, 0.15]
    sample = Sample(values, fold_ratio=0.25)
    variance = (1 / 5 + 1 / 4) * statistics.variance(values)
    assert sample.half_width == pytest.approx(scipy.stats.t.ppf(0.975, 4) * math.sqrt(variance))


@pytest.mark.parametrize("pairs", [3, 5, 10])
def test_equal_settings_seldom_differ(pairs):
    generator = np.random.default_rng(pairs)
    told = 0
    for _ in range(REPETITIONS):
        # The accuracies of two equal settings on 360 images, beside the effect of the seed.
        skill = generator.normal(0.95, 0.01, pairs).clip(0, 1)
        one, other = generator.binomial(360, skill, (2, pairs)) / 360
        told += is_significant(Sample(list(one - other)))
    assert told / REPETITIONS < 0.1


def test_so_many_pairs_tell_the_difference_that_is_named():
    generator = np.random.default_rng(1)
    pairs = pairs_needed(deviation=0.5, difference=0.4)
    told = 0
    for _ in range(REPETITIONS):
        told += is_significant(Sample(list(generator.normal(0.4, 0.5, pairs))))
    assert 0.87 < told / REPETITIONS < 0.95


@pytest.mark.parametrize(
    ("differences", "minimize", "text"),
    [
        ([0.2, 0.5, 0.3, 0.4, 0.3], False, "better by 0.34 ± 0.14 points (95 %, 5 pairs)"),
        ([0.2, 0.5, 0.3, 0.4, 0.3], True, "worse by 0.34 ± 0.14 points (95 %, 5 pairs)"),
        ([-0.2, -0.5, -0.3, -0.4, -0.3], True, "better by 0.34 ± 0.14 points (95 %, 5 pairs)"),
        (
            [0.2415, -0.2415, 0.0],
            False,
            "no difference larger than 0.6 points can be told from these 3 pairs; "
            "about 9 would tell 0.3",
        ),
        ([0.4, 0.5], False, "2 pairs give no interval, which takes 3 or more"),
        (
            [0.25, 0.25, 0.25],
            False,
            "differs by 0.25 points in each of 3 pairs: no spread to make an interval of",
        ),
        ([0.0, 0.0, 0.0], False, "equal in all 3 pairs"),
    ],
)
def test_the_sentence_says_what_the_pairs_say(differences, minimize, text):
    assert describe_difference(Sample(differences), minimize=minimize, unit="points") == text


def test_the_sentence_of_folds_names_the_correction():
    told = describe_difference(Sample([1.2, 1.5, 1.3], 0.5), minimize=False)
    assert told.startswith("better by 1.33 ± ") and "Nadeau and Bengio" in told
    not_told = describe_difference(Sample([1.2, -1.5, 1.3], 0.5), minimize=False)
    assert "share training images" in not_told and "would tell" not in not_told


def test_numbers_have_the_digits_of_their_error():
    assert format_with_error(12.345, 0.0996) == "12.35 ± 0.10"
    assert format_with_error(1234.5, 120.0, "images") == "1234 ± 120 images"
    assert [format_rounded(value, 1) for value in (0.096, 123, 0.00054)] == ["0.1", "100", "0.0005"]
