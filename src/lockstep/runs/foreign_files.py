"""Read JSON and YAML of plain values. What is neither is a NotReadable, a ValueError."""

import json
from pathlib import Path
from typing import Any


class NotReadable(ValueError):
    """A file that is no JSON or YAML; the message is a short reason."""


def read_json(path: Path) -> Any:
    return parse_json(path.read_bytes())


def parse_json(data: bytes | str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotReadable(" ".join(str(error).split())) from None


def read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise NotReadable(" ".join(str(error).split())[:300]) from None
