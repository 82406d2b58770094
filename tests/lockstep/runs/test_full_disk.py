"""What a full disk did, in one sentence, whatever it was wrapped in."""

import errno
from pathlib import Path

import pytest

from lockstep.runs.full_disk import NoRoom, full_disk_named, is_full, no_room


def full(path: Path | None = None) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", *([str(path)] if path else []))


def test_the_folder_of_the_file_is_named_and_else_the_one_that_was_written_to(tmp_path):
    assert str(no_room(full(tmp_path / "a" / "x.ckpt"), tmp_path)).startswith(f"no room on {tmp_path / 'a'}: free")
    (tmp_path / "a").mkdir()
    sentence = str(no_room(full(tmp_path / "a" / "x.ckpt"), tmp_path))
    assert sentence.startswith(f"no room on {tmp_path / 'a'} (") and " MiB free on " in sentence
    assert str(no_room(full(), tmp_path)).startswith(f"no room on {tmp_path} (")
    assert str(no_room(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path)).startswith("no room on")


def test_it_is_found_under_what_was_raised_for_it(tmp_path):
    wrapped = RuntimeError("unexpected pos 64 vs 128")
    wrapped.__context__ = full()
    for error in (wrapped,):
        with pytest.raises(NoRoom, match=f"no room on {tmp_path}") as caught, full_disk_named(tmp_path):
            raise error
        assert is_full(caught.value) and caught.value.__suppress_context__
    again = no_room(caught.value, Path("/elsewhere"))
    assert again is caught.value, "who knew the folder best is believed"


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), ValueError("x")])
def test_anything_else_stays_what_it_is(tmp_path, error):
    assert no_room(error, tmp_path) is None
    with pytest.raises(type(error)), full_disk_named(tmp_path):
        raise error
