"""Any torch Dataset that returns (image, label)."""

import numpy as np
import pytest
import torch
from PIL import Image

from data.dataset import DatasetDataModule
from lockstep.process.errors import UserError
from runs import run_script


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


def test_classes_and_targets_of_the_data_set_count(tmp_path):
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


def test_a_module_whose_preparation_failed_prepares_again(tmp_path):
    dm = module(tmp_path, dataset=Shades(), global_batch_size=1000)
    for _ in range(2):
        with pytest.raises(UserError, match="give a size from 1 to 32"):
            dm.setup()
    dm.global_batch_size = 4
    dm.setup()
    assert dm.steps_per_epoch == len(dm.train_dataloader()) == 8


@pytest.mark.parametrize(
    ("own", "names"), [({"targets": torch.arange(40) % 4}, ["0", "1"]), ({}, ["0", "1"])]
)
def test_labels_are_those_after_the_target_transform(own, names, tmp_path):
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


def test_255_is_a_class_in_masks_of_0_and_255(tmp_path):
    dm = module(
        tmp_path,
        dataset=Marked(of=lambda i: np.full((20, 16), 255 * (i % 2), np.uint8)),
        target="mask",
    )
    dm.attach_to_ranks()
    for batch in dm.train_dataloader():
        images, masks = dm.on_after_batch_transfer(batch, 0)
        assert torch.equal(masks, (images[:, 0] > 0.5).long()) and masks.any()


def test_random_transforms_differ_between_epochs_and_seeds(tmp_path):
    class Noise(Shades):
        def __getitem__(self, i):
            return torch.rand(3, 8, 8), i % 2

    def epoch(seed, number):
        loader = module(tmp_path, dataset=Noise(), seed=seed).train_dataloader()
        loader.set_epoch(number)
        return torch.cat([batch.pixels[0].reshape(-1) for batch in loader])

    first = epoch(0, 0)
    assert torch.equal(first, epoch(0, 0))
    assert not torch.equal(first, epoch(0, 1)) and not torch.equal(first, epoch(1, 0))


@pytest.mark.parametrize("evaluated", [None, "quiet", "noisy"])
def test_random_images_of_an_evaluation_are_warned_of(evaluated, tmp_path):
    class Flipped(Shades):
        def __getitem__(self, i):
            image = torch.arange(64.0).reshape(1, 8, 8).expand(3, 8, 8) / 64
            return image.flip(-1) if torch.rand(()) < 0.5 else image, i % 2

    kinds = {None: None, "quiet": Shades(), "noisy": Flipped()}
    given = {name: kinds[evaluated] for name in ("val_dataset", "test_dataset")}
    dm = module(tmp_path, dataset=Flipped(), **given)
    dm.prepare()
    warned = any("Flipped change each time they are read" in text for text in dm.warnings)
    assert warned == (evaluated != "quiet")


def test_photographs_are_rotated_by_their_exif_data(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[0] = 255
    file = tmp_path / "photo.jpg"
    Image.fromarray(pixels).save(file, exif=exif, quality=100)

    class Photographs(Shades):
        def __getitem__(self, i):
            with Image.open(file) as image:
                return image.convert("RGB"), i % 2

    dm = module(tmp_path, dataset=Photographs(), num_workers=0)
    dm.prepare()
    (image,) = dm.source.open(0)
    assert np.asarray(image)[:, -1].min() > 200 and np.asarray(image)[:, 0].max() < 50


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


def test_other_labels_give_another_hash(tmp_path):
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
    with pytest.raises(UserError, match="item 0 of Shades: the image has values from -0.765"):
        module(tmp_path, dataset=Shades("normalised"), mean=None, std=None).attach_to_ranks()


LOW = 1000
HIGH = 4000


class Deep(torch.utils.data.Dataset):
    """Grey images of 11 values, as arrays, tensors or Pillow images of many bits."""

    def __init__(self, kind, channels=1, count=40):
        self.kind = kind
        self.channels = channels
        self.count = count

    def __len__(self):
        return self.count

    def values(self, i):
        """Return (height, width, channels)."""
        rows = np.linspace(LOW, HIGH, 64).reshape(8, 8, 1) if i % 2 else np.full((8, 8, 1), LOW)
        return np.round(rows).repeat(self.channels, 2)

    def __getitem__(self, i):
        kind, _, form = self.kind.partition(" ")
        values = self.values(i).astype(kind)
        if form == "tensor":
            return torch.from_numpy(values).permute(2, 0, 1), i % 2
        if form == "pillow":
            return Image.fromarray(values[..., 0]), i % 2
        return values, i % 2


DEEP_KINDS = ["uint16", "uint16 tensor", "uint16 pillow", "int32", "int64 tensor", "float32 tensor"]


@pytest.mark.parametrize("kind", DEEP_KINDS)
def test_deep_images_are_read_in_full_depth(kind, tmp_path):
    dm = module(tmp_path, dataset=Deep(kind), range=[LOW, HIGH], channels=1)
    dm.attach_to_ranks()
    dm.test_on_all()
    expected = (Deep(kind).values(1)[..., 0] - LOW) / (HIGH - LOW)
    for batch in dm.test_dataloader():
        images, labels = dm.on_after_batch_transfer(batch, 0)
        assert np.allclose(images[labels == 1][:, 0], expected, atol=1e-6)
        assert not images[labels == 0].any()
    assert "black 1000 and white 4000" in dm.depth_note


def test_bands_of_a_dataset_are_its_channels(tmp_path):
    dm = module(tmp_path, dataset=Deep("uint16 tensor", 5), range=[LOW, HIGH], channels=5)
    images = dm.on_after_batch_transfer(next(iter(dm.train_dataloader())), 0)[0]
    assert images.shape == (4, 5, 8, 8) and images.max() == 1


def test_mean_and_deviation_of_deep_items_are_measured(tmp_path):
    dm = module(
        tmp_path, dataset=Deep("uint16"), range=[LOW, HIGH], channels=1, mean="auto", std="auto"
    )
    dm.prepare()
    pixels = np.stack([(Deep("uint16").values(i) - LOW) / (HIGH - LOW) for i in dm.splits.train])
    assert dm.mean == pytest.approx([pixels.mean()], abs=1e-6)
    assert dm.std == pytest.approx([pixels.std()], abs=1e-6)


def test_random_transforms_give_all_ranks_one_mean(tmp_path):
    class Noise(Deep):
        def values(self, i):
            return torch.randint(LOW, HIGH, (8, 8, 1)).numpy()

    means = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        dm = module(tmp_path, dataset=Noise("uint16"), range=[LOW, HIGH], channels=1, mean="auto")
        dm.prepare()
        means.append(dm.mean)
    assert means[0] == means[1]


def test_range_by_image_stretches_each_item(tmp_path):
    dm = module(tmp_path, dataset=Deep("int32"), range="image", channels=1)
    batch = next(iter(dm.train_dataloader()))
    images, labels = dm.on_after_batch_transfer(batch, 0)
    assert (images[labels == 1].amax((1, 2, 3)) == 1).all()


@pytest.mark.parametrize("kind", ["uint16", "int32", "int64 tensor"])
def test_other_numbers_than_bytes_ask_for_a_range(kind, tmp_path):
    with pytest.raises(UserError, match=r"has the type u?int.*: give data.range=.BLACK,WHITE."):
        module(tmp_path, dataset=Deep(kind), channels=1).prepare()
    with pytest.raises(UserError, match=r"has the type u?int.*: give data.range=.BLACK,WHITE."):
        module(tmp_path, dataset=Deep(kind, 5), channels=5).prepare()


def test_floats_of_many_values_ask_for_a_range(tmp_path):
    with pytest.raises(UserError, match=r"values from 1e.03 to 1e.03: .*give data.range="):
        module(tmp_path, dataset=Deep("float32"), channels=1).prepare()


def test_pillow_images_of_16_bits_in_8_are_warned_of(tmp_path):
    dm = module(tmp_path, dataset=Deep("uint16 pillow"), channels=1)
    dm.prepare()
    assert "The images have 16 bits and are read in 8" in dm.warnings[0]
    quiet = module(tmp_path, dataset=Deep("uint16 pillow"), channels=1, range=None)
    quiet.prepare()
    assert not quiet.warnings


def test_bands_without_their_number_are_refused(tmp_path):
    with pytest.raises(UserError, match="the image has 5 channels: give data.channels=5"):
        module(tmp_path, dataset=Deep("uint8", 5)).prepare()


@pytest.mark.slow
def test_a_run_by_config_alone(tmp_path):
    words = ["data=dataset", "data.dataset._target_=torchvision.datasets.FakeData", "+data.dataset.size=60",
             "+data.dataset.image_size=[3,12,12]", "+data.dataset.num_classes=3", "data.image_size=8",
             "data.global_batch_size=8", "model=small_cnn", "trainer=cpu", "trainer.max_epochs=1",
             "run_id=r"]  # fmt: skip
    done = run_script("train", *words, logs=tmp_path / "logs")
    assert done.code == 0 and done.record["num_train"] == 49, done.output


def test_labels_of_another_length_are_another_thing(tmp_path):
    dataset = Shades(labels=[0, 1])
    dm = module(tmp_path, dataset=dataset, test_dataset=Shades(count=6))
    dm.prepare()
    assert (dm.num_train + dm.num_val, dm.num_test) == (len(dataset), 6)
    assert dm.source.targets[""][:4].tolist() == [0, 1, 0, 1]
