"""config.yaml with the signature of this machine's user, and every file that only looks like one."""

import os
import shutil

import pytest

from lockstep.runs.own_config import own_config, signed

TEXT = "data: {root: /mine}\nmodel: {}\n"


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def path(logs):
    path = logs / "train" / "runs" / "r" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(signed(TEXT, path, logs))
    return path


def test_what_was_signed_here_is_own_and_the_key_is_the_users_alone(path, logs):
    own = own_config(path, logs)
    assert own and own["data"]["root"] == "/mine" and own["model"] == {}
    assert (logs / ".key").stat().st_mode & 0o777 == 0o600
    assert os.listdir(logs) == [".key", "train"] or sorted(os.listdir(logs)) == [".key", "train"]
    key = (logs / ".key").read_bytes()
    signed("x: 1\n", path, logs)
    assert (logs / ".key").read_bytes() == key and own_config(path, logs)


def test_another_byte_another_run_another_file_or_another_key_is_not(path, logs, tmp_path):
    whole = path.read_text()
    path.write_text(whole.replace("/mine", "/yours"))
    assert own_config(path, logs) is None
    path.write_text(whole)
    for other in (path.parents[1] / "s" / "config.yaml", path.with_name("config-node1.yaml")):
        other.parent.mkdir(exist_ok=True)
        shutil.copy(path, other)
        assert own_config(other, logs) is None
    (logs / ".key").unlink()
    assert own_config(path, logs) is None
    signed(TEXT, path, logs)
    assert own_config(path, logs) is None, "signed with the key that is gone"


def test_without_a_signature_or_with_half_a_one_it_is_data(path, logs):
    signature = path.read_text().partition("\n")[0]
    for text in (
        TEXT,
        f"# signed: \n{TEXT}",
        f"# signed: None\n{TEXT}",
        f"{signature[:-1]}\n{TEXT}",
        "",
        signature,
        "ü\n",
    ):
        path.write_text(text)
        assert own_config(path, logs) is None, text
    path.write_bytes(b"\xff\xfe")
    assert own_config(path, logs) is None and own_config(path.with_name("none.yaml"), logs) is None


def test_a_key_that_others_can_read_or_write_proves_nothing(path, logs):
    for mode in (0o640, 0o604, 0o620):
        (logs / ".key").chmod(mode)
        assert own_config(path, logs) is None
        assert signed(TEXT, path, logs) == TEXT, "nothing is signed with it"
    (logs / ".key").chmod(0o600)
    assert own_config(path, logs)
    (logs / ".key").write_bytes(b"")
    assert own_config(path, logs) is None
