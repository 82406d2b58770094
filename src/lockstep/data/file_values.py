"""Read the facts in the heads of image files, and their values in full depth.

Pillow reads most formats, but it keeps only 8 of the 16 bits of colours. So a PNG with such colours
is decoded in two halves, a PPM by NumPy, and a TIFF by tifffile, if it is installed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from lockstep.data.decoding import (
    FORMATS,
    is_array,
    is_dicom,
    is_tiff,
    load_array,
    open_bytes,
    open_header,
    read_start,
)
from lockstep.data.dicom import read_dicom_header

ALL = "all"
PAGED_FORMATS = ("TIFF", "GIF")
NEEDS_TIFFFILE = "a TIFF of bits or bands that Pillow does not read: pip install tifffile"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# The positions of two bytes in a PNG: the bits of a colour, and the kind of its bands.
PNG_BITS_BYTE = 24
PNG_KIND_BYTE = 25
# Kinds of several bands: colour, grey with alpha, colour with alpha.
PNG_KINDS_WITH_BANDS = (2, 4, 6)
GREY_WITH_ALPHA = "LA;16B"  # Pillow's name
# Two formats whose colours Pillow reads in 8 bits. Each has a mark, and a distance from its start
# to the byte with the bits of the first colour. Both lie in the first HEAD_BYTES.
BITS_OF_COLOURS = {"JPEG2000": (b"\xff\x4f\xff\x51", 42), "AVIF": (b"pixi", 9)}
HEAD_BYTES = 2**16
PPM_MAGIC = b"P6"
WHITE_16 = 65535


@dataclass(frozen=True)
class Header:
    """The facts in the head of an image file.

    Args:
        dtype: the type of its values.
        pages: pages of a TIFF, pictures of a GIF, or frames of a DICOM file; 1 of other formats.
        loses_bits: whether Pillow reads only 8 of its bits.
        bits: the number of bits of a value in use; None: all bits of its type.
        has_window: whether it says which values are shown black and white.
    """

    dtype: np.dtype
    pages: int = 1
    loses_bits: bool = False
    bits: int | None = None
    has_window: bool = False

    @property
    def has_over_8_bits(self) -> bool:
        return self.dtype != np.uint8 and not self.loses_bits

    @property
    def depth(self) -> str:
        """Return "16 bits" or "32-bit floats"."""
        if self.bits is not None:
            return f"{self.bits} bits"
        bits = 8 * self.dtype.itemsize
        return f"{bits}-bit floats" if self.dtype.kind == "f" else f"{bits} bits"


def read_header(file: Path | bytes) -> Header:
    """Return the facts in the head of an image file. It may raise nearly any exception."""
    if is_array(file):
        return Header(load_array(file).dtype)
    if is_dicom(file):
        header = read_dicom_header(file)
        return Header(header.dtype, header.frames, bits=header.bits, has_window=header.has_window)
    if needs_tifffile(file) and has_tifffile():
        return _read_tifffile_header(file)
    if has_deep_colours(file):
        return Header(np.dtype(np.uint16))
    with open_header(file) as image:
        pages = getattr(image, "n_frames", 1) if image.format in PAGED_FORMATS else 1
        if _loses_bits(image):
            return Header(np.dtype(np.uint16), pages, loses_bits=True)
        bits = _read_colour_bits(file, image)
        if bits > 8:
            return Header(np.dtype(np.uint16), pages, loses_bits=True, bits=bits)
        return Header(_get_dtype(image), pages)


def _read_colour_bits(file: Path | bytes, image: ImageFile) -> int:
    """Return the bits of a colour of JPEG 2000 or AVIF; 0 if Pillow reads all of them.

    Source: ISO/IEC 15444-1, A.5.1, the size segment; ISO/IEC 23008-12, 6.5.6, pixel information.
    """
    if image.format not in BITS_OF_COLOURS or len(image.getbands()) == 1:
        return 0
    mark, distance = BITS_OF_COLOURS[image.format]
    head = read_start(file, HEAD_BYTES)
    start = head.find(mark)
    if start < 0 or start + distance >= len(head):
        return 0
    number = head[start + distance]
    # In JPEG 2000 the first bit of this byte is a sign, and the rest is the bits minus 1.
    return (number & 0x7F) + 1 if image.format == "JPEG2000" else number


def _get_dtype(image: ImageFile) -> np.dtype:
    if image.mode == "F":
        return np.dtype(np.float32)
    if image.mode == "I" and image.format != "PPM":
        return np.dtype(np.int32)
    if image.mode == "I" or image.mode.startswith("I;16"):
        return np.dtype(np.uint16)
    return np.dtype(np.uint8)


def _loses_bits(image: ImageFile) -> bool:
    """Return whether the image has several bands of 16 bits, of which Pillow keeps 8."""
    tiles = getattr(image, "tile", ())
    if len(image.getbands()) == 1 or not tiles:
        return False
    if image.format == "PPM":
        return _read_ppm_white(image) > 255
    return any("16" in _get_raw_mode(tile.args) for tile in tiles)


def _get_raw_mode(arguments: str | tuple[Any, ...] | None) -> str:
    """Return the raw mode, as "RGB;16B", of the arguments of Pillow's decoder."""
    if isinstance(arguments, tuple):
        return str(arguments[0]) if arguments else ""
    return arguments or ""


def _read_ppm_white(image: ImageFile) -> int:
    """Return the number that is white in an open PPM file."""
    tile = image.tile[0]
    if tile.codec_name == "raw":
        return 255
    _, white = tuple(tile.args or ())
    return int(white)


def add_band_axis(values: np.ndarray) -> np.ndarray:
    """Return (height, width, bands) of an image that may have two axes."""
    return values[..., None] if values.ndim == 2 else values


def has_deep_colours(file: Path | bytes) -> bool:
    """Return whether a file is a PNG or PPM of 16 bits for each of several bands."""
    start = read_start(file, PNG_KIND_BYTE + 1)
    if start.startswith(PNG_MAGIC):
        return start[PNG_BITS_BYTE] == 16 and start[PNG_KIND_BYTE] in PNG_KINDS_WITH_BANDS
    if not start.startswith(PPM_MAGIC):
        return False
    with open_header(file) as image:
        return _loses_bits(image)


def read_deep_colours(file: Path | bytes) -> np.ndarray:
    """Return (height, width, bands) uint16 of a PNG or PPM, rotated by its EXIF data."""
    data = file if isinstance(file, bytes) else file.read_bytes()
    with open_header(data) as image:
        if image.format == "PPM":
            return _read_ppm(data, image)
        raw_mode = str(image.tile[0].args)
    return _read_png(data, raw_mode)


def _read_ppm(data: bytes, image: ImageFile) -> np.ndarray:
    """Return the colours of an open PPM. White is 65,535, as in a grey PPM."""
    count = 3 * image.width * image.height
    values = np.frombuffer(data, ">u2", count, image.tile[0].offset)
    scale = WHITE_16 / _read_ppm_white(image)
    return np.round(values * scale).astype(np.uint16).reshape(image.height, image.width, 3)


def _read_png(data: bytes, raw_mode: str) -> np.ndarray:
    """Return the colours of a PNG. Pillow decodes its bytes in other raw modes.

    Args:
        raw_mode: Pillow's name of the layout in the file: RGB;16B, RGBA;16B, or LA;16B.
    """
    if raw_mode == GREY_WITH_ALPHA:
        # A pixel has four bytes, as a pixel of 8-bit colours with alpha.
        pixels = _decode(data, "RGBA")
        return 256 * pixels[..., 0::2] + pixels[..., 1::2]
    # Pillow keeps the first of two bytes. In the raw mode of the other order it is the low byte.
    high = _decode(data, raw_mode)
    low = _decode(data, raw_mode.replace("16B", "16L"))
    return 256 * high + low


def _decode(data: bytes, raw_mode: str) -> np.ndarray:
    """Return the bytes that a raw mode reads from a PNG, (height, width, bands) uint16."""
    with open_header(data) as image:
        tile = image.tile[0]
        image.tile = [type(tile)(tile.codec_name, tile.extents, tile.offset, raw_mode)]
        return np.asarray(ImageOps.exif_transpose(image)).astype(np.uint16)


def blend_on_white(values: np.ndarray) -> np.ndarray:
    """Return 16-bit colours without alpha, on the white background that `to_8_bits` has too.

    Args:
        values: (height, width, bands) uint16. The last of two or of four bands is alpha.
    """
    if values.shape[2] not in (2, 4):
        return values
    colours = values[..., :-1].astype(np.float64)
    alpha = values[..., -1:].astype(np.float64) / WHITE_16
    return np.round(colours * alpha + WHITE_16 * (1 - alpha)).astype(np.uint16)


def has_tifffile() -> bool:
    return find_spec("tifffile") is not None


def needs_tifffile(file: Path | bytes) -> bool:
    """Return whether a file is a TIFF that Pillow cannot read in full."""
    if not is_tiff(file):
        return False
    try:
        with Image.open(open_bytes(file), formats=FORMATS) as image:
            return _loses_bits(image)
    except UnidentifiedImageError:
        return True


def _read_tifffile_header(file: Path | bytes) -> Header:
    import tifffile

    with tifffile.TiffFile(open_bytes(file)) as tiff:
        return Header(np.dtype(tiff.pages[0].dtype), len(tiff.pages))


def read_tiff(file: Path | bytes, page: int | str) -> np.ndarray:
    """Return (height, width, bands) of one page by tifffile, or of all pages as bands."""
    if not has_tifffile():
        raise ValueError(NEEDS_TIFFFILE)
    import tifffile

    with tifffile.TiffFile(open_bytes(file)) as tiff:
        if page != ALL and int(page) >= len(tiff.pages):
            count = len(tiff.pages)
            raise ValueError(f"data.page={page} counts from 0, and its pages are {count}")
        pages: Sequence[Any] = tiff.pages if page == ALL else [tiff.pages[int(page)]]
        return np.concatenate([add_band_axis(_move_bands_last(each)) for each in pages], axis=2)


def _move_bands_last(page: Any) -> np.ndarray:
    """Return the values of a page of tifffile, also if its bands lie in separate planes."""
    values = page.asarray()
    if values.ndim == 3 and page.planarconfig == 2:
        return np.moveaxis(values, 0, 2)
    return values
