"""Folders of images, one folder per class: list them, and decode them in parallel into one uint8 array."""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from lockstep.data.framing import Framing
from lockstep.data.progress import progress
from lockstep.runs.errors import UserError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # not EPS, for which Pillow starts Ghostscript
MAX_PIXELS = 2**26  # of one image file, unless data.max_pixels says otherwise: more would fill the memory
THREADS = 8  # Pillow decodes and resizes without Python's lock


@dataclass(frozen=True)
class Listing:
    """The images of one folder of classes: files and labels (n,) int64, by class, then in natural order."""

    class_names: list[str]
    files: list[Path]
    labels: np.ndarray


class CorruptImage(Exception):
    """An image file that cannot be decoded; says which and why."""


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts img9 before img10."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def list_split(folder: Path, key: str = "data.root") -> Listing:
    """Every image below folder/<class>/, at any depth.

    Raises:
        UserError: the folder is missing or empty, or a class has no images.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: {key} must be a folder with one folder of images per class.")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise UserError(f"{folder} has no class folders: put the images into {folder}/<class>/.")
    files: list[Path] = []
    labels: list[int] = []
    for label, path in enumerate(classes):
        found = _images_below(path)
        if not found:
            raise UserError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))}): add some or remove the folder.")
        files += [path / name for name in sorted(found, key=natural_key)]
        labels += [label] * len(found)
    return Listing([path.name for path in classes], files, np.array(labels, np.int64))


def _images_below(folder: Path) -> list[str]:
    """Relative names, by their endings; a folder of a million images is listed without a look at each."""
    return [
        os.path.relpath(os.path.join(place, name), folder) if place != str(folder) else name
        for place, _, names in os.walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in SUFFIXES
    ]


def open_image(path: Path, channels: int, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The whole image as a viewer shows it, turned as its EXIF data say: RGB, or L for one channel.

    Raises:
        CorruptImage: truncated, not an image, or of more than max_pixels, which is seen before it is decoded.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise CorruptImage(
                    f"{path} claims {image.width}×{image.height} pixels, more than data.max_pixels={max_pixels}"
                )
            upright = ImageOps.exif_transpose(image)
            return _eight_bits(upright, path, image.format).convert("L" if channels == 1 else "RGB")
    except CorruptImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise CorruptImage(f"{path} claims too many pixels ({error})") from None
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise CorruptImage(f"{path} cannot be decoded ({error})") from None


def decode(path: Path, framing: Framing, size: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """(size, size, channels) uint8: the square of `framing`, or the image as it is where it has this size.

    Args:
        size: None: framing.resize.
    Raises:
        CorruptImage: as open_image.
    """
    size = size or framing.resize
    image = open_image(path, framing.channels, max_pixels)
    if image.size != (size, size):
        image = framing.square(image)
    if image.size != (size, size):
        raise CorruptImage(f"{path} has another size than before")
    return np.asarray(image).reshape(size, size, framing.channels)


def _eight_bits(image: Image.Image, path: Path, file_format: str | None) -> Image.Image:
    """What Pillow converts as people see it; it would cut 16 bits off at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PPM"):  # of 16 bits, says Pillow
        return Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise CorruptImage(f"{path} has 32 bits a pixel, of which nobody says what is white: convert it to 8 or 16")
    # A palette may hold transparency, which Pillow wants resolved first.
    return image.convert("RGBA") if image.mode == "P" else image


def common_size(files: Sequence[Path]) -> int | None:
    """The side that all images have, where they are squares of one size."""
    sizes = set()
    for path in files:
        try:
            with Image.open(path, formats=FORMATS) as image:
                sizes.add(image.size)
        except Exception:  # a damaged file makes Pillow raise nearly anything; `decode` names it
            continue
        if len(sizes) > 1:
            return None
    return next((w for w, h in sizes if w == h), None)


def decode_all(
    files: Sequence[Path],
    decode_one: Callable[[Path], np.ndarray],
    *,
    skip_corrupt: bool = False,
    out: np.ndarray | None,
    hint: str = "",
) -> dict[int, str]:
    """Decode all images into `out`; for each skipped position what was wrong.

    Args:
        decode_one: gives (size, size, channels) uint8.
        hint: what else would help, for the error.
        out: (n, size, size, channels) uint8; skipped positions keep what they held. None: nothing is kept, to see only
            whether all can be decoded.
    Raises:
        UserError: names the first image that cannot be decoded, unless `skip_corrupt`.
    """
    failures: dict[int, str] = {}

    def work(i: int) -> None:
        try:
            image = decode_one(files[i])
            if out is not None:
                out[i] = image
        except CorruptImage as error:
            if not skip_corrupt:
                raise
            failures[i] = str(error)
        advance(1)

    with progress(f"Decoding {len(files)} images", len(files)) as advance, ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in pool.map(work, range(len(files))):
                pass
        except CorruptImage as error:
            pool.shutdown(cancel_futures=True)
            raise UserError(f"{error}: mend or remove it{hint}.") from None
    return failures
