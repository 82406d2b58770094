"""Write docs/schemas/, JSON schemas for completion in an editor.    (make docs)

A group's keys are those of its yaml files and the parameters of what their `_target_` names; comments describe them.
train.json is for train.yaml, recipes and debugging runs, in which a group holds keys of any of its options.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

from lockstep.config.declared import OPEN, REFUSED_TRAINER_KEYS, TRAINER  # noqa: E402
from lockstep.config.help import groups, keys  # noqa: E402
from lockstep.config.signatures import signature_of  # noqa: E402

WORD = {"type": "string", "pattern": r"^(auto|max|\$\{.*)$"}  # stands where a number or a truth value may
SILENT: dict[str, Any] = {}  # of a parameter that a yaml leaves to its class: told by identity, as a list's is {} too
DRAFT = "https://json-schema.org/draft-07/schema"
SKIPPED = ("debug", "experiment", "hydra", "paths")


def schema_of(path: Path, group: str) -> dict[str, Any]:
    """Of one option's yaml."""
    comments = {key.name: key.comment for key in keys(path)}
    return _of_value(yaml.safe_load(path.read_text()) or {}, "", comments, group in OPEN)


def _of_value(value: Any, place: str, comments: dict[str, str], is_open: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": comments[place]} if place in comments else {}
    if isinstance(value, bool):
        return schema | {"anyOf": [{"type": ["boolean", "null"]}, WORD]}
    if isinstance(value, int | float):
        return schema | {"anyOf": [{"type": ["number", "null"]}, WORD]}
    if not isinstance(value, dict):
        return schema
    found = signature_of(str(value["_target_"])) if "_target_" in value else None
    properties: dict[str, Any] = {name: SILENT for name in (found.names if found else ())}
    for name, inner in value.items():
        properties[name] = _of_value(inner, f"{place}.{name}".lstrip("."), comments, False)
    closed = "_target_" in value and found is not None and not found.any_name
    return schema | {
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": is_open or not closed,
    }


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The properties of two options; where they differ, what either allows."""
    return {**other, **{name: _either(mine, other.get(name, mine)) for name, mine in one.items()}}


def _either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if one is SILENT or other is SILENT:
        return other if one is SILENT else one
    described = {key: schema["description"] for schema in (other, one) for key in schema if key == "description"}
    rest, others = ({key: value for key, value in schema.items() if key != "description"} for schema in (one, other))
    if rest == others:
        return described | rest
    if "properties" not in rest or "properties" not in others:
        return described
    merged = _merged(rest["properties"], others["properties"])
    more = rest["additionalProperties"] or others["additionalProperties"]
    return described | {"type": ["object", "null"], "properties": merged, "additionalProperties": more}


def group_schema(configs: Path, group: str) -> dict[str, Any]:
    """Of every option of a group: its keys are those of any of them."""
    found = [schema_of(option.path, group) for option in groups(configs)[group]]
    properties: dict[str, Any] = {"defaults": {"type": "array"}}
    for schema in found:
        properties = _merged(properties, schema["properties"])
    if group == "trainer":
        names = signature_of(TRAINER).names
        properties = {name: {} for name in names if name not in REFUSED_TRAINER_KEYS} | properties
    return {"$schema": DRAFT, "title": f"configs/{group}", "type": "object",
            "properties": properties, "additionalProperties": group in OPEN}  # fmt: skip


def root_schema(configs: Path, of_groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of train.yaml, with what it says of a group beside the group's own keys."""
    stated = schema_of(configs / "train.yaml", "")["properties"]
    stated |= {group: stated[group] | {"additionalProperties": False} for group in of_groups if group in stated}
    within = {group: {**schema, "type": ["object", "null"]} for group, schema in of_groups.items()}
    extra: dict[str, Any] = {"defaults": {"type": "array"}, "hydra": {"type": "object"}, "paths": {"type": "object"}}
    return {"$schema": DRAFT, "title": "configs", "type": "object",
            "properties": _merged(stated, within | extra), "additionalProperties": False}  # fmt: skip


def schemas(configs: Path) -> dict[str, str]:
    """The text of each file of docs/schemas."""
    found = {group: group_schema(configs, group) for group in groups(configs) if group not in SKIPPED}
    found["train"] = root_schema(configs, found)
    return {f"{name}.json": json.dumps(schema, indent=1) + "\n" for name, schema in found.items()}


if __name__ == "__main__":
    folder = REPOSITORY / "docs" / "schemas"
    folder.mkdir(exist_ok=True)
    for name, text in schemas(REPOSITORY / "configs").items():
        (folder / name).write_text(text)
