"""Decode one image file into 8-bit pixels, upright and without transparency.

`lockstep.data.reading` reads images with more bits or other channels. Errors name the file.
"""

import io
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from tqdm import tqdm

from lockstep.data.dicom import MAGIC_END, has_magic, read_dicom
from lockstep.data.dicom import SUFFIXES as DICOM_SUFFIXES
from lockstep.process.errors import UserError

# Raster formats that Pillow decodes itself. EPS and WMF need other programs; PDF and containers
# are no images.
FORMATS = (
    "AVIF", "BMP", "DDS", "DIB", "GIF", "ICNS", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM",
    "PSD", "QOI", "SGI", "SUN", "TGA", "TIFF", "WEBP", "XBM", "XPM",
)  # fmt: skip
ARRAY_SUFFIX = ".npy"
PICTURE_SUFFIXES = {
    suffix for suffix, kind in Image.registered_extensions().items() if kind in (*FORMATS, "MPO")
}
SUFFIXES = {*PICTURE_SUFFIXES, *DICOM_SUFFIXES, ARRAY_SUFFIX}
# The first bytes of a NumPy array in a file.
ARRAY_MAGIC = b"\x93NUMPY"
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# The colour behind transparent images, in training, evaluation, prediction and export alike.
BACKGROUND = "white"
# Pillow releases Python's lock while it decodes.
THREADS = 8
NO_WHITE = "no defined white: give data.range=[BLACK,WHITE]"
# The images of one task of a thread. Larger tasks are fewer, and take less memory.
CHUNK = 32


class CorruptImage(UserError):
    """An image, or a file of images, that cannot be read or decoded.

    `args[0]` names it and says why.
    """

    def __str__(self) -> str:
        return (
            f"{self.args[0]}. If it is damaged, repair or remove it. "
            "`python src/check_data.py data=… data.root=…` lists all such images."
        )


class TooLargeImage(CorruptImage):
    """An image above the limit that protects from small files with very large images."""

    def __str__(self) -> str:
        return f"{self.args[0]}: give data.max_megapixels=NUMBER, or save it smaller."


def open_image(
    file: Path | bytes,
    channels: int,
    *,
    name: object = None,
    max_megapixels: float | None = None,
    page: int = 0,
) -> Image.Image:
    """Return the whole image as a viewer shows it.

    It is rotated by its EXIF data, has a white background, and has 8 bits.

    Args:
        file: a path, or the encoded bytes.
        channels: 3 for RGB, 1 for L.
        name: what errors call the image; None: the path.
        max_megapixels: the largest image, in millions of pixels; None: Pillow's limit, 179.
        page: the page of a file with several, from 0.
    Raises:
        CorruptImage: the file is truncated or no image, it has no such page, or the image is larger
            than the limit.
    """
    with decoding_errors(name or file, max_megapixels):
        return to_8_bits(open_upright(file, page), channels)


@contextmanager
def decoding_errors(name: object, max_megapixels: float | None) -> Iterator[None]:
    """Raise CorruptImage with the image's name for any error while it is decoded."""
    if max_megapixels is not None:
        # Pillow has one limit for the whole process. It refuses images above twice the limit.
        Image.MAX_IMAGE_PIXELS = int(max_megapixels * 1e6 / 2)
    # A damaged file makes Pillow raise nearly anything.
    try:
        yield
    except UnidentifiedImageError:
        raise CorruptImage(f"{name} cannot be decoded (it is no image of a known format)") from None
    except Image.DecompressionBombError:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise TooLargeImage(f"{name} has more than {limit:.0f} megapixels") from None
    except Exception as error:
        raise CorruptImage(f"{name} cannot be decoded ({error})") from None


def open_upright(file: Path | bytes, page: int = 0) -> Image.Image:
    """Return one page of an image file, rotated by its EXIF data, in the file's own mode."""
    if is_array(file):
        return _array_to_pillow(load_array(file))
    if is_dicom(file):
        return _dicom_to_pillow(file, page)
    with open_header(file) as opened:
        seek_page(opened, page)
        image = ImageOps.exif_transpose(opened)
        image.format = opened.format
        return image


def open_header(file: Path | bytes) -> ImageFile:
    """Return an image whose pixels are not read yet."""
    try:
        return Image.open(open_bytes(file), formats=FORMATS)
    except UnidentifiedImageError:
        if not is_tiff(file):
            raise
    raise ValueError(
        "a damaged TIFF, or one whose bands need data.channels=BANDS and pip install tifffile"
    )


def is_tiff(file: Path | bytes) -> bool:
    return read_start(file, 4) in TIFF_MAGIC


def read_start(file: Path | bytes, count: int) -> bytes:
    """Return at most `count` bytes from the start of a file."""
    if isinstance(file, bytes):
        return file[:count]
    with open(file, "rb") as opened:
        return opened.read(count)


def seek_page(image: Image.Image, page: int) -> None:
    """Go to a page of an open file."""
    # To count its pages Pillow reads all headers of a TIFF, which page 0 does not need.
    if not page:
        return
    count = getattr(image, "n_frames", 1)
    if page >= count:
        raise ValueError(f"data.page={page} counts from 0, and its pages are {count}")
    image.seek(page)


def is_array(file: Path | bytes) -> bool:
    """Return whether a file holds a NumPy array."""
    if isinstance(file, bytes):
        return file.startswith(ARRAY_MAGIC)
    return Path(file).suffix.lower() == ARRAY_SUFFIX


def is_dicom(file: Path | bytes) -> bool:
    """Return whether a file is a DICOM file. Such files often have no ending."""
    if not isinstance(file, bytes):
        suffix = Path(file).suffix.lower()
        if suffix in SUFFIXES:
            return suffix in DICOM_SUFFIXES
    return has_magic(read_start(file, MAGIC_END))


def load_array(file: Path | bytes) -> np.ndarray:
    """Return the array of a NumPy file, (height, width) or (height, width, channels).

    If the first axis is the shortest one, the file has the channels there.
    """
    array = np.load(open_bytes(file), allow_pickle=False)
    if array.dtype.kind not in "buif" or array.ndim not in (2, 3):
        raise ValueError(f"an array {array.shape} of {array.dtype} is no image")
    if array.ndim == 3 and array.shape[0] < min(array.shape[1:]):
        array = np.moveaxis(array, 0, 2)
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    return array


def open_bytes(file: Path | bytes) -> Any:
    """Return bytes as an open file, and a path as it is."""
    return io.BytesIO(file) if isinstance(file, bytes) else file


def _array_to_pillow(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim == 3 and array.dtype == np.uint16:
        # Pillow has no colours of 16 bits.
        array = np.round(array / 257).astype(np.uint8)
    if array.dtype in (np.uint8, np.uint16):
        return Image.fromarray(np.ascontiguousarray(array))
    if array.ndim == 3:
        raise ValueError(f"colours of {array.dtype} and {NO_WHITE}")
    return Image.fromarray(array.astype(np.float32))


def _dicom_to_pillow(file: Path | bytes, frame: int) -> Image.Image:
    """Return a frame in 8 bits by its window. Without a window it has the depth of the file."""
    values, window = read_dicom(file, frame)
    if window is None or values.dtype == np.uint8:
        return _array_to_pillow(values)
    black, white = window
    unit_values = (values.astype(np.float64) - black) / (white - black)
    return Image.fromarray(np.round(255 * unit_values.clip(0, 1)).astype(np.uint8))


def to_8_bits(image: Image.Image, channels: int) -> Image.Image:
    """Return an image of any mode as RGB (3 channels) or L (1), on a white background.

    Raises:
        ValueError: pixels have 32 bits, and nothing says which value is white.
    """
    # Pillow would clip 16 bits at 255.
    is_16_bit_ppm = image.mode == "I" and image.format == "PPM"
    if image.mode.startswith("I;16") or is_16_bit_ppm:
        image = Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"32 bits per pixel and {NO_WHITE}")

    if image.has_transparency_data:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, BACKGROUND)
        image = Image.alpha_composite(background, image)
    return image.convert("L" if channels == 1 else "RGB")


def open_mask(path: Path, max_megapixels: float | None = None) -> np.ndarray:
    """Return the class of each pixel, (height, width) uint8.

    Args:
        max_megapixels: see `open_image`.
    Raises:
        CorruptImage: the mask cannot be read, is a JPEG, or has several channels.
    """
    with decoding_errors(f"the mask {path}", max_megapixels), open_header(path) as image:
        pixels = np.asarray(image)
        is_lossy = image.format in ("JPEG", "MPO")

    if is_lossy:
        raise CorruptImage(
            f"the mask {path} is a JPEG, which changes values of pixels: save masks as PNG"
        )
    if pixels.ndim != 2 or pixels.dtype not in (np.uint8, np.bool_):
        raise CorruptImage(
            f"the mask {path} must have one channel of 8 bits, the class of each pixel"
        )
    return pixels.astype(np.uint8)


def to_array(image: Any) -> np.ndarray:
    """Return an image or a mask as (height, width, channels).

    Pillow's images and masks are uint8. A deep image, which is torchvision's with floats from 0 to
    1, is float32 from 0 to 255.
    """
    if getattr(image, "ndim", 0) == 3:
        return np.ascontiguousarray(image.permute(1, 2, 0).numpy()) * np.float32(255)
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        return pixels[..., None]
    return pixels


def get_size(image: Any) -> tuple[int, int]:
    """Return width and height of an image of Pillow or torchvision."""
    if isinstance(image, Image.Image):
        return image.size
    return image.shape[-1], image.shape[-2]


def to_pillow(image: Any) -> Image.Image:
    """Return an image for a contact sheet: its first three channels, or the first one."""
    if isinstance(image, Image.Image):
        return image
    pixels = to_array(image).round().astype(np.uint8)
    if pixels.shape[2] < 3:
        return Image.fromarray(pixels[..., 0])
    return Image.fromarray(np.ascontiguousarray(pixels[..., :3]))


def decode_all(count: int, decode_one: Callable[[int], Any], threads: int = THREADS) -> None:
    """Call decode_one(i) for images 0 to count − 1 in threads, and raise the first error.

    Args:
        threads: with 1 the images are decoded in order.
    """

    def decode_chunk(first: int) -> None:
        for i in range(first, min(first + CHUNK, count)):
            decode_one(i)

    logging.getLogger(__name__).info(f"Decoding {count} images")
    firsts = range(0, count, CHUNK)
    with ThreadPoolExecutor(threads) as pool:
        chunks = pool.map(decode_chunk, firsts)
        # The loop raises the errors of the chunks. With disable=None tqdm shows its bar only on a
        # terminal.
        for _ in tqdm(chunks, total=len(firsts), disable=None):
            pass
