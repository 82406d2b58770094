"""Folders of images, one folder per class: list them, and decode them in parallel into one uint8 array."""

import logging
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from lockstep.data.framing import Framing
from lockstep.data.progress import progress
from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # not EPS, for which Pillow starts Ghostscript
MAX_PIXELS = 2**26  # of one image file, unless data.max_pixels says otherwise: more would fill the memory
DIGITS = re.compile("([0-9]+)")
THREADS = 8  # Pillow decodes and resizes without Python's lock
CHUNK = 32  # images that a thread takes at a time: a million tasks of one image would fill the memory


@dataclass(frozen=True)
class Listing:
    """The images of one folder of classes, by class, then in natural order.

    names: (n,) relative to root; labels: (n,) int64; folders: root and all below it that were looked through.
    """

    root: Path
    class_names: list[str]
    names: list[str]
    labels: np.ndarray
    folders: list[str]

    @property
    def files(self) -> list[Path]:
        return [self.root / name for name in self.names]


class CorruptImage(Exception):
    """An image file that cannot be decoded; says which and why."""


def natural_key(name: str) -> list[str | int]:
    """Sorts img9 before img10."""
    parts: list[str | int] = list(DIGITS.split(name))  # text and digits in turn
    parts[1::2] = map(int, parts[1::2])
    return parts


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
    names: list[str] = []
    labels: list[int] = []
    folders = [str(folder)]
    for label, path in enumerate(classes):
        found, below = _images_below(path)
        if not found:
            raise UserError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))}): add some or remove the folder.")
        inner = {name.partition("/")[0] for name in found if "/" in name}
        if len(inner) > 1 and all("/" in name for name in found):
            log.warning(
                f"{path} counts as one class, and holds folders alone: {', '.join(sorted(inner)[:5])}. Is {key} right?"
            )
        names += [f"{path.name}/{name}" for name in sorted(found, key=natural_key)]
        labels += [label] * len(found)
        folders += below
    return Listing(folder, [path.name for path in classes], names, np.array(labels, np.int64), folders)


def _images_below(folder: Path) -> tuple[list[str], list[str]]:
    """Relative names, by their endings, and all folders; a million images are listed without a look at each."""
    found: list[str] = []
    folders: list[str] = []
    for place, _, names in os.walk(folder):
        folders.append(place)
        within = place[len(str(folder)) + 1 :]
        found += [
            f"{within}/{name}" if within else name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES
        ]
    return found, folders


def open_image(
    file: Path | BinaryIO, channels: int, max_pixels: int = MAX_PIXELS, *, name: object = None
) -> Image.Image:
    """The whole image as a viewer shows it, turned as its EXIF data say: RGB, or L for one channel.

    Args:
        name: what errors call it; None: the path.
    Raises:
        CorruptImage: truncated, not an image, or of more than max_pixels, which is seen before it is decoded.
    """
    name = name or file
    try:
        with Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise CorruptImage(
                    f"{name} claims {image.width}×{image.height} pixels, more than data.max_pixels={max_pixels}"
                )
            upright = ImageOps.exif_transpose(image)
            return _eight_bits(upright, name, image.format).convert("L" if channels == 1 else "RGB")
    except CorruptImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise CorruptImage(f"{name} claims too many pixels ({error})") from None
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise CorruptImage(f"{name} cannot be decoded ({error})") from None


def decode(path: Path, framing: Framing, size: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """`fitted` of a file.

    Raises:
        CorruptImage: as open_image.
    """
    return fitted(open_image(path, framing.channels, max_pixels), framing, size or framing.resize, lambda: str(path))


def fitted(image: Image.Image, framing: Framing, size: int, name: Callable[[], str]) -> np.ndarray:
    """(size, size, channels) uint8: the square of `framing`, or the image as it is where it has this size.

    Raises:
        CorruptImage: neither has this size, but all images together seemed to.
    """
    if image.size != (size, size):
        found, image = image.size, framing.square(image)
        if image.size != (size, size):
            raise CorruptImage(
                f"{name()} has {found[0]}×{found[1]} pixels, where others have {size}×{size} "
                "(data.verify=true looks at all of them first)"
            )
    return np.asarray(image).reshape(size, size, framing.channels)


def _eight_bits(image: Image.Image, name: object, file_format: str | None) -> Image.Image:
    """What Pillow converts as people see it; it would cut 16 bits off at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PPM"):  # of 16 bits, says Pillow
        return Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise CorruptImage(f"{name} has 32 bits a pixel, of which nobody says what is white: convert it to 8 or 16")
    # A palette may hold transparency, which Pillow wants resolved first.
    return image.convert("RGBA") if image.mode == "P" else image


def common_size(openers: Iterable[Callable[[], BinaryIO]]) -> int | None:
    """The side that all images have, where they are squares of one size; reads no further than to the second size."""
    sizes = set()
    for opened in openers:
        try:
            with opened() as file, Image.open(file, formats=FORMATS) as image:
                sizes.add(image.size)
        except (UserError, ConnectionError):  # of a bucket: another rank may read it
            raise
        except Exception:  # a damaged file makes Pillow raise nearly anything; `decode` names it
            continue
        if len(sizes) > 1:
            return None
    return next((w for w, h in sizes if w == h), None)


def decode_all(
    count: int,
    decode_one: Callable[[int], np.ndarray],
    *,
    skip_corrupt: bool = False,
    out: np.ndarray | None,
    hint: str = "",
) -> dict[int, str]:
    """Decode images 0 to count − 1 into `out`; for each skipped position what was wrong.

    Args:
        decode_one: gives (size, size, channels) uint8.
        hint: what else would help, for the error.
        out: (count, size, size, channels) uint8; skipped positions keep what they held. None: nothing is kept, to see
            only whether all can be decoded.
    Raises:
        UserError: names the first image that cannot be decoded, unless `skip_corrupt`.
    """
    failures: dict[int, str] = {}

    def work(first: int) -> None:
        for i in range(first, min(first + CHUNK, count)):
            try:
                image = decode_one(i)
                if out is not None:
                    out[i] = image
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
            raise UserError(f"{error}: mend or remove it{hint}.") from None
    return dict(sorted(failures.items()))
