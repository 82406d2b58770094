"""The command in a record, and the state of the code with its uncommitted changes."""

import subprocess

import pytest

from lockstep.distributed.cluster import Cluster, command_line
from lockstep.runs import provenance

TYPED = ["src/train.py", "trainer=ddp", "tags=[a b]"]


@pytest.mark.parametrize(
    ("cluster", "gpus", "wanted"),
    [
        (Cluster("none", 1, 4, 0, None, "127.0.0.1", None), True, "python src/train.py trainer=ddp 'tags=[a b]'"),
        (
            Cluster("slurm", 2, 4, 0, 0, "node0", 29511), True,
            "srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("slurm", 2, 1, 0, 0, "node0", 29511), False,
            "srun --nodes=2 --ntasks-per-node=1 python src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("torchrun", 1, 2, 0, 0, "localhost", 41234), False,
            "torchrun --standalone --nproc-per-node=2 src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("torchrun", 2, 4, 0, 0, "10.0.0.1", 41234), True,
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 --rdzv-id=lockstep "
            "--nproc-per-node=4 src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("nodes", 2, 4, 0, None, "10.0.0.1", 29501), True,
            "MASTER_ADDR=10.0.0.1 MASTER_PORT=29501 WORLD_SIZE=8 NODE_RANK=0 "
            "python src/train.py trainer=ddp 'tags=[a b]'",
        ),
    ],
)  # fmt: skip
def test_the_command_names_what_launched_the_ranks(cluster, gpus, wanted):
    assert command_line(TYPED, cluster, gpus) == wanted


@pytest.fixture
def repository(tmp_path):
    """A committed clone in small: code, a page of the logbook, a file that git ignores."""

    def git(*arguments):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True
        )

    for name in ("src/a.py", "configs/a.yaml", "logbook/README.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("first\n")
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
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


def test_the_diff_holds_changed_files_and_new_ones(repository):
    (repository / "src" / "a.py").write_text("second\n")
    (repository / "src" / "new one.py").write_text("x = 1\n")
    (repository / "logbook" / "new.md").write_text("a page\n")
    lines = provenance.code_diff(repository).split("\n")
    assert [line for line in lines if line[:1] in "+-"] == [
        "--- a/src/a.py", "+++ b/src/a.py", "-first", "+second", "--- /dev/null", "+++ b/src/new one.py\t", "+x = 1",
    ]  # fmt: skip
    assert subprocess.run(["git", "-C", str(repository), "diff", "--cached", "--quiet"]).returncode == 0


def test_the_diff_of_many_new_files_is_cut(repository):
    (repository / "src" / "huge.bin").write_text("x" * 300_000)
    for i in range(5):
        (repository / "src" / f"large{i}.py").write_text("line\n" * 20_000)
    diff = provenance.code_diff(repository)
    assert diff.startswith("new file src/huge.bin: its 300,000 bytes are left out here\n")
    assert "+line" in diff and diff.endswith("… cut here\n") and len(diff) == provenance.DIFF_LIMIT_BYTES + 12


def test_an_image_without_git_says_its_commit_by_a_file(tmp_path):
    assert provenance.code_state(tmp_path)["commit"] is None
    (tmp_path / "COMMIT").write_text("ab" * 20 + "\n")
    state = provenance.code_state(tmp_path)
    assert (state["commit"], state["dirty"]) == ("ab" * 20, None)
