"""What loader workers make images of, and that it reaches a worker however that is started."""

import pickle

import numpy as np
import pytest
from PIL import Image

from augmentations.rand_augment import RandAugment
from lockstep.data.framing import Framing
from lockstep.data.image_array import Layout
from lockstep.data.image_source import InArray, InPlaces, as_stored, augmented
from lockstep.data.places import Places, stats_of

FRAMING = Framing(8, 8, fit="squash")


@pytest.fixture
def source(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    (tmp_path / "kept").mkdir()
    Places.of_files(tmp_path, ["x.png"], stats_of(tmp_path, ["x.png"])).save(tmp_path / "kept")
    return InPlaces(tmp_path / "kept", tmp_path, tmp_path / "list", 3, 1000)


@pytest.mark.parametrize("grey", [False, True])
def test_an_image_of_the_array_is_what_was_stored(grey, tmp_path):
    layout = Layout(4, 1 if grey else 3, 3)
    pixels = np.arange(3 * 16 * layout.channels, dtype=np.uint8).reshape(3, 4, 4, layout.channels)
    pixels.tofile(tmp_path / "images.npy")
    found = [np.asarray(InArray(tmp_path / "images.npy", layout)(i)).reshape(4, 4, -1) for i in range(3)]
    assert np.array_equal(found, pixels)


def test_what_a_worker_gets_survives_being_sent_to_a_process_that_was_not_forked(source):
    """Python 3.14 forks no workers by itself; where CUDA runs, a fork server starts them."""
    for make in (as_stored(source, FRAMING, 8), augmented(source, RandAugment().pipeline(FRAMING))):
        again = pickle.loads(pickle.dumps(make))
        assert make(0, 7).shape == (8, 8, 3) and np.array_equal(again(0, 7), make(0, 7))


def test_a_draw_makes_the_same_image_and_another_draw_another(source):
    make = augmented(source, RandAugment().pipeline(FRAMING))
    assert np.array_equal(make(0, 7), make(0, 7)) and not np.array_equal(make(0, 7), make(0, 8))
