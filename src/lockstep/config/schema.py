"""The yaml files as the schema: their groups, options and keys.

A group is a folder and an option a yaml file in it, described by its first comment line; the
comment after a key describes the key. A key exists if train.yaml or the chosen option of its group
lists it. An experiment declares no keys. The parameters of a `_target_` are checked when it is
built (config/instantiate.py), because this file imports no torch.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lockstep.config.keys import INTERNAL_KEYS
from lockstep.records.config import Config

KEY = re.compile(
    r"^(?P<indent> *)(?P<key>[A-Za-z_][\w]*):(?P<value>[^#]*?)(?:\s+# (?P<comment>.+))?$"
)
# Groups whose entries the user names.
FREE_GROUPS = ("callbacks", "logger", "metrics")
REFUSED_TRAINER_KEYS = {
    "callbacks": "use callbacks=",
    "logger": "use logger=",
    "default_root_dir": "use paths.log_dir",
    "fast_dev_run": "use debug=fast_dev_run",
    "enable_checkpointing": "use '~callbacks.checkpoints'",
    "enable_progress_bar": "use '~callbacks.progress' or callbacks=rich_progress_bar",
    "enable_model_summary": "use callbacks=model_summary",
    "barebones": "use callbacks=none",
}
# The options that --help lists before the others of their group.
EVERYDAY_OPTIONS = {"trainer": ("cpu", "gpu", "ddp", "fsdp", "ddp_sim", "fsdp_sim")}


class Option(NamedTuple):
    """One yaml file of a group."""

    name: str
    description: str
    path: Path


class Key(NamedTuple):
    """One commented key by its full dotted name, e.g. trainer.max_epochs."""

    name: str
    default: str
    comment: str


def read_groups(configs: Path) -> dict[str, list[Option]]:
    """Return every group with its options, both in alphabetical order."""
    options_of: dict[str, list[Option]] = {}
    for path in sorted(configs.glob("*/*.yaml")):
        option = Option(path.stem, _description(path), path)
        options_of.setdefault(path.parent.name, []).append(option)
    return options_of


def _description(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("# ") and "@package" not in line:
            return line[2:]
    return ""


def keys_in_yaml(path: Path, prefix: str = "", *, commented: bool = True) -> list[Key]:
    """Return the commented keys of one yaml file, or with commented=False all but Hydra's own."""
    yaml_keys: list[Key] = []
    parents: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        match = KEY.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        parents = [(indent, name) for indent, name in parents if indent < depth]
        parents.append((depth, match["key"]))
        is_hydras = match["key"] == "defaults" or match["key"].startswith("_")
        if match["comment"] or not (commented or is_hydras):
            name = ".".join([prefix, *(name for _, name in parents)]).lstrip(".")
            yaml_keys.append(Key(name, match["value"].strip(), (match["comment"] or "").strip()))
    return yaml_keys


def help_text(configs: Path, config_name: str, description: str) -> str:
    """Return the answer to --help: description, the options of each group, and the main keys."""
    main_yaml = configs / f"{config_name}.yaml"
    defaults = set(re.findall(r"^  - (\w+)(?:: |/)(\w+)$", main_yaml.read_text(), re.MULTILINE))
    lines = [description.strip(), ""]
    for group, options in read_groups(configs).items():
        lines.append(f"{group}=")
        for option in sort_everyday_first(group, options):
            mark = "*" if (group, option.name) in defaults else " "
            lines.append(f"  {mark} {option.name:22} {option.description}")
    lines += ["", "  * chosen by default", ""]
    lines.append("Keys of the defaults (`make docs` lists those of all options):")
    for key in _default_keys(configs, main_yaml, sorted(defaults)):
        lines.append(f"  {key.name + '=' + key.default:44} {key.comment}".rstrip())
    lines += [
        "",
        "Hydra: -m sweeps (optimizer.lr=1e-3,1e-2), --cfg job prints the config, "
        "--info explains it.",
    ]
    return "\n".join(lines)


def _default_keys(configs: Path, main_yaml: Path, defaults: list[tuple[str, str]]) -> list[Key]:
    """Return the keys of the main yaml and of the options that it chooses, each once."""
    keys = keys_in_yaml(main_yaml)
    for group, option in (("trainer", "default"), ("data", "default"), *defaults):
        path = configs / group / f"{option}.yaml"
        if path.is_file():
            keys += keys_in_yaml(path, group, commented=False)
    first: dict[str, Key] = {}
    for key in keys:
        first.setdefault(key.name, key)
    return list(first.values())


def sort_everyday_first(group: str, options: list[Option]) -> list[Option]:
    """Return the options of a group with those of EVERYDAY_OPTIONS at the top."""
    everyday = EVERYDAY_OPTIONS.get(group, ())
    rank = {name: number for number, name in enumerate(everyday)}
    return sorted(options, key=lambda option: rank.get(option.name, len(rank)))


def key_of(override: str) -> str:
    """Return the key of an override, as `trainer.devices` for +trainer.devices=2."""
    return override.split("=")[0].lstrip("+~").split("@")[0]


def is_group(key: str, folders: tuple[Path, ...]) -> bool:
    """Return whether a key is the name of a config group."""
    return any((folder / key).is_dir() for folder in folders)


def yaml_files(group: str, folders: tuple[Path, ...]) -> list[Path]:
    """Return the options of a group in all folders of configs."""
    paths: list[Path] = []
    for folder in folders:
        paths += sorted((folder / group).glob("*.yaml"))
    return paths


def dotted_keys(node: Config, prefix: str = "") -> Iterator[str]:
    """Yield every key that a user can give; values before the nodes that hold them."""
    for name, value in node.items():
        if name in INTERNAL_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from dotted_keys(value, f"{prefix}{name}.")
        yield f"{prefix}{name}"


@cache
def trainer_arguments() -> tuple[str, ...]:
    """Return the parameters of Lightning's Trainer from its source, because its import is slow."""
    spec = importlib.util.find_spec("lightning")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "pytorch" / "trainer" / "trainer.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return tuple(argument.arg for argument in node.args.kwonlyargs)
    raise RuntimeError("lightning/pytorch/trainer/trainer.py has no Trainer.__init__ any more")
