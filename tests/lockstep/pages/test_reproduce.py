"""What is repeated: a run's code from git and its diff, its options with places of their own, and who may say so."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
import yaml

from example_runs import example_config, write_run
from lockstep.pages import reproduce
from lockstep.runs import provenance
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.own_config import signed


def git(repository: Path, *words: str) -> str:
    own = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", "-C", repository, *own, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path):
    """A clone with one commit, one file that is changed since and one that git does not know."""
    path = tmp_path / "repository"
    (path / "src").mkdir(parents=True)
    (path / "configs").mkdir()
    (path / "src" / "train.py").write_text("first = 1\n\n\n")
    (path / "configs" / "train.yaml").write_text("lr: 1\n")
    (path / "requirements.txt").write_text("torch\n")
    git(path, "init", "-q")
    git(path, "add", "-A")
    git(path, "commit", "-qm", "one")
    (path / "src" / "train.py").write_text("first = 2\n\n\n")
    (path / "src" / "new.py").write_text("second = 2\n")
    return path


@pytest.fixture
def original(repository, tmp_path):
    """A run of that state, of this machine's user."""
    logs = tmp_path / "logs"
    words = ["data=digits", "seed=1", "run_id=mine", "logbook=keep", "s3.uri=s3://b/p", "paths.log_dir=/elsewhere"]
    folder = write_run(
        logs / "train" / "runs", "mine", code=provenance.code_state(repository), world_size=1, trainer="cpu",
        overrides=["model=evil"],
    )  # fmt: skip
    config = example_config(overrides=words, paths={"data_dir": str(tmp_path / "data")})
    (folder / "config.yaml").write_text(signed(yaml.safe_dump(config), folder / "config.yaml", logs))
    (folder / "code.diff").write_text(provenance.code_diff(repository))
    git(repository, "stash", "-qu")
    return reproduce.from_folder(RunFolder(folder), logs, repository)


def test_commit_and_diff_give_the_code_back(original, repository, tmp_path):
    reproduce.check(original, repository, yes=False)
    reproduce.clone(original, repository, tmp_path / "clone")
    assert (tmp_path / "clone/src/train.py").read_text() == "first = 2\n\n\n"
    assert (tmp_path / "clone/src/new.py").read_text() == "second = 2\n"
    assert (repository / "src/train.py").read_text() == "first = 1\n\n\n"
    lines = list(reproduce.said_before(original))
    assert lines[0].endswith(f"with a diff of {len(original.diff.splitlines())} lines")
    assert "data=digits" in lines[1] and "torch 2.14.1" not in lines[2] and "python 3.11.2 (here" in lines[2]


@pytest.mark.parametrize(
    "diff, said", [("", "apply failing|gives?|other files"), ("+++ what?\n", "git apply failed|other")]
)
def test_a_diff_that_is_not_the_runs_is_refused(original, repository, tmp_path, diff, said):
    with pytest.raises(UserError):
        reproduce.clone(dataclasses.replace(original, diff=diff), repository, tmp_path / "clone")


def test_a_diff_with_other_code_is_refused(original, repository, tmp_path):
    other = dataclasses.replace(original, diff=original.diff.replace("second = 2", "second = 3"))
    with pytest.raises(UserError, match="other files in src and configs than its record says"):
        reproduce.clone(other, repository, tmp_path / "clone")


def test_options_keep_the_training_and_change_the_places(original, tmp_path):
    words = reproduce.words_again(original, tmp_path / "again")
    assert words == [
        "data=digits", "seed=1", "run_id=again", f"paths.log_dir={tmp_path}/again/logs",
        f"paths.logbook_dir={tmp_path}/again/logbook", f"paths.data_dir={tmp_path}/data",
    ]  # fmt: skip
    more = dataclasses.replace(original.record, world_size=2, devices=2, initial_weights="/w.ckpt")
    words = reproduce.words_again(dataclasses.replace(original, record=more), Path("/a b"))
    assert "trainer.devices=2" in words and "ckpt_path=/w.ckpt" in words
    assert 'paths.log_dir="/a b/logs"' in words


def test_the_options_are_those_that_the_user_signed_not_those_of_the_record(original):
    assert original.is_vouched and "model=evil" not in original.words


def test_a_folder_of_others_needs_a_yes(original, repository, tmp_path):
    folder, logs = original.folder, tmp_path / "logs"
    (folder.path / "from-bucket").mkdir()  # its record and diff may be another's
    fetched = reproduce.from_folder(folder, logs, repository)
    (folder.path / "from-bucket").rmdir()
    folder.config.write_text(folder.config.read_text() + "# changed\n")
    for run in (fetched, reproduce.from_folder(folder, logs, repository)):
        with pytest.raises(UserError, match="is not from here .* give --yes"):
            reproduce.check(run, repository, yes=False)
        reproduce.check(run, repository, yes=True)


def test_a_run_of_the_logbook_counts_as_git_has_it(original, repository):
    path = repository / "logbook" / "runs" / "kept.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"record": {"task_name": "train", "overrides": ["seed=3"]}}')

    def is_vouched():
        return reproduce.from_logbook(repository / "logbook", "kept", repository).is_vouched

    assert not is_vouched()
    git(repository, "add", "-A")
    assert not is_vouched()  # not in a commit yet
    git(repository, "commit", "-qm", "kept")
    assert is_vouched()
    assert reproduce.from_logbook(repository / "logbook", "kept", repository).words == ("seed=3",)
    path.write_text(path.read_text() + " ")
    assert not is_vouched()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"task_name": "eval"}, "no training run"),
        ({"num_nodes": 2}, "needs other machines"),
        ({"trainer": "hivemind"}, "needs other machines"),
        ({"code": {"commit": "f" * 40}}, "not in this clone"),
        ({"code": {"commit": "--upload-pack=evil"}}, "has no commit in its record"),
        ({"code": {"commit": "HEAD"}}, "has no commit in its record"),
        ({"code": {}}, "has no commit in its record"),
        ({"restarts": [{"code": {"tree_hash": "other"}}]}, "other code than it began with"),
    ],
)
def test_what_cannot_be_repeated_is_one_sentence(original, repository, changes, said):
    changed = dataclasses.replace(original.record)
    changed.take(changes)
    with pytest.raises(UserError, match=said):
        reproduce.check(dataclasses.replace(original, record=changed), repository, yes=True)
