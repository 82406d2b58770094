"""List groups, options and keys with their comments in the yaml files, for --help and docs/options.md.

A group is a folder and an option a yaml file in it. Its first comment line describes it; the comment after a key
describes the key.
"""

import re
from pathlib import Path
from typing import NamedTuple

KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_][\w]*):(?P<value>[^#]*?)(?:\s+# (?P<comment>.+))?$")


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


def groups(configs: Path) -> dict[str, list[Option]]:
    """Return every group with its options, both in alphabetical order."""
    found: dict[str, list[Option]] = {}
    for path in sorted(configs.glob("*/*.yaml")):
        lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
        found.setdefault(path.parent.name, []).append(Option(path.stem, lines[0] if lines else "", path))
    return found


def keys(path: Path, prefix: str = "", *, commented: bool = True) -> list[Key]:
    """Return every commented key of one yaml file, or every key but Hydra's own."""
    found: list[Key] = []
    stack: list[tuple[int, str]] = []
    for match in map(KEY.match, path.read_text().splitlines()):
        if match is not None:
            depth = len(match["indent"])
            stack = [(at, name) for at, name in stack if at < depth] + [(depth, match["key"])]
            if match["comment"] or not (commented or match["key"] == "defaults" or match["key"].startswith("_")):
                name = ".".join([prefix, *(name for _, name in stack)]).lstrip(".")
                found.append(Key(name, match["value"].strip(), (match["comment"] or "").strip()))
    return found


def help_text(configs: Path, config_name: str, description: str) -> str:
    """Return the answer to --help: the script's description, the options of each group, and the main keys."""
    lines = [description.strip(), ""]
    text = (configs / f"{config_name}.yaml").read_text()
    defaults = set(re.findall(r"^  - (\w+)(?:: |/)(\w+)$", text, re.MULTILINE))
    for group, options in groups(configs).items():
        lines.append(f"{group}=")
        for option in options:
            mark = "*" if (group, option.name) in defaults else " "
            lines.append(f"  {mark} {option.name:22} {option.description}")
    lines += ["", "  * chosen by default", "", "Keys (docs/options.md has those of every option):"]
    shown = [*keys(configs / f"{config_name}.yaml"), *keys(configs / "trainer" / "default.yaml", "trainer")]
    lines += [f"  {key.name + '=' + key.default:44} {key.comment}" for key in shown]
    lines += ["", "Hydra: -m sweeps (optimizer.lr=1e-3,1e-2), --cfg job prints the config, --info explains it."]
    return "\n".join(lines)
