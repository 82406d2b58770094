"""A copy of what a bucket holds: whole, once per node, resumed after whatever broke it off; on a real S3 server."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from disk_campaign import fill, no_mounts, small_disk

from faulty_proxy import FaultyProxy
from lockstep.runs.errors import UserError
from lockstep.runs.full_disk import NoRoom
from lockstep.storage import local_copy as module
from lockstep.storage.local_copy import MANIFEST, Copy, is_here, listed_copy, local_copy
from object_store import shared_store
from ranks import SRC

OBJECTS = {"a/1.jpg": b"one", "a/2.jpg": b"two" * 1000, "b/1.jpg": b"", "b/notes.txt": b"left where it is"}
ENDINGS = {".jpg", ".tar", ".csv"}


class Bucket:
    """A bucket of its own with objects below photographs/."""

    def __init__(self, cache: Path) -> None:
        self.server, self.cache = shared_store(), cache
        self.name = self.server.new_bucket()
        self.uri, self.client = f"s3://{self.name}/photographs", self.server.client()

    def put(self, objects: dict[str, bytes]) -> None:
        for name, data in objects.items():
            self.client.put_object(Bucket=self.name, Key=f"photographs/{name}", Body=data)

    def listed(self) -> Copy:
        return listed_copy(self.uri, {"endpoint_url": self.server.endpoint_url}, self.cache, ENDINGS)

    def copy(self, uri: str | None = None, endpoint_url: str | None = None, **options) -> Path:
        s3 = {"endpoint_url": endpoint_url or self.server.endpoint_url}
        return local_copy(uri or self.uri, s3, self.cache, ENDINGS, **options)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    found = Bucket(tmp_path / "cache")
    for name, value in found.server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module.Copy, "_is_fresh", lambda self: False)  # each call is another start
    monkeypatch.setattr(module, "DELAYS_S", (0.05,) * 40)
    found.put(OBJECTS)
    return found


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WANTED = {name: data for name, data in OBJECTS.items() if name.endswith(".jpg")}


def test_it_is_what_the_bucket_holds_and_follows_it(bucket):
    folder = bucket.copy()
    assert files_in(folder) == WANTED
    bucket.put({"a/1.jpg": b"eno", "c/9.jpg": b"nine"})
    bucket.client.delete_object(Bucket=bucket.name, Key="photographs/b/1.jpg")
    (folder / "a/2.jpg").write_bytes(b"damaged")
    changed = bucket.copy()
    now = {name: data for name, data in WANTED.items() if name != "b/1.jpg"} | {"a/1.jpg": b"eno", "c/9.jpg": b"nine"}
    assert files_in(changed) == now and changed != folder
    again = {path: path.stat().st_mtime_ns for path in changed.rglob("*.jpg")}
    assert bucket.copy() == changed and again == {path: path.stat().st_mtime_ns for path in changed.rglob("*.jpg")}


def test_who_reads_the_former_copy_keeps_it(bucket):
    folder = bucket.copy()
    bucket.put({"a/1.jpg": b"eno"})
    bucket.client.delete_object(Bucket=bucket.name, Key="photographs/b/1.jpg")
    changed = bucket.copy()
    assert files_in(folder) == WANTED and files_in(changed) == {"a/1.jpg": b"eno", "a/2.jpg": WANTED["a/2.jpg"]}
    assert (folder / "a/2.jpg").samefile(changed / "a/2.jpg"), "what did not change takes no room twice"
    os.close(module._held.pop(folder))  # as its process ends
    assert bucket.copy() == changed and not folder.exists() and len(list(changed.parent.iterdir())) == 4


def test_one_shard_is_copied_alone_and_a_table_with_what_lies_beside_it(bucket):
    bucket.put({"x.tar": b"tar", "y.tar": b"other", "t.csv": b"path,label\n"})
    shard = bucket.copy(f"{bucket.uri}/x.tar")
    assert shard.read_bytes() == b"tar" and files_in(shard.parent) == {"x.tar": b"tar"}
    table = bucket.copy(f"{bucket.uri}/t.csv")
    assert table.read_bytes() == b"path,label\n" and (table.parent / "a/1.jpg").read_bytes() == b"one"


def test_an_object_that_changes_while_it_is_copied_is_named(bucket, monkeypatch):
    listed = module.Copy._listed

    def then_changed(self, endings):
        entries = listed(self, endings)
        bucket.put({"a/1.jpg": b"eno"})
        return entries

    monkeypatch.setattr(module.Copy, "_listed", then_changed)
    with pytest.raises(UserError, match=r"photographs: a/1.jpg changed after it was listed: start again"):
        bucket.copy()


def test_what_cannot_be_copied_is_one_sentence(bucket, monkeypatch):
    def refused(uri=None, **options):
        with pytest.raises(UserError) as error:
            bucket.copy(uri, **options)
        return str(error.value)

    assert "of 0 objects there none is what can be read here: .csv, .jpg, .tar" in refused(f"s3://{bucket.name}/empty")
    assert "does not exist" in refused("s3://no-such-bucket-anywhere/x") and "s3.uri" not in refused("s3://no-such-b/x")
    assert "there none is what" in refused(f"{bucket.uri}/nothing.tar")
    assert "more than data.cache_gib=1e-07: give more" in refused(limit_gib=1e-7)
    bucket.put({"a": b"", "a.jpg/inner.jpg": b"x", "a.jpg": b"y"})
    assert "cannot be a file here" in refused()
    for name, value in bucket.server.environment("blind").items():
        monkeypatch.setenv(name, value)
    assert "access denied to bucket" in refused() and "to read data takes get and list" in refused()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "does not fit the access key id" in refused()


def test_a_budget_holds_for_a_copy_that_is_there_too(bucket):
    folder = bucket.copy()
    with pytest.raises(UserError, match=r"more than data.cache_gib=1e-07: give more"):
        bucket.copy(limit_gib=1e-7)
    assert files_in(folder) == WANTED, "the other run's files stay"


def test_listed_it_has_every_name_and_size_and_the_content_of_what_lists_images(bucket):
    listing = {"t.csv": b"path,label\n", "x.tar": b"shard", "y.tar": b"another", "y.tar.index": b"{}"}
    bucket.put(listing)
    copy = bucket.listed()
    sizes = {name: path.stat().st_size for name in files_in(copy.files) if (path := copy.files / name)}
    assert sizes == {name: len(data) for name, data in (WANTED | listing).items()}
    here = {name for name in sizes if is_here(copy.files / name)}
    assert here == {"t.csv", "x.tar", "y.tar.index"}, "y.tar need not be read: its index is there"
    assert all((copy.files / name).read_bytes() == listing[name] for name in here) and copy.missing_bytes()
    blocks = sum((copy.files / name).stat().st_blocks for name in sizes.keys() - here)
    assert blocks == 0, "what has not come takes no room"
    before = {name: (copy.files / name).stat().st_mtime_ns for name in sizes}
    copy.complete()
    assert files_in(copy.files) == WANTED | listing and not copy.missing_bytes()
    assert before == {name: (copy.files / name).stat().st_mtime_ns for name in sizes}, "a list of images stays current"


def test_another_manifest_takes_over_what_has_come_and_what_has_not(bucket):
    first = bucket.listed()
    bucket.put({"a/1.jpg": b"eno"})
    second = bucket.listed()
    assert second.files != first.files and not any(is_here(second.files / name) for name in WANTED)
    second.complete()
    assert files_in(second.files) == WANTED | {"a/1.jpg": b"eno"}


@pytest.mark.parametrize(
    ("limit_gib", "come"), [(3 / 2**30, {"a/1.jpg", "b/1.jpg"}), (0, {"b/1.jpg"}), (None, {*WANTED})]
)
def test_as_much_comes_as_there_is_room_for(limit_gib, come, bucket):
    copy = bucket.listed()
    copy.take_what_fits(limit_gib)
    copy.take_what_fits(limit_gib)
    assert {name for name in WANTED if is_here(copy.files / name)} == come


def test_a_name_never_leads_out_of_the_folder(bucket, monkeypatch):
    monkeypatch.setattr(module.S3Store, "entries", lambda *_: iter([("photographs/../../out.jpg", 1, "e")]))
    with pytest.raises(UserError, match="cannot be a file here"):
        bucket.copy()
    assert not (bucket.cache.parent / "out.jpg").exists()


def test_another_rank_of_the_node_lists_nothing(bucket, monkeypatch):
    bucket.copy()
    [manifest] = bucket.cache.glob(f"*/{MANIFEST}")
    os.utime(manifest, (0, 0))  # of a start before
    monkeypatch.undo()
    for name, value in bucket.server.environment().items():
        monkeypatch.setenv(name, value)
    folder = bucket.copy()
    monkeypatch.setattr(module.S3Store, "entries", None)
    assert bucket.copy() == folder and files_in(folder) == WANTED


@pytest.mark.slow
def test_requests_broken_off_and_a_store_that_is_away(bucket):
    large = {f"c/{n}.jpg": os.urandom(300_000) for n in range(30)}
    bucket.put(large)
    with FaultyProxy(urlsplit(bucket.server.endpoint_url).port) as proxy:
        proxy.be("lossy")
        faults = threading.Timer(0.5, lambda: (proxy.be("503"), time.sleep(0.7), proxy.be("away"), time.sleep(0.7),
                                               proxy.be("lossy")))  # fmt: skip
        faults.start()
        folder = bucket.copy(endpoint_url=proxy.endpoint_url)
        faults.join()
    assert files_in(folder) == WANTED | large


@pytest.mark.skipif(no_mounts() is not None, reason=str(no_mounts()))
def test_a_disk_that_fills_up_meanwhile_is_named_and_the_copy_goes_on_once_there_is_room(bucket):
    large = {f"c/{n}.jpg": os.urandom(300_000) for n in range(6)}
    bucket.put(large)
    with small_disk(bucket.cache, 3) as disk:
        check = module.Copy._check_room

        def then_filled(self, *arguments):
            check(self, *arguments)
            fill(disk)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Copy, "_check_room", then_filled)
            with pytest.raises(NoRoom, match=f"no room on {disk}.*: give data.cache_dir=FOLDER on a larger disk"):
                bucket.copy()
        with pytest.raises(UserError, match="which .* are not here yet, and .* GiB free: give data.cache_dir=FOLDER"):
            bucket.copy()
        (disk / "filler").unlink()
        assert files_in(bucket.copy()) == WANTED | large


CHILD = """
import sys
from pathlib import Path
from urllib.parse import urlsplit
from lockstep.storage import local_copy as module
append = module.Copy._append
def slow(self, entry, part):
    print(entry.name, flush=True)
    append(self, entry, part)
module.Copy._append = slow
module.local_copy(sys.argv[1], {"endpoint_url": sys.argv[2]}, Path(sys.argv[3]), {".jpg"})
"""


@pytest.mark.slow
def test_a_killed_copy_goes_on_and_nothing_of_it_is_left(bucket):
    large = {f"c/{n}.jpg": os.urandom(2_000_000) for n in range(20)}
    bucket.put(large)
    arguments = [bucket.uri, bucket.server.endpoint_url, str(bucket.cache)]
    for after in (3, 9, 15):
        child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE,
                                 env={**os.environ, "PYTHONPATH": str(SRC)})  # fmt: skip
        for _ in range(after):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    [manifest] = bucket.cache.glob(f"*/{MANIFEST}")
    here = list(manifest.parent.rglob("*.jpg"))
    assert here, "what came before is kept"
    times = {path: path.stat().st_mtime_ns for path in here if not path.name.startswith(".")}
    folder = bucket.copy()
    assert files_in(folder) == WANTED | large
    assert {path: path.stat().st_mtime_ns for path in times} == times
