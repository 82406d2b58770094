"""Which pixels an image becomes follows from (seed, epoch, its place in the order), whoever makes
them.
"""

import itertools

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from data.image_folder import ImageFolderDataModule
from lockstep.config.compose import CONFIGS
from lockstep.config.instantiate import build
from lockstep.data.augmentation import CropFlip
from lockstep.data.image_datamodule import ImageDataModule, ImageSet

RNG = np.random.default_rng(0)
BATCH, SIDE, RESIZED = 48, 14, 10  # images of the side that they are resized to, and smaller ones
MIXED = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mix_prob": 0.8}
ALL = {"color_jitter": [0.4, 0.4, 0.4, 0.1], "erasing_prob": 0.5, **MIXED}
AUGMENTATIONS = {
    "none": {}, "crop_flip": {}, "crop_flip mixed": MIXED, "crop_flip with all": ALL, "resized_crop": {},
    "rand_augment": {"erasing_prob": 0.25, **MIXED}, "rand_augment whole": {"scale": None}, "trivial_augment": {},
    "auto_augment": {}, "three_augment": {"cutmix_alpha": 1.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("images"), SIDE)


@pytest.fixture(scope="module")
def small_root(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("small"), RESIZED)


def folder_of(root, side):
    for label, (part, count) in itertools.product("ab", (("train", 50), ("val", 2), ("test", 2))):
        folder = root / part / label
        folder.mkdir(parents=True)
        for i in range(count):
            pixels = RNG.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


class InMemory(ImageDataModule):
    """The images of the folder in an array."""

    own_mean, own_std = ImageFolderDataModule.own_mean, ImageFolderDataModule.own_std

    def __init__(self, *, root, **options):
        super().__init__(name="memory", **options)
        self.root = root

    def read(self):
        parts = itertools.product((("train", 50), ("val", 2), ("test", 2)), "ab")
        files = [
            self.root / part / label / f"{i}.png" for (part, n), label in parts for i in range(n)
        ]
        labels = np.array(["ab".index(path.parent.name) for path in files])
        return ImageSet(
            np.stack([np.asarray(Image.open(path)) for path in files]),
            labels,
            ["a", "b"],
            4,
            num_val=4,
        )


def augmentation(name):
    shared, option = (
        yaml.safe_load((CONFIGS / "augmentation" / f"{option}.yaml").read_text())
        for option in ("default", name.split()[0])
    )
    option = {key: value for key, value in {**shared, **option}.items() if key != "defaults"}
    return build({**option, **AUGMENTATIONS[name]})


def world(root, name, ranks, accumulate, path, workers):
    """The ranks' data modules, one after the other in this process."""
    found, chosen = [], augmentation(name)
    on_batches = isinstance(chosen, CropFlip) and not (chosen.color_jitter or chosen.erasing_prob)
    kind = (
        InMemory if path == "array" and not on_batches else ImageFolderDataModule
    )  # single files come resized
    for rank in range(ranks):
        dm = kind(
            root=root, cache_dir=root.parent / f"{root.name}-cache", image_size=12, resize=14, crop_padding=2,
            flip=True, path=path, num_workers=workers, global_batch_size=BATCH, seed=5,
        )  # fmt: skip
        dm.set_augmentation(chosen)
        dm.attach_to_ranks(rank=rank, world_size=ranks, accumulate_grad_batches=accumulate)
        found.append(dm)
    return found


def epoch_bytes(modules, *, epoch=1, done=0):
    """The images and labels of each global batch of an epoch, in its order."""
    parts = []
    for dm in modules:
        loader = dm.train_dataloader()
        loader.set_epoch(epoch)
        if done:
            loader.load_state_dict({**loader.state_dict(), "global_batches": done})
        parts.append([dm.on_after_batch_transfer(batch, 0) for batch in loader])
    accumulate = len(parts[0]) // (2 - done)
    steps = []
    for step in range(2 - done):
        micro = [
            parts[rank][step * accumulate + j]
            for j in range(accumulate)
            for rank in range(len(modules))
        ]
        images, labels = (torch.cat([pair[i] for pair in micro]).contiguous() for i in (0, 1))
        assert images.shape == (BATCH, 3, 12, 12)
        steps.append((images.numpy().tobytes(), labels.numpy().tobytes()))
    return steps


WORLDS = ((3, 2, "loader", 0), (2, 1, "loader", 2), (2, 2, "array", 1))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_ranks_workers_and_resumes_see_equal_pixels(root, name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    expected = epoch_bytes(world(root, name, 1, 1, "array", 0))
    assert expected != epoch_bytes(world(root, name, 1, 1, "array", 0), epoch=2)
    for ranks, accumulate, path, workers in WORLDS:
        modules = world(root, name, ranks, accumulate, path, workers)
        assert modules[0].choose_path()[0] == path
        assert epoch_bytes(modules) == expected, (ranks, accumulate, path, workers)
        assert epoch_bytes(modules, done=1) == expected[1:], (ranks, accumulate, path, workers)
    assert torch.equal(torch.get_rng_state(), before), (
        "the caller's random stream stays where it was"
    )


def test_resized_images_agree_on_both_paths(small_root):
    expected = epoch_bytes(world(small_root, "crop_flip", 1, 1, "array", 0))
    for path in ("array", "loader"):
        modules = world(small_root, "crop_flip", 2, 2, path, 1)
        assert epoch_bytes(modules) == expected and epoch_bytes(modules, done=1) == expected[1:]
    options = {
        "image_size": 12,
        "resize": 14,
        "crop_padding": 2,
        "flip": True,
        "global_batch_size": BATCH,
        "seed": 5,
    }
    dm = InMemory(root=small_root, **options)  # resized on the device
    dm.attach_to_ranks()
    for (images, labels), (others, truth) in zip(epoch_bytes([dm]), expected, strict=True):
        difference = np.frombuffer(images, np.float32) - np.frombuffer(others, np.float32)
        assert np.abs(difference).max() * 0.224 * 255 <= 1.01
        assert np.frombuffer(labels, np.int64).tolist() == np.frombuffer(truth, np.int64).tolist()


def test_evaluation_takes_the_centre_whatever_the_augmentation(root):
    def evaluated(name, path):
        dm = world(root, name, 1, 1, path, 1)[0]
        return torch.cat([dm.on_after_batch_transfer(batch, 0)[0] for batch in dm.val_dataloader()])

    expected = evaluated("none", "array")
    assert torch.equal(evaluated("rand_augment", "loader"), expected)
    assert torch.equal(evaluated("three_augment", "array"), expected)
