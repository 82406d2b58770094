import dataclasses
import os
import subprocess
import sys

import pytest

from lockstep.commands import snapshot
from lockstep.commands.command_line import read_command
from lockstep.process.errors import UserError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with one commit, in whose src/train.py the command is typed.

    What it would start is in `started`.
    """
    for name in ("src/train.py", "src/old.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("committed")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(snapshot, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "src/train.py")])
    monkeypatch.setenv(snapshot.SNAPSHOT_VARIABLE, "")  # and what is set in a test is taken back
    monkeypatch.delenv(snapshot.SNAPSHOT_VARIABLE)
    started = []
    monkeypatch.setattr(os, "execv", lambda *call: started.append(call))
    return tmp_path, started


def test_a_snapshot_runs_the_uncommitted_code_of_the_moment(project):
    root, started = project
    (root / "src/train.py").write_text("changed")
    (root / "src/new.py").write_text("new")
    (root / "src/old.py").unlink()
    snapshot.run_from_snapshot(["-m", "snapshot=true", "seed=1,2"])
    [(program, command)] = started
    (root / "src/train.py").write_text("edited later")
    [folder] = (root / "logs/code").iterdir()
    assert program == sys.executable and command[1] == str(folder / "src/train.py")
    assert command[2:] == ["-m", "snapshot=true", "seed=1,2", f"paths.root_dir={root}"]
    assert {path.name: path.read_text() for path in (folder / "src").iterdir()} == {
        "train.py": "changed",
        "new.py": "new",
    }
    assert os.environ[snapshot.SNAPSHOT_VARIABLE] == "1"


def test_a_snapshot_of_a_folder_of_a_repository_is_whole(project, monkeypatch):
    root, started = project
    folder = root / "src"
    monkeypatch.setattr(snapshot, "REPOSITORY", folder)
    monkeypatch.setattr(snapshot, "CODE_PATHS", ("train.py", "old.py"))
    (folder / "old.py").write_text("changed")
    snapshot.run_from_snapshot(["snapshot=true"])
    [worktree] = (folder / "logs/code").iterdir()
    [(_, command)] = started
    assert command[1] == str(worktree / "src/train.py")
    assert (worktree / "src/train.py").read_text() == "committed"
    assert (worktree / "src/old.py").read_text() == "changed"


def test_a_snapshot_takes_none_of_itself(project, monkeypatch):
    monkeypatch.setenv(snapshot.SNAPSHOT_VARIABLE, "1")
    assert snapshot.run_from_snapshot(["snapshot=true"]) is None and project[1] == []


def test_ranks_of_another_launcher_and_code_without_git_are_refused(project, monkeypatch):
    root, _ = project
    (root / ".git").rename(root / "elsewhere")
    with pytest.raises(UserError, match="needs a git repository with a commit"):
        snapshot.run_from_snapshot(["snapshot=true"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="starts its ranks itself"):
        snapshot.run_from_snapshot(["snapshot=true"])


def test_a_snapshot_has_what_is_staged(project):
    root, _ = project
    (root / "src/train.py").write_text("changed")
    (root / "src/new.py").write_text("new")
    git = ["git", "-C", str(root)]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "mv", "src/old.py", "src/moved.py"], check=True)
    snapshot.run_from_snapshot(["snapshot=true"])
    [folder] = (root / "logs/code").iterdir()
    assert {path.name: path.read_text() for path in (folder / "src").iterdir()} == {
        "train.py": "changed",
        "new.py": "new",
        "moved.py": "committed",
    }


def test_a_snapshot_that_a_yaml_asks_for_is_refused(monkeypatch):
    """Only the command line starts the copy."""
    typed = read_command("train", ["experiment=quickstart"], "")
    command = dataclasses.replace(typed, overrides=[*typed.overrides, "snapshot=true"])
    with pytest.raises(UserError, match="works on the command line alone: give snapshot=true"):
        command.compose()
    monkeypatch.setenv(snapshot.SNAPSHOT_VARIABLE, "1")
    assert command.compose()["snapshot"] is True
