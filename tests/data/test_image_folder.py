"""Folders of images: parts, damage, and streaming that equals the array."""

import struct
import tracemalloc
import zlib
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from PIL import Image

from data.image_folder import ImageFolderDataModule
from lockstep.data import image_tree
from lockstep.data.augmentation import CropFlip
from lockstep.data.framing import Framing
from lockstep.data.image_tree import CorruptImage, decode, natural_key, open_image
from lockstep.runs.errors import UserError

RNG = np.random.default_rng(0)


def write(folder, counts, size=None):
    """counts: {class: images}; odd sizes unless stated."""
    for name, n in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            shape = size or tuple(RNG.integers(20, 60, 2))
            image = Image.fromarray(RNG.integers(0, 256, (*shape, 3), dtype=np.uint8))
            image.save(folder / name / f"{i}.{'jpg' if i % 2 else 'png'}")


SQUARE = Framing(24, 24)
GREY = Framing(24, 24, channels=1)


def module(tmp_path, root, **options):
    options = {"image_size": 24, "global_batch_size": 8, "eval_batch_size": 5, "num_workers": 2, **options}
    return ImageFolderDataModule(root=root, cache_dir=tmp_path / "cache", **options)


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "images", {"cat": 30, "dog": 25})
    return tmp_path / "images"


def facts(dm):
    dm.prepare()
    return dm.num_train, dm.num_val, dm.num_test


def cached_arrays(tmp_path):
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and "-list-" not in path.name]


def files_of(dm):
    return [dm._root / name for name in dm._images.places.relative_names()]


def batches(dm, loader):
    return [dm.on_after_batch_transfer(batch, 0) for batch in loader]


def test_classes_alone_are_split_alike_under_every_seed(tmp_path, root):
    dm = module(tmp_path, root, test_fraction=0.2)
    assert facts(dm) == (40, 4, 11) and dm.class_names == ["cat", "dog"]
    assert dm.data_hash == hash_of(tmp_path, root, seed=1, test_fraction=0.2)
    assert dm.data_hash != hash_of(tmp_path, root, test_fraction=0.3)


def test_all_seeds_draw_their_test_images_out_of_one_cache(tmp_path, root):
    drawn = []
    for seed in (0, 1):
        dm = module(tmp_path, root, test_fraction=0.2, seed=seed)
        dm.prepare()
        parts = [dm._train_index, dm._val_index, dm._test_index]
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(55)), "each image in one part"
        drawn.append(dm._test_index)
    assert np.array_equal(drawn[0], drawn[1]), "no seed trains on what another tests"
    assert len(cached_arrays(tmp_path)) == 1


def test_a_class_that_only_the_test_would_have_is_named(tmp_path, root):
    write(root, {"owl": 1})
    said = set()
    for percent in range(5, 75, 5):
        try:
            module(tmp_path, root, test_fraction=percent / 100).prepare()
        except UserError as error:
            said.add(str(error))
    assert len(said) == 1 and "the class owl has no training image" in said.pop()


def hash_of(tmp_path, root, **options):
    dm = module(tmp_path, root, **options)
    dm.prepare()
    return dm.data_hash


def test_given_parts_stay_as_they_are(tmp_path):
    write(tmp_path / "set" / "train", {"a": 12, "b": 9})
    write(tmp_path / "set" / "test", {"a": 3, "b": 4})
    assert facts(module(tmp_path, tmp_path / "set", num_val=5)) == (16, 5, 7)
    write(tmp_path / "set" / "val", {"a": 2, "b": 1})
    assert facts(module(tmp_path, tmp_path / "set", num_val=0))[1] == 0  # the folder rests
    dm = module(tmp_path, tmp_path / "set", num_val=5)
    assert facts(dm) == (21, 3, 7)
    assert dm._labels[dm._val_index].tolist() == [0, 0, 1] and dm._labels[dm._test_index].tolist() == [0] * 3 + [1] * 4


def test_pixels_are_pillows_resized_images(tmp_path, root):
    dm = module(tmp_path, root, mean=0, std=1, fit="squash")
    dm.place()
    assert facts(dm)[2] == 6
    (images, labels), _ = batches(dm, dm.test_dataloader())
    files = [files_of(dm)[i] for i in dm._test_index]
    for image, label, path in zip(images, labels, files):
        expected = Image.open(path).convert("RGB").resize((24, 24), Image.Resampling.BILINEAR)
        assert np.array_equal((image.permute(1, 2, 0) * 255).round().numpy(), np.asarray(expected))
        assert dm.class_names[label] == path.parent.name


@pytest.mark.parametrize("size", [None, (16, 16)])
@pytest.mark.parametrize("options", [{"crop_padding": 2}, {"image_size": 20, "resize": 24}])
def test_streaming_gives_the_same_batches(tmp_path, size, options):
    write(tmp_path / "images", {"cat": 30, "dog": 25}, size)
    options = {"flip": True, **options}
    array = module(tmp_path, tmp_path / "images", **options)
    streamed = module(tmp_path, tmp_path / "images", memory_limit_gib=1e-9, **options)  # on the loader's path
    for dm in (array, streamed):
        dm.place(rank=1, world_size=2, accumulate_grad_batches=2)
    assert streamed.path_taken()[0] == "loader" and "memory_limit_gib" in streamed.path_taken()[1]
    assert array.path_taken() == ("array", "they fit in memory")
    assert array._meta["layout"]["size"] == (16 if size else 24)
    assert facts(array) == facts(streamed)
    for loader in ("train_dataloader", "val_dataloader", "test_dataloader"):
        expected, found = (batches(dm, getattr(dm, loader)()) for dm in (array, streamed))
        assert len(found) == len(expected) > 0
        for (images, labels), (other, truth) in zip(found, expected):
            assert torch.equal(images, other) and torch.equal(labels, truth)
    assert [path.name for path in streamed._cache.iterdir() if path.suffix == ".bin"] == []


def test_whole_pictures_stay_in_their_files_where_single_images_are_augmented(tmp_path, root):
    dm = module(tmp_path, root)
    dm.use(CropFlip(erasing_prob=0.1))
    dm.prepare()
    why = "the augmentation needs whole images, and in an array they would be resized to 24 px already"
    assert dm.path_taken() == ("loader", why)
    with pytest.raises(UserError, match=f"data.path=array cannot be: {why}. Take data.path=auto"):
        dm = module(tmp_path, root, path="array")
        dm.use(CropFlip(erasing_prob=0.1))
        dm.prepare()
    with pytest.raises(UserError, match="data.path=array cannot be: .* are more than data.memory_limit_gib=1e-09"):
        module(tmp_path, root, path="array", memory_limit_gib=1e-9).prepare()


def test_a_file_that_is_damaged_after_its_check_is_named(tmp_path, root):
    dm = module(tmp_path, root, path="loader")
    dm.place()
    path = next((root / "cat").iterdir())
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"{path} has 7 bytes, and had [0-9]+ when it was listed: mend it") as said:
        [list(loader) for loader in (dm.train_dataloader(), dm.val_dataloader(), dm.test_dataloader())]
    assert "Traceback" not in str(said.value) and not active_children(), "the error keeps no worker"


def test_streaming_never_holds_all_images(tmp_path, root, monkeypatch):
    """Far below what they would take decoded: 55 images of 512 × 512."""
    dm = module(tmp_path, root, test_fraction=0.2, image_size=512, memory_limit_gib=1e-9)
    monkeypatch.setattr(image_tree, "THREADS", 1)
    tracemalloc.start()
    dm.prepare()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 512 * 512 * 3, peak


def test_streaming_leaves_the_random_state_alone(tmp_path, root):
    dm = module(tmp_path, root, memory_limit_gib=1e-9)
    dm.place()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    batches(dm, dm.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def damage(root):
    path = root / "cat" / "7.jpg"
    path.write_bytes(path.read_bytes()[:300])
    (root / "dog" / "note.png").write_text("no image")
    return path


@pytest.mark.parametrize("limit", [16, 1e-9])
def test_an_image_that_cannot_be_decoded_is_named_or_skipped_and_counted(tmp_path, root, capsys, limit):
    damage(root)
    with pytest.raises(UserError, match=r"(7.jpg|note.png) cannot be decoded .*data.skip_corrupt=true"):
        module(tmp_path, root, memory_limit_gib=limit, verify=True).prepare()
    assert not cached_arrays(tmp_path)
    dm = module(tmp_path, root, skip_corrupt=True, memory_limit_gib=limit, test_fraction=0.2)
    assert sum(facts(dm)) == 54 and len(dm.skipped) == 2
    assert {name in "".join(dm.skipped) for name in ("7.jpg", "note.png")} == {True}
    assert "Skipped 2 of 56 images" in capsys.readouterr().err
    dm.place()
    labels = torch.cat([y for _, y in batches(dm, dm.test_dataloader())])
    assert (labels >= 0).sum() == dm.num_test


def test_skipping_keeps_images_and_labels_together(tmp_path, root):
    damage(root)
    dm = module(tmp_path, root, skip_corrupt=True, mean=0, std=1)
    dm.place()
    files = [f for f in files_of(dm) if (f.parent.name, f.name) not in (("cat", "7.jpg"), ("dog", "note.png"))]
    selections = list(dm.train_dataloader()._selections(0)) + list(dm.val_dataloader()._selections())
    found = batches(dm, dm.train_dataloader()) + batches(dm, dm.val_dataloader())
    for selection, (images, labels) in zip(selections, found, strict=True):
        for i, image, label in zip(selection.positions, images, labels, strict=True):
            assert np.array_equal((image.permute(1, 2, 0) * 255).round().numpy(), decode(files[i], SQUARE))
            assert label == -1 or dm.class_names[label] == files[i].parent.name


def test_a_class_of_which_nothing_is_left(tmp_path, root):
    for path in (root / "dog").iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="class dog has no training image"):
        module(tmp_path, root, skip_corrupt=True).prepare()


def test_folders_that_are_missing_or_empty(tmp_path, root):
    with pytest.raises(UserError, match=r"needs data.root=FOLDER"):
        module(tmp_path, None)
    with pytest.raises(UserError, match="nowhere does not exist"):
        module(tmp_path, tmp_path / "nowhere").prepare()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no class folders"):
        module(tmp_path, tmp_path / "empty").prepare()
    (root / "bird").mkdir()
    with pytest.raises(UserError, match="bird holds no images"):
        module(tmp_path, root).prepare()


def test_parts_with_different_classes(tmp_path):
    write(tmp_path / "set" / "train", {"a": 3, "b": 3})
    with pytest.raises(UserError, match="has train/ and no test/"):
        module(tmp_path, tmp_path / "set").prepare()
    write(tmp_path / "set" / "test", {"a": 3, "c": 3})
    with pytest.raises(UserError, match="not every part has the classes b, c"):
        module(tmp_path, tmp_path / "set").prepare()


def test_too_few_images_to_test_on(tmp_path, root):
    with pytest.raises(UserError, match="test_fraction=0.001 of 55 images"):
        module(tmp_path, root, test_fraction=0.001).prepare()


def test_grey_images(tmp_path, root):
    dm = module(tmp_path, root, channels=1)
    dm.place()
    images, _ = batches(dm, dm.val_dataloader())[0]
    assert images.shape[1:] == (1, 24, 24) and dm.mean == [0.449]
    with pytest.raises(UserError, match="channels=2 must be 3"):
        module(tmp_path, root, channels=2)


def test_a_changed_file_makes_a_new_array(tmp_path, root):
    first = module(tmp_path, root)
    first.prepare()
    Image.new("RGB", (40, 40)).save(root / "cat" / "0.png")
    second = module(tmp_path, root)
    second.prepare()
    assert first.data_hash != second.data_hash


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("side", [9000, 12_000, 60_000])
def test_an_image_that_claims_to_be_huge_is_refused(tmp_path, side):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path = tmp_path / "bomb.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b""))
    with pytest.raises(CorruptImage, match="claims"):
        decode(path, SQUARE)


def test_more_than_max_pixels_is_refused_by_its_size(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png", SQUARE, max_pixels=600).shape == (24, 24, 3)
    with pytest.raises(CorruptImage, match="x.png claims 30×20 pixels, more than data.max_pixels=599"):
        decode(tmp_path / "x.png", SQUARE, max_pixels=599)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_camera_says(tmp_path, orientation):
    """Exif 2.3: what lies in the file's first row and column, for each of the eight."""
    upright = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    turned = {2: np.fliplr(upright), 3: np.rot90(upright, 2), 4: np.flipud(upright), 5: upright.T,
              6: np.rot90(upright), 7: np.rot90(upright, 2).T, 8: np.rot90(upright, 3)}  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(turned.get(orientation, upright)).save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.asarray(open_image(tmp_path / "x.png", 1)), upright)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_colour(tmp_path, mode):
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.new(mode, (30, 20)).save(path, **({"transparency": b"\x00\x7f"} if mode == "P" else {}))
    assert decode(path, SQUARE).shape == (24, 24, 3) and decode(path, GREY).shape == (24, 24, 1)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_keep_their_shades(tmp_path, suffix):
    shades = np.linspace(0, 65535, 24 * 24).round().astype(np.uint16).reshape(24, 24)
    Image.fromarray(shades).save(tmp_path / f"x.{suffix}")
    for framing in (GREY, SQUARE):
        found = decode(tmp_path / f"x.{suffix}", framing)
        assert np.array_equal(found, np.repeat(np.round(shades / 257)[..., None], framing.channels, 2))


def test_thirty_two_bits_are_refused(tmp_path):
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(CorruptImage, match="32 bits a pixel"):
        decode(tmp_path / "x.tif", SQUARE)


def test_a_train_folder_without_a_test_folder_is_said(tmp_path):
    write(tmp_path / "images" / "train", {"cat": 3, "dog": 3})
    with pytest.raises(UserError, match="has train/ and no test/"):
        module(tmp_path, tmp_path / "images").prepare()


def test_names_sort_as_people_count():
    assert sorted(["img10", "img9", "a", "00002"], key=natural_key) == ["00002", "a", "img9", "img10"]


def test_a_folder_too_high_is_suspected(tmp_path, caplog):
    write(tmp_path / "home/photos", {"bird": 3, "frog": 3})
    write(tmp_path / "home/deep", {"only": 3})
    module(tmp_path, tmp_path / "home", test_fraction=0.3, global_batch_size=2).prepare()
    [warning] = {record.message for record in caplog.records if record.levelname == "WARNING"}
    assert warning == (
        f"{tmp_path}/home/photos counts as one class, and holds folders alone: bird, frog. Is data.root right?"
    )
