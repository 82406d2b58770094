"""How single files become pixels."""

import numpy as np
import pytest
from PIL import Image

from lockstep.data.decoding import CorruptImage, get_size, load_array, to_array, to_pillow
from lockstep.data.reading import Reading

GREY = np.arange(12, dtype=np.uint16).reshape(3, 4) * 100


@pytest.mark.parametrize(
    "reading",
    [
        Reading(),
        Reading(1, (0.0, 4095.0)),
        Reading(3, "image", 2, (3, 2, 1)),
        Reading(5, page="all"),
        Reading(1, "window"),
    ],
)
def test_a_checkpoints_facts_give_the_reading_back(reading):
    assert Reading.from_facts({"channels": reading.channels, **reading.facts}) == reading


def test_facts_of_earlier_versions_read_8_bits():
    assert Reading.from_facts({"channels": 1}) == Reading(1)


def test_grey_becomes_colour_and_colour_grey(tmp_path):
    np.save(tmp_path / "grey.npy", GREY)
    grey = Reading(3, (0, 1100)).open(tmp_path / "grey.npy")
    assert np.allclose(to_array(grey), 255 * np.dstack([GREY / 1100] * 3))
    np.save(tmp_path / "colour.npy", np.dstack([GREY, 0 * GREY, 0 * GREY]))
    one = Reading(1, (0, 1100)).open(tmp_path / "colour.npy")
    assert one.shape == (1, 3, 4) and float(one.max()) == pytest.approx(0.299, abs=1e-3)


def test_channels_of_an_array_may_come_first(tmp_path):
    values = np.zeros((2, 5, 6), np.float32)
    np.save(tmp_path / "x.npy", values)
    assert load_array(tmp_path / "x.npy").shape == (5, 6, 2)


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((2, 2), complex), np.array([[{}]])])
def test_arrays_that_are_no_images(tmp_path, values):
    np.save(tmp_path / "x.npy", values, allow_pickle=True)
    with pytest.raises(CorruptImage, match="x.npy cannot be decoded"):
        Reading(1, (0, 1)).open(tmp_path / "x.npy")


def test_nan_and_infinity_are_black_and_white(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[np.nan, np.inf], [-np.inf, 5]]))
    image = Reading(1, (0, 10)).open(tmp_path / "x.npy")
    assert image.flatten().tolist() == [0, 1, 0, 0.5]


def test_deep_images_have_a_size_and_a_picture(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "x.png")
    image = Reading(1, (0, 1100)).open(tmp_path / "x.png")
    assert get_size(image) == (4, 3)
    assert np.asarray(to_pillow(image)).tolist()[2][3] == 255
