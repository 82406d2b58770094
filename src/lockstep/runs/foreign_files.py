"""Small JSON and YAML files that others may have written: limits on bytes, depth and values, and one error.

Imports no torch.
"""

import json
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 32 * 2**20
MAX_YAML_BYTES = 2**20
MAX_DEPTH = 64
MAX_YAML_VALUES = 100_000  # an alias counts as much as what it repeats


class NotReadable(ValueError):
    """A file that is no JSON or YAML, or beyond the limits; the message is a short reason."""


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """
    Raises:
        NotReadable: it is no JSON, or beyond the limits.
        OSError: there is no such file.
    """
    return parse_json(read_limited(path, max_bytes))


def parse_json(data: bytes | str) -> Any:
    """
    Raises:
        NotReadable: it is no JSON, or deeper than MAX_DEPTH.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotReadable(_reason(error)) from None
    _check_depth(value)
    return value


def read_yaml(path: Path) -> Any:
    """
    Raises:
        NotReadable: it is no YAML of plain values, or beyond the limits.
        OSError: there is no such file.
    """
    return parse_yaml(read_limited(path, MAX_YAML_BYTES))


def parse_yaml(data: bytes | str) -> Any:
    """
    Raises:
        NotReadable: it is no YAML of plain values, or beyond the limits; a tag that asks for code is none.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_size(yaml.parse(data, Loader=loader))
        return yaml.load(data, Loader=loader)
    except NotReadable:
        raise
    except Exception as error:  # a date of the 40th of May, a list as a key: PyYAML raises nearly anything
        raise NotReadable(_reason(error)) from None


def read_limited(path: Path, max_bytes: int) -> bytes:
    """
    Raises:
        NotReadable: it is longer, or no plain file: to open a pipe would wait for ever.
        OSError: there is no such file.
    """
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise NotReadable("it is no plain file")
    if facts.st_size > max_bytes:
        raise NotReadable(f"it is longer than {max_bytes} bytes")
    with path.open("rb") as file:
        return file.read(facts.st_size)


def _check_depth(value: Any) -> None:
    """Level by level, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            items = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            if not {dict, list}.isdisjoint(map(type, items)):
                inner += [one for one in items if isinstance(one, dict | list)]
        if not inner:
            return
        level = inner
    raise NotReadable(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_size(events: Any) -> None:
    """Count YAML's values before any is made: a few hundred bytes of aliases stand for billions.

    Raises:
        NotReadable: too many, too deep, or an alias within what it names.
    """
    import yaml

    weights: dict[str, int] = {}  # of what an anchor names, once it is complete
    open_: list[tuple[str | None, int]] = []  # of each open list or mapping its anchor, and the count where it began
    count = 0
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, began = open_.pop()
            if anchor is not None:
                weights[anchor] = count - began
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in weights:
                raise NotReadable(f"the alias {str(event.anchor)[:40]!r} names nothing before it, or itself")
            count += weights[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                weights.pop(str(event.anchor), None)
                open_.append((event.anchor, count - 1))
            elif event.anchor is not None:
                weights[event.anchor] = 1
        if len(open_) > MAX_DEPTH:
            raise NotReadable(f"it is nested deeper than {MAX_DEPTH} levels")
        if count > MAX_YAML_VALUES:
            raise NotReadable(f"it holds more than {MAX_YAML_VALUES} values, aliases written out")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
