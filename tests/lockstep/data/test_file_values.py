"""Deep colours of PNG and PPM, and formats whose deep colours are only named."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, features

from data.image_folder import ImageFolderDataModule
from lockstep.data import file_values
from lockstep.data.decoding import CorruptImage, to_array
from lockstep.data.file_values import Header, read_header
from lockstep.data.reading import Reading
from lockstep.training.build_data import data_facts

SIDE = 7
VALUES = np.random.default_rng(0).integers(0, 65536, (5, SIDE, 4)).astype(np.uint16)
PNG_KINDS = {2: 4, 3: 2, 4: 6}


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _filtered(row, pixel_bytes):
    """Return a row as differences to the pixel before, as most PNG files have it."""
    before = bytes(pixel_bytes) + row[:-pixel_bytes]
    return b"\1" + bytes((byte - last) % 256 for byte, last in zip(row, before, strict=True))


def png(values, *chunks):
    """Return a PNG of (height, width, bands) uint16, which Pillow cannot write."""
    height, width, bands = values.shape
    head = struct.pack(">IIBBBBB", width, height, 16, PNG_KINDS[bands], 0, 0, 0)
    rows = b"".join(_filtered(row.astype(">u2").tobytes(), 2 * bands) for row in values)
    parts = [
        chunk(b"IHDR", head),
        *chunks,
        chunk(b"IDAT", zlib.compress(rows)),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def ppm(values, white=65535):
    height, width, _ = values.shape
    return f"P6\n# a comment\n{width} {height}\n{white}\n".encode() + values.astype(">u2").tobytes()


@pytest.fixture(autouse=True)
def limit_of_pillow(monkeypatch):
    """Pillow has one limit for the process, which data.max_megapixels sets."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)


def test_colours_of_8_bits_are_not_cut_wherever_they_lie(tmp_path):
    # Pillow's decoder of a compressed TIFF also gets the place of its table, such as 16102.
    random = np.random.default_rng(0)
    for size in range(60, 100):
        pixels = random.integers(0, 256, (size, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "x.tif", compression="tiff_lzw")
        assert not read_header(tmp_path / "x.tif").loses_bits


@pytest.mark.parametrize("write", [png, ppm])
def test_colours_of_16_bits_are_read_in_full(write, tmp_path):
    (tmp_path / "x.img").write_bytes(write(VALUES[..., :3]))
    for file in (tmp_path / "x.img", write(VALUES[..., :3])):
        assert np.array_equal(Reading(3).read_values(file), VALUES[..., :3])
        header = read_header(file)
        assert header.has_over_8_bits and not header.loses_bits and header.depth == "16 bits"


def test_a_ppm_of_12_bits_has_the_white_of_16():
    values = np.full((2, 2, 3), 4095, np.uint16)
    assert (Reading(3).read_values(ppm(values, 4095)) == 65535).all()


def test_alpha_of_16_bits_is_put_on_white():
    values = VALUES.copy()
    values[0, 0] = (1000, 2000, 3000, 0)
    values[0, 1] = (1000, 2000, 3000, 65535)
    pixels = Reading(3).read_values(png(values))
    assert pixels[0, :2].tolist() == [[65535] * 3, [1000, 2000, 3000]]
    grey = Reading(1).read_values(png(values[..., 2:]))
    assert grey[0, :2, 0].tolist() == [65535, 3000]


def test_alpha_of_16_bits_is_a_fourth_band():
    assert np.array_equal(Reading(4).read_values(png(VALUES)), VALUES)


def test_exif_data_rotate_a_png_of_16_bits():
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = png(VALUES[..., :3], chunk(b"eXIf", exif.tobytes()[6:]))
    assert np.array_equal(Reading(3).read_values(rotated), np.rot90(VALUES[..., :3], -1))


def test_a_damaged_png_of_16_bits_is_named():
    with pytest.raises(CorruptImage, match="it cannot be decoded"):
        Reading(3, (0, 1)).open(png(VALUES[..., :3])[:80], "it")


def test_a_large_png_of_16_bits_is_refused():
    with pytest.raises(CorruptImage, match="data.max_megapixels=NUMBER"):
        Reading(3, (0, 1), max_megapixels=1e-5).open(png(VALUES[..., :3]), "it")


@pytest.mark.parametrize("path", ["array", "loader"])
def test_a_training_has_the_full_depth_of_colours(path, tmp_path):
    values = np.random.default_rng(0).integers(1000, 1200, (2, 10, SIDE, SIDE, 3)).astype(np.uint16)
    for label, images in zip("ab", values, strict=True):
        (tmp_path / "x" / label).mkdir(parents=True)
        for i, image in enumerate(images):
            (tmp_path / "x" / label / f"{i}.png").write_bytes(png(image))
    options = {"image_size": SIDE, "global_batch_size": 4, "num_workers": 0, "mean": 0, "std": 1}
    data = ImageFolderDataModule(root=tmp_path / "x", cache_dir=tmp_path, path=path, **options)
    data.attach_to_ranks()
    assert data_facts(data)["range"] == [1000, 1199] and not data.warnings
    data.test_on_all()
    batches = [data.on_after_batch_transfer(batch, 0)[0] for batch in data.test_dataloader()]
    images = np.concatenate([batch.numpy() for batch in batches])
    expected = (values.reshape(20, SIDE, SIDE, 3) - 1000.0) / 199
    assert np.allclose(images, np.moveaxis(expected, 3, 1), atol=1e-6)


def test_colours_of_8_bits_do_not_become_deep(tmp_path, monkeypatch):
    pixels = (VALUES[..., :3] >> 8).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    monkeypatch.setattr(file_values, "read_deep_colours", None)
    assert not read_header(tmp_path / "x.png").has_over_8_bits
    assert np.allclose(to_array(Reading(3, (0, 9)).open(tmp_path / "x.png")), pixels, atol=1e-4)


def test_colours_that_pillow_cuts_to_8_bits_are_known():
    plain = b"P3 1 1 4095 4095 0 0"
    assert read_header(plain).loses_bits and not read_header(plain).has_over_8_bits


# 4 by 4 pixels of 10 bits, as avifenc writes them; Pillow writes 8 bits alone.
AVIF_OF_10_BITS = base64.b64decode(
    "AAAAIGZ0eXBhdmlmAAAAAGF2aWZtaWYxbWlhZk1BMUEAAADybWV0YQAAAAAAAAAoaGRscgAAAAAAAAAAcGljdAAA"
    "AAAAAAAAAAAAAGxpYmF2aWYAAAAADnBpdG0AAAAAAAEAAAAeaWxvYwAAAABEAAABAAEAAAABAAABGgAAAB0AAAAo"
    "aWluZgAAAAAAAQAAABppbmZlAgAAAAABAABhdjAxQ29sb3IAAAAAamlwcnAAAABLaXBjbwAAABRpc3BlAAAAAAAA"
    "AAQAAAAEAAAAEHBpeGkAAAAAAwoKCgAAAAxhdjFDgSBAAAAAABNjb2xybmNseAABAA0ABoAAAAAXaXBtYQAAAAAA"
    "AAABAAEEAQKDBAAAACVtZGF0EgAKCDgEfYwENBpAMg8WQAkkkkQAAHAfawkfPQQ="
)


def jpeg_2000(bits):
    """Return an image of colours whose head tells this number of bits."""
    file = io.BytesIO()
    Image.fromarray((VALUES[..., :3] >> 8).astype(np.uint8)).save(file, "JPEG2000")
    data = bytearray(file.getvalue())
    data[data.find(b"\xff\x4f\xff\x51") + 42] = bits - 1
    return bytes(data)


@pytest.mark.skipif(not features.check("jpg_2000"), reason="this Pillow has no JPEG 2000")
def test_deep_colours_of_jpeg_2000_are_cut():
    assert read_header(jpeg_2000(8)) == Header(np.dtype(np.uint8))
    header = read_header(jpeg_2000(12))
    assert header.loses_bits and not header.has_over_8_bits and header.depth == "12 bits"


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_deep_colours_of_avif_are_cut():
    file = io.BytesIO()
    Image.fromarray((VALUES[..., :3] >> 8).astype(np.uint8)).save(file, "AVIF")
    assert read_header(file.getvalue()) == Header(np.dtype(np.uint8))
    header = read_header(AVIF_OF_10_BITS)
    assert header.loses_bits and not header.has_over_8_bits and header.depth == "10 bits"
