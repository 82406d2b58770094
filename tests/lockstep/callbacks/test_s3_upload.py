"""The callback around the uploader, in plain Lightning scripts and at the ends that a run can have."""

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lockstep.callbacks.s3_upload import S3Upload
from lockstep.config.compose import CONFIGS
from lockstep.runs.errors import Interrupted, UserError
from lockstep.runs.files import checksum_of
from lockstep.storage.checkpoint_files import Sidecar, write_sidecar
from lockstep.storage.fetch import read_pointer
from lockstep.storage.s3 import Bucket
from object_store import shared_store

SRC = Path(__file__).resolve().parents[3] / "src"


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
    return read_pointer(callback.bucket.at("the-run"), kind)[0].step


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


def test_the_config_says_what_the_signature_says():
    group = yaml.safe_load((CONFIGS / "train.yaml").read_text())["s3"]
    signature = inspect.signature(S3Upload).parameters
    own = {name: signature[name].default for name in ("endpoint_url", "required", "flush_timeout_s")}
    assert group == {"uri": None, **own}


PLAIN = """
import sys, torch, lightning.pytorch as pl
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.s3_upload import S3Upload

class Net(pl.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()
    def validation_step(self, batch, _):
        self.log("val/loss", self.layer(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

if __name__ == "__main__":
    folder, uri, endpoint_url = sys.argv[1:]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 3)), batch_size=2)
    callbacks = [S3Upload(folder, uri, endpoint_url), Checkpoints(folder + "/checkpoints", "val/loss", "min")]
    pl.Trainer(max_epochs=2, callbacks=callbacks, logger=False, enable_checkpointing=False, accelerator="cpu",
               enable_progress_bar=False).fit(Net(3), loader, loader)
"""
READ = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from script import Net
net = Net.load_from_checkpoint(sys.argv[1], map_location="cpu")
state = torch.load(sys.argv[1], weights_only=True)["state_dict"]
assert torch.equal(net.layer.weight, state["layer.weight"]) and net.hparams.width == 3
assert not any(name.startswith("lockstep") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_plain_lightning_script_uploads_checkpoints_that_lightning_reads_without_lockstep(make, tmp_path):
    callback = make()
    server, uri = shared_store(), callback.bucket.uri
    (tmp_path / "script.py").write_text(PLAIN)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "plain"), uri, server.endpoint_url]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = Bucket(f"{uri}/plain", server.endpoint_url)
    pointer, *_ = read_pointer(run, "best")
    run.download(pointer.key, tmp_path / "best.ckpt")
    module = (tmp_path / "script.py").read_text().replace("from lockstep", "pass  # from lockstep")
    (tmp_path / "reader").mkdir()
    (tmp_path / "reader" / "script.py").write_text(module)
    words = [sys.executable, "-c", READ, str(tmp_path / "best.ckpt"), str(tmp_path / "reader")]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(torch.load(tmp_path / "best.ckpt", weights_only=True)) >= {"state_dict", "optimizer_states", "loops"}
