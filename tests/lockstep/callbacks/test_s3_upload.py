"""The thin hook around the uploader: start, hand-over, end; against a real S3 server."""

import hashlib
import inspect
import time
from types import SimpleNamespace

import pytest
import yaml

from lockstep.callbacks.s3_upload import S3Upload
from lockstep.config.compose import CONFIGS
from lockstep.runs.errors import Interrupted, UserError
from lockstep.runs.files import checksum_of
from lockstep.runs.folder import RunFolder
from lockstep.storage.checkpoint_files import Sidecar
from lockstep.storage.outbox import Outbox
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.s3_options import UPLOAD_OPTIONS
from object_store import shared_store


@pytest.fixture(scope="module")
def bucket_name():
    return shared_store().new_bucket()


@pytest.fixture
def make(monkeypatch, tmp_path, bucket_name):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "the-run" / "checkpoints").mkdir(parents=True)
    made = []

    def callback(**changes):
        settings = {"uri": f"s3://{bucket_name}/{tmp_path.name}", "endpoint_url": server.endpoint_url, **changes}
        made.append(S3Upload(tmp_path / "the-run", **settings))
        return made[-1]

    yield callback
    for callback in made:
        if callback.uploader is not None:
            callback.uploader.stop()


def trainer(rank: int = 0, world_size: int = 1, heard=()):
    """What setup needs of a trainer; `heard` is what rank 0 broadcast to this rank."""
    answers = iter(heard)
    strategy = SimpleNamespace(broadcast=lambda value, src: value if rank == 0 else next(answers))
    return SimpleNamespace(strategy=strategy, global_rank=rank, world_size=world_size)


def checkpoint(callback, step: int, kind: str = "best"):
    data = hashlib.shake_128(f"{kind}{step}".encode()).digest(1000)
    path = callback.folder.checkpoints / f"{kind}-step{step:08d}.ckpt"
    path.write_bytes(data)
    return path, Sidecar.of(checksum_of(path), step=step, metric={"val/acc": 0.5}), kind


def pointer_of(callback, kind: str = "best"):
    run = callback.uploader.run
    return RunBucket(run.store, "the-run").read_pointer(kind)[0]


@pytest.mark.slow
def test_a_best_is_there_when_fit_has_ended_and_the_record_says_where(make):
    callback = make()
    callback.setup(trainer(), None, "fit")
    callback.on_checkpoint_complete(*checkpoint(callback, 10))
    callback.teardown(trainer(), None, "fit")
    pointer = pointer_of(callback)
    fields = callback.record_fields()
    assert fields["upload"]["uri"] == f"s3://{callback.options.bucket}/{pointer.key}"
    assert (fields["upload"]["sha256"], fields["upload"]["error"]) == (pointer.sha256, None)
    assert fields["upload_stall_s"] < 1.0
    assert not callback.uploader.is_alive
    callback.teardown(trainer(), None, "test")  # a second end is no wait and no error


def test_a_bucket_that_cannot_be_used_ends_the_run_before_training_on_every_rank(make):
    with pytest.raises(UserError) as caught:
        make(uri="s3://no-such-bucket/x").setup(trainer(), None, "fit")
    assert str(caught.value).startswith(
        "s3://no-such-bucket/x cannot be used: the bucket no-such-bucket does not exist"
    )
    with pytest.raises(UserError, match="because rank 0 said so"):
        make().setup(trainer(1, 2, ["start-id", "because rank 0 said so"]), None, "fit")


@pytest.mark.slow
def test_not_required_trains_on_and_says_so(make, caplog):
    callback = make(uri="s3://no-such-bucket/x", required=False, flush_timeout_s=3)
    callback.setup(trainer(), None, "fit")
    assert "training starts, uploads are tried again" in caplog.messages[0]
    callback.on_checkpoint_complete(*checkpoint(callback, 10))
    started = time.monotonic()
    callback.teardown(trainer(), None, "fit")
    assert time.monotonic() - started < 12
    assert "does not exist" in callback.upload_status().error
    assert [item.step for item in Outbox(callback.folder.path / "upload").left()] == [10]


@pytest.mark.slow
def test_an_interrupted_run_sends_its_last_at_once(make):
    callback = make(last_interval_s=3600.0)
    callback.setup(trainer(), None, "fit")
    callback.on_checkpoint_complete(*checkpoint(callback, 10, "last"))
    callback.on_exception(trainer(world_size=2), None, Interrupted("spot notice"))
    assert pointer_of(callback, "last").step == 10
    notes = callback.uploader.outbox.notes()
    assert notes.generation == 1 and 0 < notes.deadline - time.time() < 61


def test_the_next_start_has_its_whole_time_again(make):
    first = make()
    first.setup(trainer(), None, "fit")
    first.on_exception(trainer(), None, Interrupted("spot notice"))
    assert first.uploader.outbox.notes().deadline is not None
    again = make(flush_timeout_s=77.0)
    again.setup(trainer(), None, "fit")
    notes = again.uploader.outbox.notes()
    assert notes.deadline is None and notes.flush_left_s == 77.0


def test_an_exception_sends_what_waits(make):
    callback = make()
    callback.setup(trainer(), None, "fit")
    callback.on_checkpoint_complete(*checkpoint(callback, 10))
    callback.on_exception(trainer(), None, ZeroDivisionError())
    assert pointer_of(callback).step == 10


def test_the_address_is_checked_before_anything_else(tmp_path):
    with pytest.raises(UserError, match="An S3 address is"):
        S3Upload(tmp_path, "bucket/prefix")


def test_the_config_group_says_what_the_signature_says():
    group = yaml.safe_load((CONFIGS / "s3" / "none.yaml").read_text())
    signature = inspect.signature(S3Upload).parameters
    defaults = {name: signature[name].default for name in signature if name not in ("run_folder", "store")}
    assert group == {**defaults, "uri": None}
    assert group.keys() > UPLOAD_OPTIONS


def test_other_stages_start_nothing(make, tmp_path):
    callback = make(uri="s3://no-such-bucket/x")
    callback.setup(trainer(), None, "test")
    assert callback.uploader is None and callback.record_fields() == {}
    assert RunFolder(tmp_path / "the-run").path.exists()
