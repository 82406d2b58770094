"""Make a release: write its version and date into the files, commit, and set an annotated tag.

make release VERSION=1.0.0                   in the repository; then: git push --follow-tags
python3 launch/release.py --notes 1.0.0      print the changelog's section of that version
"""

import datetime
import re
import sys
import tomllib
from pathlib import Path

from project import Refused, git

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# The pattern of the version in each file that names it.
VERSION_IN = {"pyproject.toml": r'(?<=^version = ").*(?="$)', "CITATION.cff": r"(?<=^version: ).*$"}
UNRELEASED = "Unreleased"


def section(changelog: str, name: str) -> str:
    """Return the text between the heading that begins with `name` and the next heading."""
    heading = rf"^## {re.escape(name)}\b.*\n"
    match = re.search(rf"{heading}((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    return match[1].strip() if match else ""


def release(root: Path, version: str, date: str) -> None:
    """Write the version and its date into the files, commit them, and set the tag.

    Args:
        date: the date of today, as 2026-11-28.

    Raises:
        Refused: the version is wrong, changes are not committed, or the changelog is empty.
    """
    changelog = root / "CHANGELOG.md"
    before = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if not VERSION.fullmatch(version):
        raise Refused(f"VERSION={version} is no version: take three numbers, as VERSION=1.0.0.")
    if _numbers(version) <= _numbers(before):
        raise Refused(f"VERSION={version} is not greater than {before}, which pyproject.toml has.")
    if git("status", "--porcelain", cwd=root):
        raise Refused("There are changes that are not committed: commit or stash them first.")
    if not section(changelog.read_text(), UNRELEASED):
        raise Refused(f'CHANGELOG.md has nothing under "## {UNRELEASED}": write what is new first.')
    heading = f"## {UNRELEASED}\n\n## {version} ({date})"
    changelog.write_text(changelog.read_text().replace(f"## {UNRELEASED}", heading, 1))
    for name, pattern in VERSION_IN.items():
        path = root / name
        path.write_text(re.sub(pattern, version, path.read_text(), count=1, flags=re.MULTILINE))
    git("commit", "-q", "-am", f"Release {version}", cwd=root)
    git("tag", "-a", f"v{version}", "-m", f"Lockstep {version}", cwd=root)
    print(f"v{version} is a commit and a tag here. Next: git push --follow-tags")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main(argv: list[str]) -> int:
    try:
        if argv[0] == "--notes":
            print(section((ROOT / "CHANGELOG.md").read_text(), argv[1]))
        else:
            release(ROOT, argv[0], datetime.date.today().isoformat())
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
