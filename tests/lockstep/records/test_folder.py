"""The folder of a run, and the parts of its global batch."""

import errno
import math
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.process.errors import DiskFullError, UserError, as_disk_full_error
from lockstep.process.files import lock, locked_file, write_atomically
from lockstep.process.output import format_duration
from lockstep.records.batch import Batch, states_accumulation
from lockstep.records.config import parse_seconds
from lockstep.records.folder import find_run_folder, new_run_id, read_config, validate_run_id


def test_a_run_id_cannot_leave_its_folder():
    for bad in ("../x", "", ".hidden", "a..b", "x" * 101, "a\nb", ["a"]):
        with pytest.raises(UserError, match="run_id"):
            validate_run_id(bad)
    first, second = new_run_id(), new_run_id()
    assert first != second and first[:10] <= second[:10] and validate_run_id(first) == first


def test_a_write_is_whole_or_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    write_atomically(path, lambda file: file.write("old \udce9"))
    with pytest.raises(OSError, match="disk full") as raised:
        write_atomically(
            path, lambda file: [file.write("new"), exec("raise OSError(28, 'disk full')")]
        )
    assert path.read_text() == "old \\udce9" and [each.name for each in tmp_path.iterdir()] == ["f"]
    assert raised.value.filename == str(path)
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "own", lambda file: file.write(b"x"), binary=True)
    finally:
        os.umask(before)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600, "F45: one's own runs stay one's own"


def test_an_unknown_run_is_answered_with_the_nearest_name(tmp_path):
    for age, name in enumerate(("t1", "a2", "c1", "t4")):  # their names say nothing of when
        (tmp_path / "train/runs" / name).mkdir(parents=True)
        (tmp_path / "train/runs" / name / "run.json").write_text("{}")
        os.utime(tmp_path / "train/runs" / name / "run.json", (1000 - age, 1000 - age))
    assert find_run_folder(tmp_path, "a2").path == tmp_path / "train/runs/a2"
    for word, said in (
        ("c11", r"did you mean c1\? the newest are c1, a2, t1\.$"),
        ("other", "; the newest are c1"),
    ):
        with pytest.raises(UserError, match=said):
            find_run_folder(tmp_path, word)


def test_a_file_is_free_though_a_child_has_its_handle(tmp_path):
    with locked_file(tmp_path / "a"), (tmp_path / "a").open("w") as second:
        child = subprocess.Popen(["sleep", "30"], close_fds=False)  # as a forked worker
        assert not lock(second, wait_s=0.1)
    try:
        with (tmp_path / "a").open("w") as third:
            assert lock(third, wait_s=0.1)
    finally:
        child.kill()
        child.wait()


def test_a_full_disk_is_named_by_a_folder(
    tmp_path,
):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a" / "x.ckpt"))
    assert str(as_disk_full_error(full, tmp_path)).startswith(f"no room on {tmp_path / 'a'}: free")
    (tmp_path / "a").mkdir()
    assert str(as_disk_full_error(full, tmp_path)).startswith(f"no room on {tmp_path / 'a'} (")
    wrapped = RuntimeError("unexpected pos 64 vs 128")  # as torch.save raises for it
    wrapped.__context__ = OSError(errno.ENOSPC, "No space left on device")
    rust = ValueError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )  # as of safetensors
    for error in (wrapped, OSError(errno.EDQUOT, "Disk quota exceeded"), rust):
        sentence = str(as_disk_full_error(error, tmp_path))
        assert sentence.startswith(f"no room on {tmp_path} (") and " MiB free on " in sentence
    known = as_disk_full_error(wrapped, tmp_path)
    assert (
        isinstance(known, DiskFullError) and as_disk_full_error(known, Path("/elsewhere")) is known
    )
    assert (
        as_disk_full_error(PermissionError(errno.EACCES, "no"), tmp_path) is None
        and as_disk_full_error(ValueError("x"), tmp_path) is None
    )


def test_a_span_of_time_is_read_and_shown():
    stated = {
        0.5: 0.5,
        "5400": 5400,
        "90 min": 5400,
        "1.5h": 5400,
        "00:01:30:00": 5400,
        "2:05": 125,
    }
    assert {each: parse_seconds(each, "trainer.max_time") for each in stated} == stated
    for bad in (0, True, "90 weeks", "1:2:3:4:5", "", "inf"):
        with pytest.raises(
            UserError, match="trainer.max_time=.*: give days:hours:minutes:seconds as 00:01:30:00"
        ):
            parse_seconds(bad, "trainer.max_time")
    shown = {
        0.4: "0.4 s",
        48: "48 s",
        252: "4 min 12 s",
        5400: "1 h 30 min",
        11220: "3 h 7 min",
        187261: "2 d 4 h",
    }
    assert {seconds: format_duration(seconds) for seconds in shown} == shown


# A global batch is cut by ranks and accumulation; what does not divide is refused with the nearest
# sizes that do.


def test_a_batch_divides_by_ranks_and_accumulation():
    assert Batch.cut(128, 4, 8) == Batch(global_size=128, per_device=4, accumulate=8)
    assert states_accumulation(["a=1", "++trainer.accumulate_grad_batches=2"])
    assert not states_accumulation(
        ["trainer.accumulate_grad_batches_=2", "~trainer.accumulate_grad_batches"]
    )
    for sizes, wanted in {
        (64, 2, 32): Batch(64, 32, 1), (64, 1, 32): Batch(64, 32, 2), (64, 4, math.inf): Batch(64, 16, 1),
        (48, 2, 10): Batch(48, 8, 3),  # 24 images of each rank: 12 are too many
    }.items():  # fmt: skip
        assert Batch.cut_to_limit(*sizes) == wanted


@pytest.mark.parametrize(
    ("cut", "sizes", "said"),
    [
        (
            Batch.cut,
            (100, 3, 2),
            "into 3 ranks × 2 accumulated batches: the nearest that do are 96 and 102.",
        ),
        (Batch.cut, (5, 4, 2), "the nearest that do are 8."),
        (Batch.cut, ("max", 2, 1), "data.global_batch_size='max': give a whole number from 1 on."),
        (Batch.cut, (True, 1, 1), "data.global_batch_size=True: give"),
        (Batch.cut, (8, 1, 0), "trainer.accumulate_grad_batches=0: give"),
        (Batch.cut_to_limit, (0, 2, 8), "data.global_batch_size=0: give"),
        (
            Batch.cut_to_limit,
            (64, 3, 32),
            "over 3 ranks: the nearest numbers of ranks over which it does are 2 and 4.",
        ),
        (Batch.cut_to_limit, (8, 9, 8), "over which it does are 8."),
    ],
)
def test_what_does_not_divide_names_the_nearest_that_do(cut, sizes, said):
    with pytest.raises(UserError) as refused:
        cut(*sizes)
    assert said in str(refused.value)


def test_a_path_that_is_no_utf_8_is_read_back(tmp_path):
    config = {"data": {"root": os.fsdecode(b"/f\xfcr")}}
    write_atomically(tmp_path / "config.yaml", lambda file: yaml.safe_dump(config, file))
    assert read_config(tmp_path / "config.yaml") == config
