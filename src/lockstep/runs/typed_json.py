"""Dataclasses as JSON objects: each value is checked against the type of its field. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

P = TypeVar("P", bound="Part")
NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_known: dict[type, dict[str, Any]] = {}


class WrongValue(ValueError):
    """A value that does not have its field's type; the message names the field."""


@dataclass(kw_only=True)
class Part:
    """A JSON object. One without any value is false.

    Attributes:
        other: values of keys that have no field, written again as they were read.
    """

    other: dict[str, Any] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return self != type(self)()

    def take(self, values: Mapping[str, object], place: str = "") -> None:
        """Set fields from JSON values or from values of their own types.

        Raises:
            WrongValue: a value does not have its field's type.
        """
        kinds = _kinds(type(self))
        for key, value in values.items():
            if key in kinds:
                setattr(self, key, _read(kinds[key], value, f"{place}{key}"))
            else:
                self.other[key] = value


def _kinds(part: type[Part]) -> dict[str, Any]:
    if part not in _known:
        _known[part] = {name: kind for name, kind in get_type_hints(part).items() if name != "other"}
    return _known[part]


def from_json(part: type[P], value: object, place: str = "") -> P:
    """Return `value` as a `part`; raise WrongValue if it is none."""
    found: P = _read(part, value, place)
    return found


def to_json(value: Any) -> Any:
    """Return what json.dumps takes, with the fields of a part in their order and null for a part without values."""
    if isinstance(value, Part):
        held = {name: getattr(value, name) for name in _kinds(type(value))}
        shown = {name: None if isinstance(item, Part) and not item else to_json(item) for name, item in held.items()}
        return {**shown, **value.other}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def _read(kind: Any, value: object, place: str) -> Any:
    origin = get_origin(kind)
    if kind is Any or isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, bool | float):
        return value
    if value is None and (origin in (list, dict) or isinstance(kind, type) and issubclass(kind, Part)):
        return (origin or kind)()
    if origin is list and isinstance(value, list | tuple):
        return [_read(get_args(kind)[0], item, f"{place}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {key: _read(get_args(kind)[1], item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Part) and isinstance(value, Mapping):
        part = kind()
        part.take(value, f"{place}." if place else "")
        return part
    plain = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if any(_is_plain(value, option) for option in plain):
        return value
    wanted = " or ".join(NAMES.get(get_origin(k) or k, "a mapping") for k in plain if k is not NoneType)
    raise WrongValue(f"{place or 'it'} is {str(repr(value))[:60]}, not {wanted}")


def _is_plain(value: object, kind: Any) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float) and -1e300 < value < 1e300
    return kind in (int, str, NoneType) and isinstance(value, kind)
