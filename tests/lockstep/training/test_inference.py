"""A run's data in a notebook: the images that the run saw; of a checkpoint from elsewhere words and numbers."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from augmentations.policies import RandAugment
from lockstep.callbacks.checkpoint_io import write_checkpoint
from lockstep.runs.errors import UserError
from lockstep.storage.load import read_checkpoint
from lockstep.training.inference import load_data
from runs import succeed


def save_first_batch(path: Path) -> None:
    """Make the run write its first training batch, as its training step gets it."""
    from lightning.pytorch import LightningModule

    def save(module, batch, index):
        if module.global_step == index == 0:
            torch.save(batch, path)

    LightningModule.on_train_batch_start = save


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    for name, level in (("dark", 40), ("light", 200)):
        (place / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng([level, number]).integers(0, level, (12, 12, 3), np.uint8)
            Image.fromarray(pixels).save(place / "images" / name / f"{number}.png")
    words = [f"data.root={place / 'images'}", "data.image_size=8", "data.global_batch_size=8", "data.num_workers=1",
             "augmentation=rand_augment", "augmentation.num_ops=1", "augmentation.mixup_alpha=0.5", "seed=3",
             "model=small_cnn", "trainer=cpu", "trainer.max_steps=2", "run_id=r"]  # fmt: skip
    done = succeed(
        "train", "data=image_folder", *words, logs=place, before=partial(save_first_batch, place / "batch.pt")
    )
    return done


def first_batch(data):
    return data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)


def same_batch(batch, run):
    return all(map(torch.equal, batch, torch.load(run.logs / "batch.pt")))


def test_the_first_batch_is_the_runs_own_bit_for_bit_unless_an_option_is_another(run):
    batch = first_batch(load_data("r", run.logs))
    assert same_batch(batch, run) and (batch[0].shape, batch[1].shape) == ((8, 3, 8, 8), (8, 2))
    data = load_data("r", run.logs, global_batch_size=6, seed=4)
    assert first_batch(data)[0].shape == (6, 3, 8, 8) and (data.seed, data.augmentation.mixing.mixup_alpha) == (4, 0.5)


def test_of_a_checkpoint_from_elsewhere_the_root_is_said_here_and_it_chooses_no_code_and_no_place(run, tmp_path):
    """Its augmentation and seed are names and numbers, which count."""
    canary, theirs, logs = tmp_path / "canary", str(tmp_path / "theirs.ckpt"), tmp_path / "logs"
    checkpoint = read_checkpoint(run.folder.path / run.record["best_checkpoint"]["path"])
    write_checkpoint(checkpoint, Path(theirs))
    with pytest.raises(UserError, match="data.root= is missing"):
        load_data(theirs, logs)
    here = {"root": run.logs / "images", "cache_dir": tmp_path / "cache"}
    assert same_batch(first_batch(load_data(theirs, logs, **here)), run)
    config = checkpoint["lockstep"]["config"]
    config["data"].update(_target_="os.mkdir", path=str(canary), cache_dir=str(canary))
    config["augmentation"] = {"_target_": "os.mkdir", "path": str(canary)}
    write_checkpoint(checkpoint, Path(theirs))
    data = load_data(theirs, logs, **here)
    assert isinstance(data.augmentation, RandAugment)  # as the config's choices name it
    assert not canary.exists() and data.num_train == 32
