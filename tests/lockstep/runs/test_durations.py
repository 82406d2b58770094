"""A span of time as a user writes it."""

import pytest

from lockstep.runs.durations import duration, seconds_of
from lockstep.runs.errors import UserError


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        (90, 90), (0.5, 0.5), ("5400", 5400), ("90m", 5400), ("90 min", 5400), ("1.5h", 5400), ("1d", 86400),
        ("20s", 20), ("00:01:30:00", 5400), ("01:30:00", 5400), ("2:05", 125), ("1:00:00:01", 86401),
    ],
)  # fmt: skip
def test_seconds_of_what_is_a_time(stated, wanted):
    assert seconds_of(stated, "trainer.max_time") == wanted


@pytest.mark.parametrize("stated", [0, -5, True, "soon", "90 weeks", "1:2:3:4:5", "1:x", "", "0m", float("nan"), "inf"])
def test_what_is_none_is_refused(stated):
    with pytest.raises(UserError, match="trainer.max_time=.*: give days:hours:minutes:seconds as 00:01:30:00"):
        seconds_of(stated, "trainer.max_time")


def test_a_time_duration():
    assert [duration(s) for s in (0.4, 48, 252, 5400, 11220, 187261)] == [
        "0.4 s", "48 s", "4 min 12 s", "1 h 30 min", "3 h 7 min", "2 d 4 h",
    ]  # fmt: skip
