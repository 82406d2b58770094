"""Appended until whole, verified, renamed; from a source of bytes in memory."""

import errno
import hashlib

import pytest

from lockstep.runs.downloads import BrokenOff, Damaged, Incoming, download
from lockstep.runs.full_disk import NoRoom

CONTENT = hashlib.shake_128(b"content").digest(10_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Source:
    """Sends at most `limit` bytes a time, and begins anew where it cannot continue."""

    def __init__(self, limit: int = 10**6, continues: bool = True, content: bytes = CONTENT):
        self.limit, self.continues, self.content, self.starts = limit, continues, content, []

    def __call__(self, start: int) -> Incoming:
        self.starts.append(start)
        start = start if self.continues and start <= len(self.content) else 0
        return Incoming(start, len(self.content), iter([self.content[start : start + self.limit]]))


def fetch(tmp_path, source, **options) -> bytes:
    download(source, tmp_path / ".part", tmp_path / "file", digest=SHA256, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    return (tmp_path / "file").read_bytes()


def test_a_source_that_breaks_off_is_asked_for_the_rest(tmp_path, caplog):
    source = Source(limit=4000)
    assert fetch(tmp_path, source, pauses_s=(0.01,)) == CONTENT
    assert source.starts == [0, 4000, 8000]
    caplog.clear()


@pytest.mark.parametrize(
    ("left", "starts"),
    [(CONTENT[:4000], [4000]), (b"?" * 4000, [4000, 0]), (CONTENT, [10_000]), (b"?" * 10**5, [10**5])],
)
def test_a_part_that_lies_there_is_continued_and_dropped_where_it_is_wrong(tmp_path, left, starts):
    (tmp_path / ".part").write_bytes(left)
    source = Source()
    assert fetch(tmp_path, source) == CONTENT and source.starts == starts


def test_a_source_that_cannot_continue_begins_anew(tmp_path):
    (tmp_path / ".part").write_bytes(b"?" * 4000)
    source = Source(continues=False)
    assert fetch(tmp_path, source) == CONTENT and source.starts == [4000]


def test_another_content_is_refused_and_nothing_of_it_stays(tmp_path):
    source = Source(content=b"!" + CONTENT[1:])
    with pytest.raises(Damaged, match=f"SHA256 [0-9a-f]+ instead of {SHA256}"):
        download(source, tmp_path / ".part", tmp_path / "file", digest=SHA256)
    assert list(tmp_path.iterdir()) == [] and source.starts == [0]


@pytest.mark.parametrize(("pauses_s", "tries"), [((), 1), ((0.01, 0.01), 3)])
def test_it_gives_up_after_that_many_tries_in_vain_and_keeps_the_part(tmp_path, pauses_s, tries):
    (tmp_path / ".part").write_bytes(CONTENT[:5])
    source = Source(limit=0)
    with pytest.raises(BrokenOff, match="after 5 of 10000 bytes"):
        download(source, tmp_path / ".part", tmp_path / "file", digest=SHA256, pauses_s=pauses_s)
    assert len(source.starts) == tries and (tmp_path / ".part").read_bytes() == CONTENT[:5]


def test_a_full_disk_is_no_fault_of_the_source(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lockstep.runs.downloads.os.fsync", full)
    source = Source()
    with pytest.raises(NoRoom, match=f"no room on {tmp_path}"):
        download(source, tmp_path / ".part", tmp_path / "file", digest=SHA256, pauses_s=(0.01,))
    assert source.starts == [0]
