"""Write docs/options.md from the comments in configs/.

python docs/make_options.py      or: make docs
"""

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

from lockstep.config.schema import Option, keys_in_yaml, read_groups  # noqa: E402


def options_page(configs: Path) -> str:
    """Return the page as markdown: the options of each group, then their keys, each key once."""
    lines = [
        "# Options",
        "",
        "`make docs` writes this page from the comments in configs/.",
        "",
        "## Top level",
        "",
    ]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{key.name}` | `{key.default or '…'}` | {cell(key.comment)} |"
        for key in keys_in_yaml(configs / "train.yaml")
    ]
    for group, options in read_groups(configs).items():
        lines += ["", f"## {group}=", "", "| option | meaning |", "|---|---|"]
        lines += [f"| `{option.name}` | {cell(option.description)} |" for option in options]
        if group not in ("experiment", "debug"):
            lines += key_table(options)
    return "\n".join(lines) + "\n"


def key_table(options: list[Option]) -> list[str]:
    """Return one row for each key of a group.

    Options that share a key share its row, and so do keys that follow it.
    with the comment "likewise".
    """
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for option in options:
        last = ("", "")
        for key in keys_in_yaml(option.path, option.path.parent.name):
            if key.comment == "likewise":
                rows[last]["names"].append(key.name)
                continue
            last = (key.name, key.comment)
            row = rows.setdefault(last, {"names": [key.name], "options": [], "defaults": []})
            row["options"].append(option.name)
            row["defaults"].append(key.default or "…")
    if not rows:
        return []
    lines = ["", "| key | of | default | meaning |", "|---|---|---|---|"]
    for (_, comment), row in rows.items():
        names, defaults = (", ".join(dict.fromkeys(row[part])) for part in ("names", "defaults"))
        of = "all" if "default" in row["options"] else ", ".join(heirs(row["options"], options))
        lines.append(f"| `{names}` | {of} | `{defaults}` | {cell(comment)} |")
    return lines


def heirs(names: list[str], options: list[Option]) -> list[str]:
    """Return the options, and those that have one of them in their `defaults`."""
    parents = {}
    for option in options:
        text = option.path.read_text()
        parents[option.name] = set(re.findall(r"^defaults: \[(\w+)", text, re.MULTILINE))
    family = set(names)
    # A chain of heirs is no longer than there are options.
    for _ in options:
        family |= {name for name, parent in parents.items() if family & parent}
    return sorted(family)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    (REPOSITORY / "docs" / "options.md").write_text(options_page(REPOSITORY / "configs"))
