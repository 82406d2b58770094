"""What a git host, an editor and a coding assistant read: it parses, and names what there is."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def make_targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z-]+)", text))


MAY_WRITE = {"docs.publish": {"pages": "write", "id-token": "write"}, "release.release": {"contents": "write"}}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is_and_may_only_read(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") == MAY_WRITE.get(f"{path.stem}.{name}") and job["timeout-minutes"]
        for step in job["steps"]:
            assert step.get("uses") or is_there(step["run"]), step
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


def is_there(command: str) -> bool:
    """Whether the repository has the targets and files that a command names."""
    files = [word for word in command.split() if re.match(r"[\w.]+/[\w.]", word)]
    return make_targets(command) <= TARGETS and all((ROOT / file).exists() for file in files)


def test_the_assistants_page_names_what_there_is():
    text = (ROOT / "AGENTS.md").read_text()
    assert make_targets(text) <= TARGETS and len(make_targets(text)) >= 7
    for path in re.findall(r"`((?:src|tests|docs|configs|benchmarks|logbook)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["cff-version"] == "1.2.0" and citation["authors"][0]["name"] in (ROOT / "LICENSE").read_text()


def test_hooks_and_container_use_the_pinned_tools():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"] for hook in hooks} == {".venv/bin/ruff format", ".venv/bin/ruff check"}
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert make_targets(container["postCreateCommand"]) <= TARGETS


def test_forms_parse():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    assert [part["id"] for part in form["body"]] == ["command", "expected", "doctor", "record"]
