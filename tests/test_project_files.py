"""What a git host, an editor and a coding assistant read parses and names what exists; make release in a clone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


MAY_WRITE = {"docs.publish": {"pages": "write", "id-token": "write"}, "release.release": {"contents": "write"}}


def missing(text: str, files: list[str]) -> list[str]:
    """The targets of make and the files that a text names and the repository does not have."""
    named = [target for target in re.findall(r"\bmake ([a-z-]+)", text) if target not in TARGETS]
    return named + [file for file in files if not (ROOT / file).exists()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is_and_may_only_read(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") == MAY_WRITE.get(f"{path.stem}.{name}") and job["timeout-minutes"]
        for step in job["steps"]:
            command = step.get("run", "")
            assert missing(command, [word for word in command.split() if re.match(r"[\w.]+/[\w.]", word)]) == []
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


def test_the_assistants_page_names_what_there_is():
    text = (ROOT / "AGENTS.md").read_text()
    assert missing(text, re.findall(r"`((?:src|tests|docs|configs|benchmarks|logbook)/[\w/.]*)`", text)) == []
    assert text.count("make ") >= 7


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["cff-version"] == "1.2.0" and citation["authors"][0]["name"] in (ROOT / "LICENSE").read_text()


VERSION = re.compile(r'(?<=^version = ")[\d.]+|(?<=^version: )[\d.]+', re.MULTILINE)
FILES = ("launch/release.py", "launch/project.py", "pyproject.toml", "CITATION.cff")
CHANGELOG = "# Changelog\n\n## Unreleased: the house\n\n- New.\n- More.\n\n## 0.1.0 (2026-01-01)\n\n- Old.\n"


@pytest.fixture
def clone(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = VERSION.sub("0.1.0", (ROOT / name).read_text())  # whatever has been released by now
        (tmp_path / name).write_text(text)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    for words in ("init -q", "add -A", "commit -qm first"):
        git(tmp_path, *words.split())
    return tmp_path


def git(folder, *words):
    own = ("-c", "user.name=me", "-c", "user.email=me@here")
    return subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def release(folder, *words):
    done = subprocess.run([sys.executable, "launch/release.py", *words], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_release_is_a_commit_and_a_tag_with_its_version_everywhere(clone):
    before = git(clone, "rev-parse", "HEAD")
    code, said = release(clone, "1.0.0")
    assert code == 0, said
    assert git(clone, "cat-file", "-t", "v1.0.0") == "tag" and git(clone, "status", "--porcelain") == ""
    assert git(clone, "rev-parse", "v1.0.0^{commit}~1") == before
    assert tomllib.loads((clone / "pyproject.toml").read_text())["project"]["version"] == "1.0.0"
    assert "\nversion: 1.0.0\n" in (clone / "CITATION.cff").read_text()
    date = git(clone, "log", "-1", "--format=%cs")
    changelog = (clone / "CHANGELOG.md").read_text()
    assert changelog == CHANGELOG.replace("## Unreleased", f"## Unreleased\n\n## 1.0.0 ({date})")
    assert release(clone, "--notes", "1.0.0") == (0, "- New.\n- More.\n")
    assert release(clone, "1.0.1")[1].startswith("error: CHANGELOG.md has nothing under")


def test_a_version_that_cannot_be_and_changes_that_are_not_committed_are_refused(clone):
    for version, said in (("one", "is no version"), ("0.0.10", "not greater than 0.1.0"), ("1.0.0", "not committed")):
        if version == "1.0.0":
            (clone / "new.py").touch()
        code, words = release(clone, version)
        assert code == 2 and said in words and git(clone, "tag") == ""
