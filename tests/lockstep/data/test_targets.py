"""Targets that are no single class: several labels, numbers, masks, dicts.

And several views of an image.
"""

import csv

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from augmentations.policies import RandAugment, ResizedCrop
from data.dataset import DatasetDataModule
from data.image_folder import ImageFolderDataModule
from data.parquet import ParquetDataModule
from data.table import CSVDataModule
from lockstep.data.augmentation import CropFlip
from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.data.targets import name_mask_classes
from lockstep.process.errors import UserError

N, SIDE = 26, 16
RNG = np.random.default_rng(0)
BLOCKS = (
    RNG.integers(0, 2, (N, SIDE // 2, SIDE // 2)).repeat(2, 1).repeat(2, 2).astype(np.uint8)
)  # classes 0 and 1


class Arrays(ImageDataModule):
    """White pixels are of class 1."""

    def __init__(self, targets, names=(), **options):
        super().__init__(name="arrays", **options)
        self._given_targets, self._names = targets, list(names)

    def read(self):
        images = (255 * BLOCKS[..., None]).repeat(3, 3)
        return ImageSet(images, self._given_targets, self._names, num_test=6)


class Items(torch.utils.data.Dataset):
    def __init__(self, targets):
        self.targets_of = targets

    def __len__(self):
        return N

    def __getitem__(self, i):
        return Image.fromarray((255 * BLOCKS[i, ..., None]).repeat(3, 2)), self.targets_of(i)


OPTIONS = {
    "image_size": SIDE,
    "global_batch_size": 4,
    "mean": 0,
    "std": 1,
    "num_workers": 0,
    "val_fraction": 0.2,
}


def batches(dm, split="train", augmentation=None, epoch=0, **place):
    """All images and targets of a split."""
    dm.set_augmentation(augmentation)
    dm.attach_to_ranks(**place)
    loader = getattr(dm, f"{split}_dataloader")()
    if split == "train":
        loader.set_epoch(epoch)
    return [dm.on_after_batch_transfer(batch, 0) for batch in loader]


def joined(found):
    images, targets = zip(*found)
    return torch.cat(images), torch.cat(targets)


@pytest.fixture
def pictures(tmp_path):
    for folder, values in (("images", 255 * BLOCKS), ("masks", BLOCKS)):
        (tmp_path / folder).mkdir()
        for i, pixels in enumerate(values):
            Image.fromarray(pixels).save(tmp_path / folder / f"{i:02d}.png")
    return tmp_path


def table(pictures, header, row):
    with (pictures / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["path", *header], *([f"images/{i:02d}.png", *row(i)] for i in range(N))]
        )
    return CSVDataModule


def encoded(pictures):
    return [(pictures / "images" / f"{i:02d}.png").read_bytes() for i in range(N)]


def labels_of(i):
    return [i % 2, int(i > 9), 0.5]


LABELS = ["odd", "large", "vague"]


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_several_labels_and_their_mixtures(source, pictures, tmp_path):
    options = {"label_columns": LABELS, "cache_dir": tmp_path / "cache", **OPTIONS}
    if source == "csv":
        kind, root = table(pictures, LABELS, labels_of), pictures / "list.csv"
    else:
        kind, root = ParquetDataModule, tmp_path / "some.parquet"
        columns = {name: [labels_of(i)[c] for i in range(N)] for c, name in enumerate(LABELS)}
        parquet.write_table(pa.table({"image": encoded(pictures), **columns}), root)
    dm = kind(root=root, **options)
    targets = joined(batches(dm))[1]
    assert (dm.class_names, dm.num_classes, dm.target_kind) == (LABELS, 3, "labels")
    assert dm.source.target_name(1) == "odd, vague"
    assert (
        targets.dtype == torch.float32 and targets.shape == (16, 3) and (targets[:, 2] == 0.5).all()
    )
    assert dm.class_counts == [sum(labels_of(i)[c] > 0 for i in dm.splits.train) for c in range(3)]
    dm.match_classes(["vague", "none", "odd", "large"])
    assert torch.equal(
        joined(batches(dm))[1], targets[:, [2, 2, 0, 1]] * torch.tensor([1, 0, 1, 1])
    )
    mixed = joined(batches(dm, augmentation=CropFlip(mixup_alpha=1)))[1]
    assert ((mixed[:, 2] > 0) & (mixed[:, 2] < 1)).any() and (mixed[:, 0] == 0.5).all()
    with pytest.raises(
        UserError, match="has no column big: it has .*odd, large, vague. Give data.label_columns="
    ):
        kind(root=root, **{**options, "label_columns": ["odd", "big"]}).prepare()


@pytest.mark.parametrize("source", ["parquet", "folders", "dataset"])
def test_numbers(source, pictures, tmp_path):
    values, options = (
        [i // 3 - 2.5 for i in range(N)],
        {"target": "number", "cache_dir": tmp_path / "c", **OPTIONS},
    )
    if source == "parquet":
        parquet.write_table(
            pa.table({"image": encoded(pictures), "label": values}), tmp_path / "some.parquet"
        )
        dm = ParquetDataModule(root=tmp_path / "some.parquet", **options)
    elif source == "dataset":
        dm = DatasetDataModule(dataset=Items(lambda i: values[i]), **options)
    else:
        for i, value in enumerate(values):
            (tmp_path / "root" / str(value)).mkdir(parents=True, exist_ok=True)
            (pictures / "images" / f"{i:02d}.png").rename(
                tmp_path / "root" / str(value) / f"{i:02d}.png"
            )
        dm = ImageFolderDataModule(root=tmp_path / "root", **options)
    images, targets = joined(batches(dm))
    assert (dm.class_names, dm.num_classes, dm.target_kind, targets.dtype) == (
        [],
        1,
        "number",
        torch.float32,
    )
    assert (
        dm.counts_per_split == {"train": [], "val": [], "test": []}
        and float(dm.source.target_name(0)) in values
    )
    for image, target in zip((images[:, 0] > 0.5).numpy(), targets.tolist(), strict=True):
        assert any((image == BLOCKS[i]).all() for i in range(N) if values[i] == target)


MASKED = {
    "crop and flip of whole batches": (CropFlip(), {"crop_padding": 3, "flip": True}),
    "random parts": (ResizedCrop(scale=(0.3, 1.0)), {"flip": True}),
}


@pytest.mark.parametrize("source", ["csv", "folders", "arrays", "dataset"])
@pytest.mark.parametrize("case", MASKED)
def test_a_mask_moves_with_its_image(case, source, pictures, tmp_path):
    augmentation, options = MASKED[case]
    options = {
        **OPTIONS,
        **options,
        "image_size": 12,
        "resize": SIDE,
        "cache_dir": tmp_path / "cache",
    }
    if source == "csv":
        kind = table(pictures, ["label"], lambda i: [f"masks/{i:02d}.png"])
        dm = kind(root=pictures / "list.csv", target="mask", **options)
    elif source == "folders":
        dm = ImageFolderDataModule(root=pictures, target="mask", **options)
    elif source == "arrays":
        dm = Arrays(BLOCKS.astype(np.int64), ["0", "1"], **options)
    else:
        dm = DatasetDataModule(
            dataset=Items(lambda i: torch.from_numpy(BLOCKS[i])), target="mask", **options
        )
    images, masks = joined(batches(dm, augmentation=augmentation))
    assert (dm.class_names, dm.num_classes, dm.target_kind) == (["0", "1"], 2, "mask")
    assert masks.dtype == torch.int64 and masks.shape == (len(images), 12, 12)
    equal = ((images[:, 0] > 0.5) == (masks > 0)).float().mean()
    assert equal == 1 if case != "random parts" else equal > 0.85  # nearest beside bilinear
    assert len({image.numpy().tobytes() for image in images}) == len(images)
    assert bool((masks == -1).any()) == ("crop_padding" in options), (
        "the border beyond the image does not count"
    )
    images, masks = joined(batches(dm, "val"))
    assert torch.equal(images[:, 0] > 0.5, masks > 0)


def test_255_counts_in_binary_masks_alone(pictures, tmp_path):
    def made(values):
        for i in range(N):
            Image.fromarray(values[BLOCKS[i]]).save(pictures / "masks" / f"{i:02d}.png")
        dm = ImageFolderDataModule(
            root=pictures, target="mask", cache_dir=tmp_path / "cache", **OPTIONS
        )
        return dm, joined(batches(dm))

    dm, (images, masks) = made(np.array([0, 255], np.uint8))
    assert dm.class_names == ["0", "255"] and torch.equal(images[:, 0] > 0.5, masks == 1)
    dm.match_classes(["0", "1", "2"])  # of a net whose masks had others besides
    images, masks = joined(batches(dm))
    assert torch.equal(images[:, 0] > 0.5, masks == -1)
    dm, (images, masks) = made(np.array([3, 255], np.uint8))
    assert dm.class_names == ["0", "1", "2", "3"] and torch.equal(images[:, 0] > 0.5, masks == -1)


class NamedItems(Items):
    """Masks whose classes have names."""

    def __init__(self, classes, targets=lambda i: BLOCKS[i]):
        super().__init__(targets)
        self.classes = classes


@pytest.mark.parametrize("source", ["array", "loader", "dataset"])
def test_masks_follow_the_classes_of_a_checkpoint(source, tmp_path):
    if source == "dataset":
        dataset = NamedItems(["road", "car"])
        dm = DatasetDataModule(dataset=dataset, target="mask", cache_dir=tmp_path, **OPTIONS)
    else:
        dm = Arrays(BLOCKS, ["road", "car"], path=source, **OPTIONS)
    dm.prepare()
    dm.match_classes(["sky", "car", "road"])
    dm.match_classes(["car", "sky", "road"])
    images, masks = joined(batches(dm, "val"))
    assert masks.dtype == torch.int64 and dm.class_names == ["car", "sky", "road"]
    assert torch.equal(masks, torch.where(images[:, 0] > 0.5, 0, 2))


def test_classes_of_a_dict_are_not_renumbered():
    dm = Arrays({"mask": BLOCKS, "class": np.arange(N) % 2}, ["road", "car"], **OPTIONS)
    dm.prepare()
    dm.match_classes(["road", "car", "sky"])
    with pytest.raises(UserError, match="another order than the checkpoint"):
        dm.match_classes(["car", "road", "sky"])


def test_classes_above_255_are_refused_in_masks():
    for targets in (BLOCKS.astype(np.int64) * 256, {"mask": BLOCKS.astype(np.int64) * 256}):
        with pytest.raises(UserError, match="a mask has the value 256: 0 to 254 are classes"):
            Arrays(targets, ["road", "car"], **OPTIONS).prepare()
    dm = Arrays(BLOCKS.astype(np.int64) - 1, ["road"], **OPTIONS)
    images, masks = joined(batches(dm, "val"))
    assert torch.equal(masks, torch.where(images[:, 0] > 0.5, 0, -1))


def test_splits_named_images_have_their_masks(pictures, tmp_path):
    for part, numbers in (("train_images", range(20)), ("val_images", range(20, N))):
        for folder in ("images", "masks"):
            (tmp_path / "set" / part / folder).mkdir(parents=True)
            for i in numbers:
                name = f"{folder}/{i:02d}.png"
                (pictures / name).rename(tmp_path / "set" / part / name)
    dm = ImageFolderDataModule(
        root=tmp_path / "set", target="mask", cache_dir=tmp_path / "cache", **OPTIONS
    )
    dm.prepare()
    assert len(dm.splits.train) == 20
    assert dm.source.mask_path(0) == tmp_path / "set/train_images/masks/00.png"


def test_masks_that_are_missing_or_do_not_fit(pictures, tmp_path):
    mask = pictures / "masks" / "03.png"
    mask.unlink()
    for size, mode, said in (
        (0, "", "images/03.png has no mask .*masks/03.png"),
        (4, "L", "mask of .*images/03.png has 4×4 pixels and its image 16×16"),
        (16, "RGB", "03.png must have one channel of 8 bits"),
        (16, "JPEG", "03.png is a JPEG, which changes values of pixels"),
    ):
        as_jpeg = ("L", "JPEG") if mode == "JPEG" else (mode, "PNG")
        Image.new(as_jpeg[0], (size, size)).save(mask, as_jpeg[1]) if size else None
        with pytest.raises(UserError, match=said):
            dm = ImageFolderDataModule(
                root=pictures, target="mask", cache_dir=tmp_path / "c", **OPTIONS
            )
            [batches(dm, split) for split in ("train", "val", "test")]


@pytest.mark.parametrize(
    ("targets", "options", "augmentation", "said"),
    [
        (
            BLOCKS,
            {},
            RandAugment(),
            "This augmentation cannot move masks .*take augmentation=crop_flip",
        ),
        (BLOCKS, {}, CropFlip(mixup_alpha=1), "cannot mix targets of the kind mask"),
        (np.zeros((N, 3)), {"views": 2}, CropFlip(mixup_alpha=1), "cannot mix data.views=2"),
    ],
)
def test_targets_that_an_augmentation_cannot_follow(targets, options, augmentation, said):
    with pytest.raises(UserError, match=said):
        batches(Arrays(targets, "abc", **options, **OPTIONS), augmentation=augmentation)


@pytest.mark.parametrize("path", ["array", "loader"])
def test_a_dict_in_an_array_and_a_rank_without_images(path):
    """Six test images on eight ranks."""
    targets = {"mask": BLOCKS, "number": np.arange(N) + 0.5, "class": np.arange(N)}
    dm = Arrays(targets, eval_batch_size=2, path=path, **{**OPTIONS, "global_batch_size": 8})
    found = [batches(dm, "test", rank=rank, world_size=8) for rank in range(8)]
    assert dm.target_kind == "dict" and {len(each) for each in found} == {1}
    counts = [len(images) for [(images, _)] in found]
    assert sorted(counts) == [0, 0, 1, 1, 1, 1, 1, 1]
    for [(images, each)] in found:
        assert images.shape[1:] == (3, SIDE, SIDE) and torch.equal(
            images[:, 0] > 0.5, each["mask"] == 1
        )
        assert torch.equal(each["number"], each["class"] + 0.5)
    assert sorted(label for [(_, each)] in found for label in each["class"].tolist()) == list(
        range(20, 26)
    )


def test_views_are_equal_on_any_ranks():
    def images(views, world_size):
        dm = Arrays(
            np.zeros((N, 3)), "abc", **{**OPTIONS, "crop_padding": 3, "flip": True, "views": views}
        )
        augmentation = CropFlip(erasing_prob=0.5)
        ranks = [
            batches(dm, augmentation=augmentation, rank=r, world_size=world_size)
            for r in range(world_size)
        ]
        return torch.cat([batch[0] for step in zip(*ranks) for batch in step])

    two = images(2, 1)
    assert two.shape == (16, 2, 3, SIDE, SIDE) and torch.equal(two, images(2, 2))
    assert torch.equal(two[:, 0], images(1, 1)) and not torch.equal(two[:, 0], two[:, 1])


def test_a_dataset_of_dicts(tmp_path):
    dataset = Items(
        lambda i: {"size": i / 2, "class": i % 3, "labels": [i % 2, 1.0], "mask": BLOCKS[i]}
    )
    dm = DatasetDataModule(dataset=dataset, target="any", cache_dir=tmp_path, **OPTIONS)
    (images, targets), *_ = batches(dm)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in targets.items()} == {
        "size": (torch.float32, (4,)), "class": (torch.int64, (4,)), "labels": (torch.float32, (4, 2)),
        "mask": (torch.int64, (4, SIDE, SIDE)),
    }  # fmt: skip
    assert torch.equal(images[:, 0] > 0.5, targets["mask"] == 1)
    assert torch.equal((2 * targets["size"]).long() % 3, targets["class"])


def test_a_target_that_is_no_number(pictures, tmp_path):
    kind = table(pictures, ["label"], lambda i: ["much" if i == 7 else i])
    with pytest.raises(UserError, match="images/07.png: the target much is not a number"):
        kind(root=pictures / "list.csv", target="number", cache_dir=tmp_path, **OPTIONS).prepare()
    with pytest.raises(UserError, match="data.target=text must be one of class, number, mask"):
        kind(root=pictures / "list.csv", target="text", cache_dir=tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    ("levels", "names"),
    [
        ([0, 127, 254], ["0", "127", "254"]),
        ([0, 128, 255], ["0", "128", "255"]),
        ([0, 255], ["0", "255"]),
        ([0, 1, 255], ["0", "1"]),
        ([0, 128, 254, 255], ["0", "128", "254"]),
        ([3, 255], ["0", "1", "2", "3"]),
        ([0, 7, 8, 11, 12, 13, 17, 19, 20], [str(i) for i in range(21)]),
    ],
)
def test_grey_levels_of_masks_are_classes(levels, names):
    assert name_mask_classes(levels) == names


@pytest.mark.parametrize("source", ["folders", "dataset"])
@pytest.mark.parametrize("levels", [[0, 127, 254], [0, 128, 255]])
def test_masks_of_grey_levels_have_the_classes_of_their_pixels(levels, source, pictures, tmp_path):
    grey = [np.array(levels, np.uint8)[(BLOCKS[i] * (1 + i % 2))] for i in range(N)]
    for i in range(N):
        Image.fromarray(grey[i]).save(pictures / "masks" / f"{i:02d}.png")
    options = {"target": "mask", "cache_dir": tmp_path / "cache", **OPTIONS}
    dm = ImageFolderDataModule(root=pictures, **options)
    if source == "dataset":
        dm = DatasetDataModule(dataset=Items(lambda i: grey[i]), **options)
    images, masks = joined(batches(dm))
    assert (dm.class_names, dm.num_classes) == ([str(level) for level in levels], 3)
    assert masks.unique().tolist() == [0, 1, 2] and torch.equal(images[:, 0] > 0.5, masks > 0)
    assert len(dm.warnings) == 1 and "grey levels" in dm.warnings[0]


class Counted(Items):
    """Keep how many masks are in memory at once, at most."""

    def __getitem__(self, i):
        image, mask = super().__getitem__(i)
        return image, Held(mask)


class Held(np.ndarray):
    alive = most = 0

    def __new__(cls, mask):
        Held.alive += 1
        Held.most = max(Held.most, Held.alive)
        return np.asarray(mask).view(cls)

    def __del__(self):
        Held.alive -= 1


def test_masks_of_a_dataset_are_not_kept(tmp_path):
    dataset = Counted(lambda i: BLOCKS[i].copy())
    dm = DatasetDataModule(dataset=dataset, target="mask", cache_dir=tmp_path, **OPTIONS)
    dm.prepare()
    assert dm.class_names == ["0", "1"] and Held.most < N / 2


def test_a_label_that_is_not_known_is_nan(pictures, tmp_path):
    kind = table(pictures, LABELS, lambda i: [-1 if i % 4 == 0 else 1, i % 2, 0])
    options = {"label_columns": LABELS, "cache_dir": tmp_path, **OPTIONS}
    dm = kind(root=pictures / "list.csv", unknown=-1, **options)
    targets = joined(batches(dm))[1]
    assert (
        targets.isnan().any()
        and not targets[:, 1:].isnan().any()
        and targets.nan_to_num().min() == 0
    )
    dm.refuse_labels_outside(0, 1)
    dm = kind(root=pictures / "list.csv", **options)
    dm.prepare()
    with pytest.raises(UserError, match=r"00.png \(line 2\): the label odd is -1.*data.unknown=-1"):
        dm.refuse_labels_outside(0, 1)


def test_unknown_labels_are_of_several_labels(pictures, tmp_path):
    kind = table(pictures, ["label"], lambda i: [i % 2])
    with pytest.raises(UserError, match="data.unknown=-1 is for several labels"):
        kind(root=pictures / "list.csv", unknown=-1, cache_dir=tmp_path, **OPTIONS).prepare()


def test_a_label_without_training_images_is_reported(pictures, tmp_path):
    kind = table(
        pictures,
        [*LABELS, "split"],
        lambda i: [i % 2, int(i > 20), 1, "test" if i > 20 else "train"],
    )
    dm = kind(root=pictures / "list.csv", label_columns=LABELS, cache_dir=tmp_path, **OPTIONS)
    dm.prepare()
    assert len(dm.warnings) == 1 and "No training image has the label large" in dm.warnings[0]
