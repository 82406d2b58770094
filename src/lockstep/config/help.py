"""What can be chosen on the command line, read from the comments of configs/: for --help and docs/options.md.

A group is a folder, an option a yaml file in it; its first comment line describes it, and the comment after a key
describes the key.
"""

import re
from dataclasses import dataclass
from pathlib import Path

KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_][\w]*):(?P<value>[^#]*?)(?:\s+# (?P<comment>.+))?$")


@dataclass(frozen=True)
class Option:
    """One yaml file: `group=name`."""

    group: str
    name: str
    description: str
    path: Path


@dataclass(frozen=True)
class Key:
    """One key of a yaml file by its full dotted name, e.g. trainer.max_epochs."""

    name: str
    default: str
    comment: str


def groups(configs: Path) -> dict[str, list[Option]]:
    """Every group with its options, both in alphabetical order."""
    found: dict[str, list[Option]] = {}
    for folder in sorted(path for path in configs.iterdir() if path.is_dir() and path.name != "fits"):
        found[folder.name] = [
            Option(folder.name, path.stem, _description(path), path) for path in sorted(folder.glob("*.yaml"))
        ]
    return found


def keys(path: Path, prefix: str = "") -> list[Key]:
    """Every commented key of one yaml file, with its place in the tree."""
    found: list[Key] = []
    stack: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        match = KEY.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        stack = [(at, name) for at, name in stack if at < depth] + [(depth, match["key"])]
        if match["comment"]:
            name = ".".join([prefix, *(name for _, name in stack)]).lstrip(".")
            found.append(Key(name, match["value"].strip(), match["comment"].strip()))
    return found


def _description(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("# ") and not line.startswith("# @package"):
            return line[2:].strip()
    return ""


def help_text(configs: Path, config_name: str, description: str) -> str:
    """The whole answer to --help.

    Args:
        description: of the script, with how it is called.
    """
    lines = [description.strip(), ""]
    text = (configs / f"{config_name}.yaml").read_text()
    defaults = set(re.findall(r"^  - (\w+)(?:: |/)(\w+)$", text, re.MULTILINE))
    for group, options in groups(configs).items():
        if group in ("hydra", "paths"):
            continue
        lines.append(f"{group}=")
        for option in options:
            mark = "*" if (group, option.name) in defaults else " "
            lines.append(f"  {mark} {option.name:22} {option.description}")
    lines += ["", "  * chosen by default", "", "Keys (docs/options.md has those of every option):"]
    top = keys(configs / f"{config_name}.yaml")
    shown = top + [key for key in keys(configs / "trainer" / "default.yaml", "trainer") if key.comment]
    lines += [f"  {key.name + '=' + key.default:44} {key.comment}" for key in shown]
    lines += ["", "Hydra: -m sweeps (optimizer.lr=1e-3,1e-2), --cfg job prints the config, --info explains it."]
    return "\n".join(lines)
