"""Pictures of a batch: colours, masks and the words for each kind of target."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from lockstep.data import pictures
from lockstep.data.pictures import (
    ChannelStatistics,
    describe_target,
    paint_mask,
    shrink_images,
    shrink_mask,
    to_pixels,
    write_batch,
    write_mistakes,
)

NAMES = ["cat", "dog", "fox"]
COLOUR = SimpleNamespace(mean=[0.5] * 3, std=[0.25] * 3, class_names=NAMES, target_kind="class")


def test_a_normalised_image_gets_its_pixels_back():
    pixels = torch.randint(0, 256, (2, 5, 5, 3), dtype=torch.uint8)
    normalisation = ChannelStatistics([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalisation)
    images = (pixels.movedim(-1, 1) / 255 - mean) / std
    assert torch.equal(to_pixels(images, normalisation), pixels)
    # Half precision costs a step.
    rough = to_pixels(images.bfloat16(), normalisation)
    assert (rough.int() - pixels.int()).abs().max() <= 4


def test_images_of_unknown_normalisation_use_all_levels():
    pixels = to_pixels(torch.tensor([[[[-3.0, 1.0]]]]), None)
    assert pixels.tolist() == [[[[0] * 3, [255] * 3]]]


def test_large_images_and_masks_become_small():
    assert shrink_images(torch.zeros(2, 3, 4, 300, 300)).shape == (2, 3, 4, 128, 128)
    assert shrink_images(torch.zeros(0, 3, 300, 300)).shape == (0, 3, 128, 128)
    mask = shrink_mask(torch.arange(256).expand(1, 256, 256))
    assert mask.shape == (1, 128, 128) and mask[0, 0, 0] == 0 and mask[0, 0, -1] == 255


def test_a_mask_colours_classes_and_darkens_the_rest():
    pixels = torch.full((1, 3, 3), 100, dtype=torch.uint8)
    mixed = paint_mask(pixels, torch.tensor([[0, 1, -1]]))
    blue = [int(100 * 0.4 + value * 0.6) for value in pictures.CLASS_COLOURS[0]]
    assert mixed.tolist() == [[[100] * 3, blue, [20] * 3]]


@pytest.mark.parametrize(
    ("target", "is_mixed", "words"),
    [
        (torch.tensor(1), False, "dog"),
        (torch.tensor(7), False, "7"),
        (torch.tensor(12.3456), False, "12.35"),
        (torch.tensor([1.0, 0.0, 0.9]), False, "cat, fox"),
        (torch.tensor([0.0, float("nan"), 0.0]), False, "none"),
        (torch.tensor([0.3, 0.7, 0.0]), True, "dog: 70%, cat: 30%"),
        (torch.tensor([[1, 1], [0, -1]]), False, "dog: 67%"),
    ],
)
def test_a_target_in_words(target, is_mixed, words):
    assert describe_target(target, NAMES, is_mixed=is_mixed) == words


@pytest.fixture
def tiles(monkeypatch):
    """The tiles of each sheet that is written."""
    sheets = []
    monkeypatch.setattr(
        pictures, "write_contact_sheet", lambda path, tiles, *_, **__: sheets.append(tiles)
    )
    return sheets


def test_views_masks_and_numbers_of_a_batch_stand_together(tiles, tmp_path):
    images = torch.zeros(20, 2, 3, 8, 8)
    targets = {"age": torch.arange(20.0), "mask": torch.ones(20, 8, 8, dtype=torch.int64)}
    assert write_batch(tmp_path / "b.png", (images, targets), COLOUR)
    [sheet] = tiles
    shown, lines, _ = sheet[3]
    assert len(sheet) == 16 and len(shown) == 3
    assert lines == ["age: 3", "mask: dog: 100%"]


def test_numbers_beside_the_images_are_passed_over(tiles, tmp_path):
    batch = ((torch.zeros(2, 3, 8, 8), {"age": torch.zeros(2)}), torch.tensor([0, 1]))
    assert write_batch(tmp_path / "b.png", batch, COLOUR)
    assert [lines for _, lines, _ in tiles[0]] == [["cat"], ["dog"]]


def mistakes(tiles, targets, predictions, data=COLOUR, shape=(3, 4, 4)):
    """Return the caption and the colour of one tested image."""
    parts = [torch.tensor([2.5]), torch.tensor([-1]), torch.zeros(1, *shape)]
    tested = pictures.TestedImages(*parts, targets[None], predictions[None])
    write_mistakes("m.png", tested, data)
    [(_, lines, colour)] = tiles[-1]
    return lines, colour


def test_a_wrong_class_is_red_and_a_right_one_black(tiles):
    shares = torch.tensor([0.1, 0.7, 0.2])
    wrong = mistakes(tiles, torch.tensor(0), shares)
    assert wrong == (["dog (70%)", "true: cat (10%)", "loss 2.5"], pictures.RED)
    right = mistakes(tiles, torch.tensor(1), shares)
    assert right == (["dog (70%)", "true: dog (70%)", "loss 2.5"], "black")


def test_labels_numbers_and_masks_have_their_words(tiles):
    labels = mistakes(tiles, torch.tensor([1.0, 0, 0]), torch.tensor([0.9, 0.8, 0.1]))
    assert labels == (["cat, dog", "true: cat", "loss 2.5"], pictures.RED)
    assert mistakes(tiles, torch.tensor(1.5), torch.tensor(2.0))[0][:2] == [
        "predicted: 2",
        "true: 1.5",
    ]
    mask = torch.tensor([[0, 0, 1, -1]] * 4)
    assert mistakes(tiles, mask, torch.zeros_like(mask))[0][0] == "66.7% of the pixels right"
    assert len(tiles[-1][0][0]) == 3


def test_labels_that_begin_alike_are_compared_whole(tiles):
    data = SimpleNamespace(class_names=["vehicle_damage_left", "vehicle_damage_right"])
    lines, colour = mistakes(tiles, torch.tensor([1.0, 0]), torch.tensor([0.1, 0.9]), data)
    assert lines[1] == f"true: {lines[0]}" and colour == pictures.RED


def test_all_views_of_a_mistake_stand_beside_its_masks(tiles):
    mask = torch.zeros(4, 4, dtype=torch.int64)
    mistakes(tiles, mask, mask, shape=(2, 3, 4, 4))
    assert [picture.size for picture in tiles[-1][0].pictures] == [(4, 4)] * 4


def test_a_label_that_nobody_knows_is_no_mistake(tiles):
    labels = mistakes(tiles, torch.tensor([1.0, float("nan"), 0]), torch.tensor([0.9, 0.8, 0.1]))
    assert labels == (["cat", "true: cat", "loss 2.5"], "black")


def test_the_file_of_a_tested_image_is_named(tmp_path, tiles):
    data = SimpleNamespace(source=SimpleNamespace(name=lambda i: f"test/cat/{i}.png"))
    parts = [torch.tensor([1.0]), torch.tensor([5]), torch.zeros(1, 1, 4, 4)]
    tested = pictures.TestedImages(*parts, torch.ones(1), torch.ones(1))
    write_mistakes(tmp_path / "m.png", tested, data)
    assert tiles[0][0][1][-1] == "5.png"


def test_noise_that_no_file_holds_well_is_small_too(tmp_path):
    images = torch.randn(16, 3, 128, 128)
    write_batch(tmp_path / "b.png", (images, torch.zeros(16).long()), COLOUR)
    assert (tmp_path / "b.png").stat().st_size < 150_000
    with Image.open(tmp_path / "b.png") as picture:
        assert picture.size == (8 * 136 + 8, 2 * 168 + 8)
