"""The state of the code with its uncommitted changes, and what this machine has: cores, GPUs, interfaces."""

import os
import subprocess

import pytest

from lockstep.runs import provenance
from lockstep.runs.environment import available_cores, network_interface, visible_gpus


def git(folder, *arguments):
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True)


@pytest.fixture
def repository(tmp_path):
    """A committed clone in small: code, a page of the logbook, a file that git ignores."""
    for name in ("src/a.py", "configs/a.yaml", "logbook/README.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("first\n")
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def test_a_page_of_the_logbook_does_not_make_a_run_dirty(repository):
    clean = provenance.code_state(repository)
    assert clean["dirty"] is False and len(clean["commit"]) == 40
    (repository / "logbook" / "README.md").write_text("another run\n")
    (repository / "logbook" / "new.md").write_text("a page\n")
    (repository / "src" / "a.pyc").write_text("compiled")
    assert provenance.code_state(repository) == clean and provenance.code_diff(repository) == ""
    (repository / "configs" / "b.yaml").write_text("x: 1\n")
    changed = provenance.code_state(repository)
    assert changed["dirty"] is True and changed["tree_hash"] != clean["tree_hash"]


def test_the_diff_applies_to_the_commit_whatever_git_is_configured_to_print(repository, tmp_path_factory):
    (repository / "src" / "a.py").write_text("second\n \n")
    (repository / "src" / "new one.py").write_text("x = 1\n")
    (repository / "logbook" / "new.md").write_text("a page\n")
    for setting in (("diff.noprefix", "true"), ("color.ui", "always"), ("diff.external", "false")):
        git(repository, "config", *setting)
    other = tmp_path_factory.mktemp("other")
    git(repository, "worktree", "add", "-q", str(other / "tree"), "HEAD")
    (other / "code.diff").write_text(provenance.code_diff(repository))
    git(other / "tree", "apply", str(other / "code.diff"))
    assert (other / "tree/src/a.py").read_text() == "second\n \n"
    assert (other / "tree/src/new one.py").read_text() == "x = 1\n" and not (other / "tree/logbook/new.md").exists()
    for i in range(5):
        (repository / "src" / f"large{i}.py").write_text("line\n" * 20_000)
    diff = provenance.code_diff(repository)
    assert "+line" in diff and diff.endswith("… cut here\n") and len(diff) == provenance.DIFF_LIMIT + 12


def test_an_unknown_commit_has_a_reason(repository, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("empty")
    assert "not a git repository" in provenance.code_state(empty)["commit_unknown"]
    (empty / "COMMIT").write_text("ab" * 20 + "\n")  # an image without git
    assert provenance.code_state(empty)["commit"] == "ab" * 20 and provenance.code_state(empty)["dirty"] is None
    os.chown(repository, 12345, 12345) if os.geteuid() == 0 else pytest.skip("only root can give a folder away")
    reason = provenance.code_state(repository)["commit_unknown"]
    assert "dubious ownership" in reason and reason.endswith(f"git config --global --add safe.directory {repository}")
    monkeypatch.setenv("PATH", str(empty))
    assert provenance.code_state(repository)["commit_unknown"] == "git is not installed"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
     ("0::/", {}, 8),
     ("0::/", {"cpu.max": "50000 100000"}, 1),
     ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
     ("1:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8)],
)  # fmt: skip
def test_cores_follow_the_quota_of_every_group_above(groups, files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in {"cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert available_cores(tmp_path / "cgroup", tmp_path) == cores


def test_gpus_and_interfaces_are_found_without_a_driver():
    chosen = {"0,3": 2, "": 0, "-1": 0, "NoDevFiles": 0, "GPU-1f, 2,-1,3": 2}
    assert {word: visible_gpus({"CUDA_VISIBLE_DEVICES": word}) for word in chosen} == chosen
    assert network_interface("127.0.0.1") == "lo" and network_interface("no.such.host.invalid") is None
