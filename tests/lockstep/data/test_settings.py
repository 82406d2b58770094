"""What is stated, what weights want, and what the data have."""

import pytest

from lockstep.data.framing import settle
from lockstep.runs.errors import UserError

OWN = {"mean": (0.1, 0.2, 0.3), "std": (0.2, 0.2, 0.2)}
AUTO = dict.fromkeys(("mean", "std", "crop_pct", "interpolation"), "auto")
WANTED = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.9, "interpolation": "bicubic"}


def test_auto_is_the_weights_and_without_them_the_datas():
    found = settle(AUTO, OWN, WANTED, 3)
    assert (found.mean, found.std, found.crop_pct, found.interpolation) == ([0.5] * 3, [0.25] * 3, 0.9, "bicubic")
    assert set(found.from_weights) == set(WANTED) and found.against_weights == ()
    found = settle(AUTO, OWN, {}, 3)
    assert (found.mean, found.std, found.crop_pct, found.interpolation) == ([0.1, 0.2, 0.3], [0.2] * 3, 1, "bilinear")
    assert found.from_weights == ()


def test_what_is_stated_counts_and_is_compared_with_the_weights():
    stated = {"mean": 0.5, "std": [0.2, 0.2, 0.2], "crop_pct": 1.0, "interpolation": "auto"}
    found = settle(stated, OWN, WANTED, 3)
    assert (found.mean, found.std, found.crop_pct) == ([0.5] * 3, [0.2] * 3, 1.0)
    assert found.from_weights == ("interpolation",) and found.against_weights == ("std", "crop_pct")
    assert settle({**AUTO, "mean": None}, OWN, WANTED, 3).mean == [0.1, 0.2, 0.3]


def test_weights_of_colour_images_on_grey_ones():
    wanted = {"mean": [0.1, 0.2, 0.3], "std": [0.2, 0.3, 0.4]}
    found = settle(AUTO, {"mean": (0.7,), "std": (0.8,)}, wanted, 1)
    assert found.mean == [pytest.approx(0.2)] and found.std == [pytest.approx(0.3)] and not found.against_weights


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"mean": [0.5, 0.5]}, "data.mean=.* must be auto, a number, or one for each of 3 channels"),
        ({"mean": "imagenet"}, "data.mean=imagenet must be auto, a number"),
        ({"std": 0}, "data.std=.* must be positive"),
    ],
)
def test_values_that_are_none(stated, message):
    with pytest.raises(UserError, match=message):
        settle({**AUTO, **stated}, OWN, {}, 3)
