"""The callback around the uploader, in plain Lightning scripts and at the ends that a run can have."""

import time
from types import SimpleNamespace

import pytest

from lockstep.callbacks.s3_upload import S3Upload
from lockstep.runs.errors import Interrupted, UserError
from lockstep.runs.files import checksum_of
from lockstep.storage.checkpoint_files import Sidecar, write_sidecar
from lockstep.storage.fetch import read_pointer
from object_store import shared_store


@pytest.fixture
def make(monkeypatch, tmp_path):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "the-run" / "checkpoints").mkdir(parents=True)
    bucket, made = server.new_bucket(), []

    def callback(**changes):
        settings = {"uri": f"s3://{bucket}/x", "endpoint_url": server.endpoint_url, **changes}
        made.append(S3Upload(tmp_path / "the-run", **settings))
        return made[-1]

    yield callback
    for callback in made:
        if callback.uploader is not None:
            callback.uploader.stop()


def trainer(rank: int = 0, world_size: int = 1, heard=None):
    """What setup needs of a trainer; `heard` is what rank 0 broadcast to this rank."""
    strategy = SimpleNamespace(broadcast=lambda value, src: value if rank == 0 else heard)
    return SimpleNamespace(strategy=strategy, is_global_zero=rank == 0, world_size=world_size)


def checkpoint(callback, step: int, kind: str = "best"):
    path = callback.folder.checkpoints / f"{kind}-step{step:08d}.ckpt"
    path.write_bytes(f"{kind}{step}".encode())
    write_sidecar(path, Sidecar(step, **vars(checksum_of(path))))


def step_of(callback, kind: str = "best") -> int:
    return read_pointer(callback.bucket.at("the-run"), kind).checkpoint.step


def test_a_best_is_there_when_fit_has_ended_and_the_record_says_where(make):
    callback = make()
    callback.setup(trainer(), None, "fit")
    checkpoint(callback, 10)
    callback.teardown(trainer(), None, "fit")
    fields = callback.record_fields()
    assert step_of(callback) == 10 and fields["upload"]["uri"].startswith(f"{callback.bucket.uri}/the-run/checkpoints/")
    assert fields["upload"]["error"] is None
    callback.teardown(trainer(), None, "test")  # a second end is no wait and no error


def test_a_bucket_that_cannot_be_used_ends_the_run_before_training_on_every_rank(make):
    with pytest.raises(UserError, match="^s3://no-such-bucket/x cannot be used: the bucket no-such-bucket does not"):
        make(uri="s3://no-such-bucket/x").setup(trainer(), None, "fit")
    with pytest.raises(UserError, match="because rank 0 said so"):
        make().setup(trainer(1, 2, "because rank 0 said so"), None, "fit")
    with pytest.raises(UserError, match="An S3 address is"):
        make(uri="bucket/prefix")


def test_without_required_it_trains_on(make, caplog):
    caplog.set_level("INFO")
    callback = make(uri="s3://no-such-bucket/x", required=False, flush_timeout_s=2)
    callback.setup(trainer(), None, "fit")
    assert "training starts, uploads are tried again" in caplog.messages[0]
    checkpoint(callback, 10)
    started = time.monotonic()
    callback.teardown(trainer(), None, "fit")
    assert time.monotonic() - started < 10 and "does not exist" in callback.uploader.status().error
    assert callback.uploader.status().uri is None


def test_an_interrupted_run_sends_its_last_at_once(make):
    callback = make()
    callback.setup(trainer(), None, "fit")
    checkpoint(callback, 10, "last")
    callback.on_exception(trainer(world_size=2), None, Interrupted("spot notice"))
    assert step_of(callback, "last") == 10
