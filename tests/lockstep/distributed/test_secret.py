"""Where a start's secret comes from, and who may read it."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from lockstep.distributed import secret as module
from lockstep.distributed.cluster import Cluster
from lockstep.distributed.secret import Secret, find_secret, handed_on, own_secret, stated_secret, without_secrets
from lockstep.runs.errors import UserError

LONG = "0123456789abcdef"
SUPERVISOR = Cluster("none", 1, 2, 0, None, "127.0.0.1", None)
NODE = Cluster("nodes", 2, 1, 0, None, "10.0.0.1", 29500)
RANK = Cluster("torchrun", 1, 2, 0, 1, "127.0.0.1", 29500)
ALONE = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_found", [])
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))


def private(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return {"LOCKSTEP_SECRET_FILE": str(path)}


def test_a_tag_is_of_these_parts_in_this_order():
    secret = Secret(LONG)
    tag = secret.tag(b"ab", b"c")
    assert len(tag) == module.TAG_BYTES and secret.proves(tag, b"ab", b"c")
    for parts in ((b"a", b"bc"), (b"abc",), (b"c", b"ab"), (b"ab", b"c", b"")):
        assert not secret.proves(tag, *parts)
    assert not Secret(LONG + "x").proves(tag, b"ab", b"c") and LONG not in repr(secret)


def test_the_environment_and_a_private_file_say_it(tmp_path):
    assert stated_secret({"LOCKSTEP_SECRET": f" {LONG}\n"}).text == LONG
    assert stated_secret(private(tmp_path / "s", LONG + "\n")).text == LONG
    assert stated_secret({}) is None and stated_secret({"LOCKSTEP_SECRET": ""}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path, mode):
    with pytest.raises(UserError, match="is no file that you alone can read and write: chmod 600"):
        stated_secret(private(tmp_path / "s", LONG, mode))


def test_links_folders_pipes_and_files_of_others_are_refused(tmp_path):
    private(tmp_path / "real", LONG)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in (("link", "cannot be read"), ("pipe", "no file"), (".", "no file|cannot be"), ("not", "cannot")):
        with pytest.raises(UserError, match=said):
            stated_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / name)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path):
    environ = private(tmp_path / "s", LONG)
    os.chown(tmp_path / "s", 65534, 65534)
    with pytest.raises(UserError, match="as its owner"):
        stated_secret(environ)


def test_too_short_a_secret_is_refused_and_not_repeated(tmp_path):
    for environ in ({"LOCKSTEP_SECRET": "hunter2"}, private(tmp_path / "s", "hunter2")):
        with pytest.raises(UserError, match="holds 7 characters.*openssl rand -hex 32") as raised:
            stated_secret(environ)
        assert "hunter2" not in str(raised.value)


def test_a_supervisor_of_one_node_makes_one_and_nodes_need_theirs():
    first, second = (find_secret(SUPERVISOR, {}) for _ in range(2))
    assert len(first.text) == 64 and first != second
    assert find_secret(NODE, {}) is None and find_secret(NODE, {"LOCKSTEP_SECRET": LONG}).text == LONG
    assert find_secret(ALONE, {}) is None
    assert find_secret(replace(RANK, launcher="supervisor"), {}) is None, "its supervisor had none either"


def test_ranks_of_one_torchrun_share_a_file_that_nobody_else_can_read(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(find_secret(RANK, {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({secret.text for secret in found}) == 1 and len(found[0].text) == 64
    [path] = (tmp_path / f"lockstep-{os.geteuid()}").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    other = replace(RANK, master_addr="../else", master_port=29501)
    assert find_secret(other, {}).text != found[0].text and len(list(path.parent.iterdir())) == 2
    found[0].discard_file()
    assert find_secret(RANK, {}).text != found[0].text, "another start has another"


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710])
def test_a_folder_that_others_can_enter_is_refused(tmp_path, mode):
    folder = tmp_path / f"lockstep-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UserError, match="is not yours alone"):
        find_secret(RANK, {})


def test_a_link_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "else").mkdir(mode=0o700)
    (tmp_path / f"lockstep-{os.geteuid()}").symlink_to(tmp_path / "else")
    with pytest.raises(UserError, match="is not yours alone"):
        find_secret(RANK, {})


def test_the_users_runtime_folder_is_taken_where_it_is_private(tmp_path):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    find_secret(RANK, {"XDG_RUNTIME_DIR": str(runtime)})
    assert [path.name for path in runtime.iterdir()] == [f"lockstep-{os.geteuid()}"]


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
from lockstep.distributed.secret import own_secret
from lockstep.distributed.cluster import Cluster
secret = own_secret(Cluster("supervisor", 1, 2, 0, 0, "127.0.0.1", 1))
print(secret.text, [name for name in os.environ if "SECRET" in name])
"""


def test_a_child_reads_it_from_its_pipe_and_hands_no_variable_on():
    with handed_on(Secret(LONG)) as (told, inherits):
        assert LONG not in str(told)
        environment = {**without_secrets({**os.environ, "LOCKSTEP_SECRET": "another secret"}), **told}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(module.Path(module.__file__).parents[2])], env=environment,
            pass_fds=inherits, capture_output=True, text=True,
        )  # fmt: skip
    assert done.stdout.split() == [LONG, "[]"], done.stderr


def test_it_is_looked_for_once_and_its_variables_go(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_SECRET", LONG)
    assert own_secret(NODE).text == LONG and "LOCKSTEP_SECRET" not in os.environ
    assert own_secret(NODE).text == LONG
