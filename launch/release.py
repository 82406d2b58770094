"""Make a release: what the changelog calls unreleased gets a version and a date, in a commit with
an annotated tag.

make release VERSION=1.0.0                   here; then: git push --follow-tags
python3 launch/release.py --notes 1.0.0      print the changelog's section of that version
"""

import datetime
import re
import sys
from pathlib import Path

from project import Refused, git

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
STATED = {"pyproject.toml": r'(?<=^version = ").*(?="$)', "CITATION.cff": r"(?<=^version: ).*$"}
UNRELEASED = "Unreleased"


def section(changelog: str, name: str) -> str:
    """What stands under the heading that begins with `name`, up to the next one."""
    found = re.search(rf"^## {re.escape(name)}\b.*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    return found[1].strip() if found else ""


def release(root: Path, version: str, date: str) -> None:
    """
    Raises:
        Refused: the version, the tree or the changelog is not fit for it.
    """
    changelog = root / "CHANGELOG.md"
    before = re.search(
        STATED["pyproject.toml"], (root / "pyproject.toml").read_text(), re.MULTILINE
    )[0]
    if not VERSION.fullmatch(version):
        raise Refused(f"VERSION={version} is no version: take three numbers, as VERSION=1.0.0.")
    if [*map(int, version.split("."))] <= [*map(int, before.split("."))]:
        raise Refused(f"VERSION={version} is not greater than {before}, which pyproject.toml has.")
    if git("status", "--porcelain", cwd=root):
        raise Refused("There are changes that are not committed: commit or stash them first.")
    if not section(changelog.read_text(), UNRELEASED):
        raise Refused(f'CHANGELOG.md has nothing under "## {UNRELEASED}": write what is new first.')
    heading = f"## {UNRELEASED}\n\n## {version} ({date})"
    changelog.write_text(changelog.read_text().replace(f"## {UNRELEASED}", heading, 1))
    for name, pattern in STATED.items():
        path = root / name
        path.write_text(re.sub(pattern, version, path.read_text(), count=1, flags=re.MULTILINE))
    git("commit", "-q", "-am", f"Release {version}", cwd=root)
    git("tag", "-a", f"v{version}", "-m", f"Lockstep {version}", cwd=root)
    print(f"v{version} is a commit and a tag here. Next: git push --follow-tags")


def main(words: list[str]) -> int:
    try:
        if words[0] == "--notes":
            print(section((ROOT / "CHANGELOG.md").read_text(), words[1]))
        else:
            release(ROOT, words[0], datetime.date.today().isoformat())
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
