"""Write docs/options.md from the comments in configs/.    python docs/make_options.py   (or: make docs)"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

from lockstep.config.help import groups, keys  # noqa: E402


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def options_page(configs: Path) -> str:
    """The whole page as markdown."""
    lines = ["# Options", "", "Made by `make docs` from the comments in configs/; do not edit.", "", "## Top level", ""]
    lines += table(keys(configs / "train.yaml"))
    for group, options in groups(configs).items():
        lines += ["", f"## {group}=", "", "| option | what it is |", "|---|---|"]
        lines += [f"| `{option.name}` | {cell(option.description)} |" for option in options]
        for option in options:
            found = keys(option.path, "" if group in ("experiment", "debug") else group)
            if found:
                lines += ["", f"### {group}={option.name}", "", *table(found)]
    return "\n".join(lines) + "\n"


def table(found: list) -> list[str]:
    rows = [f"| `{key.name}` | `{cell(key.default) or '…'}` | {cell(key.comment)} |" for key in found]
    return ["| key | default | what it is |", "|---|---|---|", *rows]


if __name__ == "__main__":
    (REPOSITORY / "docs" / "options.md").write_text(options_page(REPOSITORY / "configs"))
