"""Decode one image file into 8-bit pixels, upright and without transparency; name the file that cannot be decoded."""

import io
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lockstep.data.framing import Framing
from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)

# Raster formats that Pillow decodes itself: without EPS and WMF (other programs), PDF, and container formats.
FORMATS = (
    "AVIF", "BMP", "DDS", "DIB", "GIF", "ICNS", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "PSD", "QOI",
    "SGI", "SUN", "TIFF", "WEBP", "XBM", "XPM",
)  # fmt: skip
TGA = {".tga", ".icb", ".vda", ".vst"}  # has no signature, so only the ending tells
SUFFIXES = TGA | {
    ".apng", ".avif", ".avifs", ".bmp", ".bw", ".dds", ".dib", ".gif", ".icns", ".ico", ".j2c", ".j2k", ".jfif", ".jp2",
    ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".pbm", ".pcx", ".pfm", ".pgm", ".png", ".pnm", ".ppm",
    ".psd", ".qoi", ".ras", ".rgb", ".rgba", ".sgi", ".tif", ".tiff", ".webp", ".xbm", ".xpm",
}  # fmt: skip
BACKGROUND = "white"  # behind transparent images, in training, evaluation, prediction and export alike
THREADS, CHUNK = 8, 32  # Pillow decodes without Python's lock; images per task, to bound the number of tasks


class CorruptImage(Exception):
    """An image, or a file of images, that cannot be read or decoded; the message says which and why."""

    def refusal(self) -> UserError:
        return UserError(f"{self}: repair or remove it, or skip damaged images with data.skip_corrupt=true.")


def is_image(name: str) -> bool:
    """Return whether a file name has an ending that Pillow can decode."""
    return name[name.rfind(".") :].lower() in SUFFIXES


def open_image(file: Path | bytes, channels: int, *, name: object = None) -> Image.Image:
    """Return the whole image as a viewer shows it: rotated by its EXIF data, on a white background, in 8 bits.

    Args:
        file: a path, or the encoded bytes.
        channels: 3 for RGB, 1 for L.
        name: what errors call the image; None: the path.
    Raises:
        CorruptImage: truncated, not an image, or larger than Pillow's limit against decompression bombs.
    """
    name = name or file
    formats = [*FORMATS, "TGA"] if os.path.splitext(str(name))[1].lower() in TGA else FORMATS
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=formats) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PPM"):
                # 16 bits, which Pillow's own conversion clips at 255
                image = Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError("32 bits per pixel and no defined white: convert it to 8 or 16 bits")
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image)
            return image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise CorruptImage(f"{name} cannot be decoded ({error})") from None


def open_mask(path: Path) -> np.ndarray:
    """Return the class of each pixel, (height, width) uint8.

    Raises:
        CorruptImage: it cannot be read, or has several channels.
    """
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image)
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise CorruptImage(f"the mask {path} cannot be decoded ({error})") from None
    if pixels.ndim != 2 or pixels.dtype not in (np.uint8, np.bool_):
        raise CorruptImage(f"the mask {path} must have one channel of 8 bits, the class of each pixel")
    return pixels.astype(np.uint8)


def decode(path: Path, framing: Framing) -> np.ndarray:
    """Return a file as the (resize, resize, channels) uint8 square that evaluation crops.

    Raises:
        CorruptImage: as of `open_image`.
    """
    return pixels_of(framing.square(open_image(path, framing.channels)))


def pixels_of(image: Any) -> np.ndarray:
    """Return (height, width, channels) uint8, of a mask (height, width)."""
    if not isinstance(image, Image.Image):
        return image.numpy()
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def decode_all(count: int, decode_one: Callable[[int], Any], *, skip_corrupt: bool = False) -> dict[int, str]:
    """Call decode_one(i) for images 0 to count − 1 in threads; return the reason for each image that was skipped.

    Args:
        skip_corrupt: collect the images that cannot be decoded instead of raising an error for the first.
    Raises:
        UserError: names the first image that cannot be decoded.
    """
    failures: dict[int, str] = {}

    def work(first: int) -> None:
        for i in range(first, min(first + CHUNK, count)):
            try:
                decode_one(i)
            except CorruptImage as error:
                if not skip_corrupt:
                    raise
                failures[i] = str(error)
            advance(1)

    with progress(f"Decoding {count} images", count) as advance, ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in pool.map(work, range(0, count, CHUNK)):
                pass
        except CorruptImage as error:
            pool.shutdown(cancel_futures=True)
            raise error.refusal() from None
    return dict(sorted(failures.items()))


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, one line elsewhere; yield advance(n), which several threads may call."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        log.info(what)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        yield partial(bar.advance, bar.add_task(what, total=total))
