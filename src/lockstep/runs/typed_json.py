"""Dataclasses as JSON: read with each value checked against its type, written, and described by a JSON schema.

A field may be a Part, a list or dict of known types, a union of plain types, or Any. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

P = TypeVar("P", bound="Part")
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
SCHEMA_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
WRONG = object()
_kinds: dict[type, dict[str, Any]] = {}


class WrongValue(ValueError):
    """A value that is not of its field's type; the message names the field."""


@dataclass(kw_only=True)
class Part:
    """A JSON object. Never None: one of which nothing is known is false, and is written as null.

    Attributes:
        other: keys that this version does not declare, written again as they were.
    """

    other: dict[str, Any] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return self != type(self)()

    def take(self, values: Mapping[str, object], *, tolerant: bool = False) -> None:
        """Set fields from JSON values, or from values of their own types.

        Args:
            tolerant: a wrong value leaves its field as it is.
        Raises:
            WrongValue
        """
        self._take(values, "", tolerant)

    def _take(self, values: Mapping[str, object], place: str, tolerant: bool) -> None:
        kinds = kinds_of(type(self))
        for key, value in values.items():
            name = f"{key}_" if f"{key}_" in kinds else key
            if name not in kinds:
                self.other[key] = value
            elif (taken := _read(kinds[name], value, f"{place}{key}", tolerant)) is not WRONG:
                setattr(self, name, taken)


def kinds_of(part: type[Part]) -> dict[str, Any]:
    """{field: its type}; a field whose JSON key is a keyword of Python has `_` behind it."""
    if part not in _kinds:
        _kinds[part] = {name: kind for name, kind in get_type_hints(part).items() if name != "other"}
    return _kinds[part]


def from_json(part: type[P], value: object, *, tolerant: bool = False, place: str = "") -> P:
    """
    Raises:
        WrongValue: a value is not of its field's type, and not tolerant.
    """
    found = _read(part, value, place, tolerant)
    return part() if found is WRONG else found


def to_json(value: Any) -> Any:
    """What json.dumps takes; the fields of a part in their order."""
    if isinstance(value, Part):
        held = {name.rstrip("_"): getattr(value, name) for name in kinds_of(type(value))}
        empty = {name: None if isinstance(item, Part) and not item else to_json(item) for name, item in held.items()}
        return {**empty, **value.other}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def _read(kind: Any, value: object, place: str, tolerant: bool) -> Any:
    """The value as `kind`; WRONG where it is none, and tolerant."""
    if kind is Any:
        return value
    if isinstance(kind, type) and issubclass(kind, Part):
        return _read_part(kind, value, place, tolerant)
    if get_origin(kind) is list and isinstance(value, list | tuple):
        inner = get_args(kind)[0]
        read = [_read(inner, item, f"{place}[{i}]", tolerant) for i, item in enumerate(value)]
        return [item for item in read if item is not WRONG]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        inner = get_args(kind)[1]
        pairs = {key: _read(inner, item, f"{place}.{key}", tolerant) for key, item in value.items()}
        return {key: item for key, item in pairs.items() if item is not WRONG}
    if any(_is(value, plain) for plain in _options(kind)):
        return value
    return _refuse(kind, value, place, tolerant)


def _read_part(kind: type[Part], value: object, place: str, tolerant: bool) -> Any:
    if isinstance(value, kind):
        return value
    if value is not None and not isinstance(value, Mapping):
        return _refuse(kind, value, place, tolerant)
    part = kind()
    part._take(value or {}, f"{place}." if place else "", tolerant)
    return part


def _refuse(kind: Any, value: object, place: str, tolerant: bool) -> object:
    if tolerant:
        return WRONG
    wanted = " or ".join(_name(option) for option in _options(kind) if option is not NoneType)
    raise WrongValue(f"{place or 'it'} is {str(repr(value))[:60]}, not {wanted}")


def _name(kind: Any) -> str:
    return NAMES.get(kind) or ("a list" if get_origin(kind) is list else "a mapping")


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _is(value: object, plain: Any) -> bool:
    if isinstance(value, bool) or plain is bool:
        return isinstance(value, bool) and plain is bool
    if plain is float:
        return isinstance(value, int | float) and -1e300 < value < 1e300 and math.isfinite(value)
    return plain in NAMES and isinstance(value, plain)


def json_schema(part: type[Part], title: str) -> dict[str, object]:
    """As JSON Schema draft 2020-12. Keys that are not declared are allowed: another version's."""
    definitions: dict[str, object] = {}
    whole = _object(part, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **whole, "$defs": definitions,
    }  # fmt: skip


def _object(part: type[Part], definitions: dict[str, object]) -> dict[str, object]:
    properties = {name.rstrip("_"): _schema(kind, definitions) for name, kind in kinds_of(part).items()}
    return {"description": " ".join((part.__doc__ or "").split()), "type": "object", "properties": properties}


def _schema(kind: Any, definitions: dict[str, object]) -> dict[str, object]:
    if kind is Any:
        return {}
    if isinstance(kind, type) and issubclass(kind, Part):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # a place first: a part may hold itself
            definitions[kind.__name__] = _object(kind, definitions)
        return {"anyOf": [{"$ref": f"#/$defs/{kind.__name__}"}, {"type": "null"}]}
    if get_origin(kind) is list:
        return {"type": "array", "items": _schema(get_args(kind)[0], definitions)}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _schema(get_args(kind)[1], definitions)}
    names = [SCHEMA_NAMES[option] for option in _options(kind)]
    return {"type": names if len(names) > 1 else names[0]}
