"""DICOM files: their values, windows, colours and frames."""

import numpy as np
import pytest
from PIL import Image

from data.image_folder import ImageFolderDataModule
from lockstep.data import dicom
from lockstep.data.decoding import CorruptImage, open_image, to_array
from lockstep.data.file_values import read_header
from lockstep.data.reading import Reading
from lockstep.process.errors import UserError
from lockstep.training.build_data import data_facts

SIDE = 6
GREY = np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE) * 100


def write(path, values, photometric="MONOCHROME2", bits=None, **attributes):
    """Write (height, width), (height, width, 3) or, with NumberOfFrames, (frames, …)."""
    pydicom = pytest.importorskip("pydicom")
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    dataset.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    dataset.SOPInstanceUID = pydicom.uid.generate_uid()
    shape = values.shape[1:] if "NumberOfFrames" in attributes else values.shape
    dataset.Rows, dataset.Columns = shape[:2]
    dataset.SamplesPerPixel = 3 if len(shape) == 3 else 1
    if len(shape) == 3:
        dataset.PlanarConfiguration = 0
    dataset.PhotometricInterpretation = photometric
    dataset.BitsAllocated = 8 * values.itemsize
    dataset.BitsStored = bits or dataset.BitsAllocated
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(values.dtype.kind == "i")
    for name, value in attributes.items():
        setattr(dataset, name, value)
    dataset.PixelData = values.tobytes()
    dataset.save_as(path, enforce_file_format=True)
    return path


def values_in(path, **options):
    return Reading(1, **options).read_values(path)[..., 0]


def test_values_are_rescaled_to_those_of_the_modality(tmp_path):
    path = write(tmp_path / "x.dcm", GREY, RescaleSlope=2, RescaleIntercept=-1024)
    assert np.array_equal(values_in(path), GREY * 2.0 - 1024)
    assert read_header(path).has_over_8_bits and read_header(path).depth == "16 bits"


def test_values_without_a_rescale_keep_their_type(tmp_path):
    path = write(tmp_path / "x.dcm", GREY.astype(np.int16) // 2 - 500, bits=12)
    assert values_in(path).dtype == np.int16 and values_in(path).min() == -500
    assert read_header(path).depth == "12 bits"


def test_monochrome1_is_mirrored_within_its_bits(tmp_path):
    path = write(tmp_path / "x.dcm", GREY, "MONOCHROME1", bits=12)
    assert np.array_equal(values_in(path), 4095 - GREY)


def test_the_window_of_monochrome1_is_mirrored_too(tmp_path):
    options = {
        "bits": 12,
        "WindowCenter": 1000,
        "WindowWidth": 400,
        "VOILUTFunction": "LINEAR_EXACT",
    }
    dark = write(tmp_path / "dark.dcm", GREY, "MONOCHROME1", **options)
    bright = write(tmp_path / "bright.dcm", GREY, **options)
    by_window = Reading(1, "window")
    assert np.allclose(by_window.open(dark), 1 - by_window.open(bright), atol=1e-6)


@pytest.mark.parametrize(
    ("function", "black", "white"), [("LINEAR", 800, 1199), ("LINEAR_EXACT", 800, 1200)]
)
def test_the_first_window_is_black_and_white(function, black, white, tmp_path):
    path = write(
        tmp_path / "x.dcm",
        GREY,
        WindowCenter=[1000, 5],
        WindowWidth=[400, 9],
        VOILUTFunction=function,
    )
    image = Reading(1, "window").open(path)[0]
    assert np.allclose(image, ((GREY - float(black)) / (white - black)).clip(0, 1), atol=1e-6)
    assert read_header(path).has_window


def test_a_window_around_zero_counts(tmp_path):
    path = write(tmp_path / "x.dcm", GREY, WindowCenter=0, WindowWidth=200)
    assert dicom.read_dicom(path, 0)[1] == (-100, 99)


def test_8_bit_colours_are_a_picture(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    path = write(tmp_path / "x.dcm", colours, "RGB")
    assert np.array_equal(np.asarray(open_image(path, 3)), colours)
    assert not read_header(path).has_over_8_bits


def test_ybr_becomes_rgb(tmp_path):
    grey = np.full((SIDE, SIDE, 3), 128, np.uint8)
    grey[..., 0] = 77
    path = write(tmp_path / "x.dcm", grey, "YBR_FULL")
    assert np.asarray(open_image(path, 3))[0, 0].tolist() == [77, 77, 77]


def test_frames_are_pages(tmp_path):
    frames = np.stack([GREY, GREY + 1, GREY + 2])
    path = write(tmp_path / "x.dcm", frames, NumberOfFrames=3)
    assert read_header(path).pages == 3
    assert np.array_equal(values_in(path, page=1), GREY + 1)
    everything = Reading(3, page="all").read_values(path)
    assert np.array_equal(everything, np.moveaxis(frames, 0, 2))
    with pytest.raises(CorruptImage, match="data.page=3 counts from 0, and its frames are 3"):
        values_in(path, page=3)


def test_a_frame_has_the_rescale_of_its_group(tmp_path):
    pydicom = pytest.importorskip("pydicom")
    groups = []
    for slope in (1, 10):
        transformation = pydicom.Dataset()
        transformation.RescaleSlope = slope
        transformation.RescaleIntercept = -5
        group = pydicom.Dataset()
        group.PixelValueTransformationSequence = [transformation]
        groups.append(group)
    path = write(
        tmp_path / "x.dcm",
        np.stack([GREY, GREY]),
        NumberOfFrames=2,
        PerFrameFunctionalGroupsSequence=groups,
    )
    assert np.array_equal(values_in(path, page=1), GREY * 10.0 - 5)


def test_a_viewers_8_bits_are_those_of_the_window(tmp_path):
    path = write(tmp_path / "x.dcm", GREY, WindowCenter=1000, WindowWidth=400)
    shown = np.asarray(open_image(path, 1))
    assert shown.dtype == np.uint8 and shown[0, 0] == 0 and shown[-1, -1] == 255


def test_a_file_without_an_ending_is_known_by_its_magic(tmp_path):
    path = write(tmp_path / "IM0001", GREY)
    assert np.array_equal(values_in(path), GREY)
    assert np.array_equal(Reading(1).read_values(path.read_bytes())[..., 0], GREY)


def test_a_missing_pydicom_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "x.dcm", GREY)
    monkeypatch.setattr(dicom, "has_pydicom", lambda: False)
    with pytest.raises(CorruptImage, match="x.dcm cannot be decoded .*pip install pydicom"):
        Reading(1).open(path)


def test_larger_images_than_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    path = write(tmp_path / "x.dcm", np.zeros((100, 100), np.uint16))
    with pytest.raises(CorruptImage, match="data.max_megapixels=NUMBER"):
        Reading(1, (0, 1), max_megapixels=0.005).open(path)


def folder(root, **attributes):
    for label, height in (("a", 0), ("b", 2000)):
        (root / label).mkdir(parents=True)
        for i in range(10):
            write(root / label / f"{i}.dcm", GREY // 4 + height, **attributes)
    return root


def module(root, cache, **options):
    options = {
        "channels": 1,
        "global_batch_size": 4,
        "num_workers": 0,
        "mean": 0,
        "std": 1,
    } | options
    data = ImageFolderDataModule(root=root, cache_dir=cache, image_size=SIDE, **options)
    data.attach_to_ranks()
    return data


@pytest.mark.parametrize("path", ["array", "loader"])
def test_the_windows_are_the_range_of_a_training(path, tmp_path):
    root = folder(tmp_path / "x", WindowCenter=1500, WindowWidth=3000)
    data = module(root, tmp_path, path=path)
    assert data_facts(data)["range"] == "window"
    assert data.depth_note == "16 bits, black and white by the window of each file"
    data.test_on_all()
    batch = next(iter(data.test_dataloader()))
    images = data.on_after_batch_transfer(batch, 0)[0]
    expected = ((GREY // 4).astype(float) / 2999).clip(0, 1)
    assert np.allclose(images[0, 0], expected, atol=1e-6)


def test_without_windows_the_training_images_are_the_range(tmp_path):
    data = module(folder(tmp_path / "x"), tmp_path)
    assert data_facts(data)["range"] == [0, 2875]


def test_a_range_of_ones_own_comes_before_the_windows(tmp_path):
    root = folder(tmp_path / "x", WindowCenter=1500, WindowWidth=3000)
    assert data_facts(module(root, tmp_path, range=[0, 4095]))["range"] == [0, 4095]


def test_a_folder_of_dicom_without_pydicom_is_refused(tmp_path, monkeypatch):
    root = folder(tmp_path / "x")
    monkeypatch.setattr(dicom, "has_pydicom", lambda: False)
    with pytest.raises(UserError, match="pip install pydicom"):
        module(root, tmp_path)


def test_deep_pixels_keep_their_values(tmp_path):
    path = write(tmp_path / "x.dcm", GREY)
    image = Reading(1, (0.0, 3500.0)).open(path)
    assert np.allclose(to_array(image)[..., 0], GREY / 3500 * 255, atol=1e-3)
