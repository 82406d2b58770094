"""Any torch Dataset that returns (image, label)."""

import numpy as np
import pytest
import torch
from PIL import Image

from data.dataset import DatasetDataModule
from lockstep.process.errors import UserError
from runs import run_door


class Shades(torch.utils.data.Dataset):
    """Dark and light images, as Pillow images, arrays or tensors."""

    def __init__(self, kind="pillow", count=40, **own):
        self.kind, self.count = kind, count
        vars(self).update(own)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        pixels = np.full((20, 16, 3), 30 + 150 * (i % 2), np.uint8)
        if "tensor" in self.kind:
            image = torch.from_numpy(pixels).permute(2, 0, 1)
            return image / 255 if "float" in self.kind else image, torch.tensor(i % 2)
        if self.kind == "16 bits":
            return Image.fromarray(257 * pixels[..., 0].astype(np.uint16)), i % 2
        if self.kind == "normalised":
            return (pixels / 255 - 0.5) / 0.5, i % 2
        return pixels if self.kind == "array" else Image.fromarray(pixels), i % 2


def module(tmp_path, **options):
    options = {
        "image_size": 8,
        "global_batch_size": 4,
        "num_workers": 2,
        "mean": 0,
        "std": 1,
        **options,
    }
    return DatasetDataModule(cache_dir=tmp_path, **options)


@pytest.mark.parametrize("kind", ["pillow", "array", "tensor", "tensor of floats", "16 bits"])
def test_images_of_any_kind_become_batches(kind, tmp_path):
    dm = module(tmp_path, dataset=Shades(kind), test_dataset=Shades(kind, 6))
    dm.attach_to_ranks()
    assert (dm.num_train, dm.num_val, dm.num_test, dm.class_names) == (36, 4, 6, ["0", "1"])
    for loader in (dm.train_dataloader(), dm.val_dataloader(), dm.test_dataloader()):
        for batch in loader:
            images, labels = dm.on_after_batch_transfer(batch, 0)
            shades = (images[labels >= 0].mean((1, 2, 3)) * 255).round()
            assert shades.tolist() == [30 + 150 * label for label in labels[labels >= 0].tolist()]


def test_classes_and_targets_are_taken_where_the_data_set_has_them(tmp_path):
    dm = module(
        tmp_path, dataset=Shades(classes=["dark", "light"], targets=[i % 2 for i in range(40)])
    )
    dm.prepare()
    assert dm.class_names == ["dark", "light"] and (dm.num_train, dm.num_val, dm.num_test) == (
        32,
        4,
        4,
    )
    with pytest.raises(UserError, match="data=dataset needs data.dataset._target_=package.Class"):
        module(tmp_path)
    with pytest.raises(UserError, match="a label of Shades is not an integer"):
        module(tmp_path, dataset=Shades(targets=["a"] * 40)).prepare()


@pytest.mark.parametrize(
    ("own", "names"), [({"targets": torch.arange(40) % 4}, ["0", "1"]), ({}, ["0", "1"])]
)
def test_labels_are_the_ones_that_the_items_have_after_their_transform(own, names, tmp_path):
    fine = Shades(
        classes=["black", "white", "dark", "light"], target_transform=lambda label: label % 2, **own
    )
    dm = module(tmp_path, dataset=fine)
    dm.prepare()
    assert dm.class_names == names
    same = module(tmp_path, dataset=Shades(classes=["black", "white"], targets=[i % 2 for i in range(40)],
                                           target_transform=torch.tensor))  # fmt: skip
    same.prepare()
    assert same.class_names == ["black", "white"]


class Marked(Shades):
    """Its targets are what `of` makes of a position."""

    def __getitem__(self, i):
        return super().__getitem__(i)[0], self.of(i)


@pytest.mark.parametrize(
    ("of", "kind", "names"),
    [(lambda i: torch.tensor([1, i % 2, 0]), "labels", ["0", "1", "2"]), (lambda i: i % 3, "class", ["0", "1", "2"]),
     (lambda i: torch.rand(5, 2), "labels", list("01234"))],
)  # fmt: skip
def test_numbers_are_a_class_or_several_values_and_no_mask(of, kind, names, tmp_path):
    dm = module(tmp_path, dataset=Marked(of=of), target="any")
    dm.attach_to_ranks()
    assert (dm.target_kind, dm.class_names, dm.source.mask_names) == (kind, names, [])


def test_in_masks_of_0_and_255_alone_255_is_the_second_class(tmp_path):
    dm = module(
        tmp_path,
        dataset=Marked(of=lambda i: np.full((20, 16), 255 * (i % 2), np.uint8)),
        target="mask",
    )
    dm.attach_to_ranks()
    for batch in dm.train_dataloader():
        images, masks = dm.on_after_batch_transfer(batch, 0)
        assert torch.equal(masks, (images[:, 0] > 0.5).long()) and masks.any()


def test_what_random_transforms_of_the_data_set_draw_differs_between_epochs_and_seeds(tmp_path):
    class Noise(Shades):
        def __getitem__(self, i):
            return torch.rand(3, 8, 8), i % 2

    def epoch(seed, number):
        loader = module(tmp_path, dataset=Noise(), seed=seed).train_dataloader()
        loader.set_epoch(number)
        return torch.cat([batch["pixels"][0].reshape(-1) for batch in loader])

    first = epoch(0, 0)
    assert torch.equal(first, epoch(0, 0))
    assert not torch.equal(first, epoch(0, 1)) and not torch.equal(first, epoch(1, 0))


def test_a_negative_label_is_warned_of(tmp_path):
    dm = module(tmp_path, dataset=Shades(targets=[-1, *[i % 2 for i in range(39)]]))
    dm.prepare()
    assert dm.class_names == ["-1", "0", "1"]
    assert ["label -1" in sentence for sentence in dm.warnings] == [True]


@pytest.mark.parametrize("kind", ["any", "number"])
def test_a_number_that_is_not_finite_is_refused(kind, tmp_path):
    numbers = Marked(of=lambda i: float("nan") if i == 3 else i / 2)
    with pytest.raises(UserError, match="item 3 of Marked has the target nan, as 1 of 40 items"):
        module(tmp_path, dataset=numbers, target=kind).prepare()


@pytest.mark.parametrize(
    ("own", "options", "said"),
    [
        (
            {"classes": ["a", "b"], "targets": [-1] * 40},
            {},
            "item 0 of the train dataset has the label -1 and there",
        ),
        ({"targets": [i / 10 for i in range(40)]}, {}, "a label of Shades is not an integer"),
        ({}, {"group": "x"}, "data.group is of files and tables"),
    ],
)
def test_labels_that_are_no_classes_and_groups_are_refused(own, options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        module(tmp_path, dataset=Shades(**own), **options).prepare()


def test_two_data_sets_of_one_length_and_other_labels_are_not_the_same_images(tmp_path):
    one, other = (
        module(tmp_path, dataset=Shades(targets=targets)) for targets in ([0, 1] * 20, [1, 0] * 20)
    )
    one.prepare()
    other.prepare()
    assert one.data_hash != other.data_hash and one.list_hash != other.list_hash


def test_two_classes_of_one_name_stay_two(tmp_path):
    dm = module(
        tmp_path,
        dataset=Shades(classes=["crane", "dog", "crane"], targets=[i % 3 for i in range(40)]),
    )
    dm.prepare()
    assert dm.class_names == ["crane (0)", "crane (2)", "dog"]


def test_images_that_are_normalised_already_are_refused_before_training(tmp_path):
    with pytest.raises(UserError, match="the image of item 0 of Shades has values from -0.765"):
        module(tmp_path, dataset=Shades("normalised"), mean=None, std=None).attach_to_ranks()


@pytest.mark.slow
def test_a_run_by_config_alone(tmp_path):
    words = ["data=dataset", "data.dataset._target_=torchvision.datasets.FakeData", "+data.dataset.size=60",
             "+data.dataset.image_size=[3,12,12]", "+data.dataset.num_classes=3", "data.image_size=8",
             "data.global_batch_size=8", "model=small_cnn", "trainer=cpu", "trainer.max_epochs=1",
             "run_id=r"]  # fmt: skip
    done = run_door("train", *words, logs=tmp_path / "logs")
    assert done.code == 0 and done.record["num_train"] == 49, done.output
