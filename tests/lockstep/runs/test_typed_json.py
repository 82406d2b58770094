"""Reading checks types, tolerant reading leaves out what is wrong, and the schema says the same as the code."""

from dataclasses import dataclass, field

import pytest

from lockstep.runs.typed_json import Part, WrongValue, from_json, json_schema, to_json


@dataclass(kw_only=True)
class Inner(Part):
    """An inner one."""

    global_: int | None = None
    share: float | None = None


@dataclass(kw_only=True)
class Outer(Part):
    """An outer one."""

    name: str | None = None
    inner: Inner = field(default_factory=Inner)
    many: list[Inner] = field(default_factory=list)
    by_name: dict[str, float | str] = field(default_factory=dict)


WHOLE = {"name": "a", "inner": {"global": 3, "share": 1}, "many": [{"global": None, "share": 0.5}],
         "by_name": {"x": 0.5, "y": "nan"}, "another": {"z": 1}}  # fmt: skip


def test_json_comes_back_as_it_was():
    outer = from_json(Outer, WHOLE)
    assert (outer.inner.global_, outer.many[0].share, outer.other) == (3, 0.5, {"another": {"z": 1}})
    assert to_json(outer) == WHOLE


def test_a_part_of_which_nothing_is_known_is_false_and_null():
    assert not Outer().inner and to_json(Outer(name="a"))["inner"] is None
    assert from_json(Outer, {"inner": None}).inner == Inner()
    assert from_json(Outer, {"inner": {"global": 0}}).inner


def test_tolerant_reading_leaves_out_what_is_wrong():
    values = {"name": 5, "inner": {"global": "x", "share": 0.5}, "many": ["no", {"global": 2}], "by_name": {"x": []}}
    outer = from_json(Outer, values, tolerant=True)
    assert (outer.name, outer.inner, outer.many, outer.by_name) == (None, Inner(share=0.5), [Inner(global_=2)], {})
    assert from_json(Outer, [1], tolerant=True) == Outer()


@pytest.mark.parametrize("value", [10**400, float("nan"), True, "1", [1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(WrongValue, match="^inner.share is .*, not a number$"):
        from_json(Outer, {"inner": {"share": value}})


def test_the_schema_names_types_and_inner_parts():
    schema = json_schema(Outer, "T")
    inner = {"anyOf": [{"$ref": "#/$defs/Inner"}, {"type": "null"}]}
    assert schema["properties"] == {
        "name": {"type": ["string", "null"]}, "inner": inner, "many": {"type": "array", "items": inner},
        "by_name": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
    }  # fmt: skip
    assert schema["$defs"]["Inner"]["properties"]["global"] == {"type": ["integer", "null"]}
