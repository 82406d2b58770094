"""The page of a real run, which runs the logbook holds, and disks that are shared or have no
links.
"""

import ctypes
import errno
import os
import re

import pytest

from runs import run_script

SMALL = ("experiment=quickstart", "trainer.max_steps=2", "test=false", "run_id=r")


def test_a_real_run_writes_its_page_into_its_folder(tmp_path):
    words = ("optimizer=sgd", "trainer.limit_test_batches=1", "test=true", "metrics=[f1,kappa]")
    done = run_script("train", *SMALL, *words, logs=tmp_path)
    assert done.code == 0, done.output
    assert done.output.strip().endswith("train/runs/r/page.md") and done.output.count("\n") <= 5
    text = done.folder.page.read_text()
    assert text.startswith("# r\n") and "trainer.max_steps=2" in text and "Confusion matrix" in text
    assert re.search(rf"\| kappa \| \S+ \| {done.record['metrics']['test/kappa']:.4g} \|", text)
    assert done.record["summary"]["changed"][:2] == [
        ["trainer.max_steps", -1, 2],
        ["optimizer", "adamw", "sgd"],
    ]
    assert not (tmp_path / "logbook").exists()


def test_only_a_training_that_is_kept_has_a_row(tmp_path):
    done = run_script("train", *SMALL, "logbook=keep", logs=tmp_path)
    assert done.code == 0 and done.output.strip().endswith("logbook/r/page.md"), done.output
    assert "| ✅ [r](r/page.md) | digits |" in (tmp_path / "logbook" / "README.md").read_text()
    debugging = ("experiment=quickstart", "debug=fast_dev_run", "run_id=d", "logbook=keep")
    for done in (
        run_script("train", *debugging, logs=tmp_path),
        run_script("eval", "ckpt_path=r", logs=tmp_path),
    ):
        assert done.code == 0 and done.folder.page.exists(), done.output
    assert len(list((tmp_path / "logbook").glob("*/page.md"))) == 1


def poor_disk() -> None:
    """Let this process see a disk as exFAT or a mounted drive: no hard links, no permissions, no
    sync of a folder.
    """
    sync = os.fsync

    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def sync_file(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    os.link, os.chmod, os.fsync = refuse, refuse, sync_file


@pytest.mark.slow
def test_a_log_folder_without_links_and_rights_resumes(tmp_path):
    first = run_script("train", *SMALL, logs=tmp_path, before=poor_disk)
    assert first.code == 0 and first.folder.page.exists(), first.output
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o777)
    words = ("resume=r", "trainer.max_steps=4", "trainer.limit_val_batches=1")
    again = run_script("train", *words, logs=tmp_path, before=poor_disk)
    assert again.code == 0 and again.record["steps"] == 4, again.output
    refused = run_script(
        "train",
        *words,
        "callbacks.checkpoints.monitor=val/f1",
        "trainer.max_steps=6",
        logs=tmp_path,
    )
    assert refused.code == 2, "a resumed run whose input is refused keeps its folder"
    assert any(first.folder.checkpoints.iterdir()) and refused.folder.record_path.exists(), (
        refused.output
    )


def without_roots_rights() -> None:
    """Let the rights of files count for this process of root's, as for any other user."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, sets) == 0
    sets[0] &= ~0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
    assert libc.capset(header, sets) == 0
    os.umask(0o077)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_two_users_share_a_log_folder(tmp_path):
    logs, words = tmp_path / "logs", SMALL[:3]
    theirs = run_script("train", *words, "run_id=theirs", logs=logs)
    assert theirs.code == 0, theirs.output
    everything = [logs, *logs.rglob("*")]
    for path in everything:
        os.chown(path, 12345, 12345)
        path.chmod(path.stat().st_mode & ~0o022)
    for path in (logs, logs / "train", logs / "train/runs"):
        path.chmod(0o1777)
    before = {
        path: path.stat().st_mtime_ns for path in everything if not path.stat().st_mode & 0o1000
    }
    mine = run_script("train", *words, "run_id=mine", logs=logs, before=without_roots_rights)
    assert mine.code == 0 and mine.folder.record_path.stat().st_mode & 0o777 == 0o600, mine.output
    refused = run_script(
        "train", "resume=theirs", "trainer.max_steps=4", logs=logs, before=without_roots_rights
    )
    assert refused.code == 2 and "cannot be written" in refused.output, refused.output
    assert str(theirs.folder.path) in refused.output
    assert before == {path: path.stat().st_mtime_ns for path in before}


def no_page() -> None:
    import lockstep.logbook.build

    def refuse(*_):
        raise MemoryError("no page today")

    lockstep.logbook.build.write_page = refuse


def test_a_failing_page_is_said_and_changes_no_exit_code(tmp_path):
    done = run_script("train", *SMALL, logs=tmp_path, before=no_page)
    said = "The run's page was not written (MemoryError: no page today); python src/logbook.py keep r writes one into"
    assert done.code == 0 and said in done.output, done.output
