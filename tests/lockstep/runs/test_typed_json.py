"""Reading checks types, and what is written is what was read."""

from dataclasses import dataclass, field

import pytest

from lockstep.runs.typed_json import Part, WrongValue, from_json, to_json


@dataclass(kw_only=True)
class Inner(Part):
    """An inner one."""

    size: int | None = None
    share: float | None = None


@dataclass(kw_only=True)
class Outer(Part):
    """An outer one."""

    name: str | None = None
    inner: Inner = field(default_factory=Inner)
    many: list[Inner] = field(default_factory=list)
    by_name: dict[str, float | str] = field(default_factory=dict)


WHOLE = {"name": "a", "inner": {"size": 3, "share": 1}, "many": [{"size": None, "share": 0.5}],
         "by_name": {"x": 0.5, "y": "nan"}, "another": {"z": 1}}  # fmt: skip


def test_json_comes_back_as_it_was():
    outer = from_json(Outer, WHOLE)
    assert (outer.inner.size, outer.many[0].share, outer.other) == (3, 0.5, {"another": {"z": 1}})
    assert to_json(outer) == WHOLE


def test_a_part_of_which_nothing_is_known_is_false_and_null():
    assert not Outer().inner and to_json(Outer(name="a"))["inner"] is None
    assert from_json(Outer, {"inner": None}).inner == Inner()
    assert from_json(Outer, {"inner": {"size": 0}}).inner


@pytest.mark.parametrize("value", [10**400, float("nan"), True, "1", [1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(WrongValue, match="^inner.share is .*, not a number$"):
        from_json(Outer, {"inner": {"share": value}})
