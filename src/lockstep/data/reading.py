"""Read an image file as the pixels of a net: its depth, its page and its channels.

A deep image has more than 8 bits, or other channels than a picture. It is torchvision's, of floats
from 0 to 1. All other images are Pillow's, in 8 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from lockstep.data.decoding import (
    FORMATS,
    decoding_errors,
    in_8_bits,
    is_array,
    is_tiff,
    load_array,
    open_header,
    open_image,
    source_of,
    upright,
)
from lockstep.process.errors import UserError

AUTO = "auto"
# The black and white of each image are these percentiles of its values.
BY_IMAGE = "image"
PERCENTILES = (0.5, 99.5)
ALL = "all"
# Channels of a picture: grey, or red, green and blue.
PICTURE = (1, 3)
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's
PAGED = ("TIFF", "GIF")
NEEDS_TIFFFILE = "a TIFF of bits or bands that Pillow does not read: pip install tifffile"

Range = tuple[float, float] | str | None
"""Black and white; image: by the percentiles of each image; None: the 8 bits that a viewer shows"""


@dataclass(frozen=True)
class Reading:
    """The part of an image file that becomes pixels.

    Args:
        channels: 1 for grey, 3 for colour; other numbers are the bands of a file.
        limits: black and white of images of more than 8 bits. Other images are from 0 to 255.
        page: of a TIFF or GIF, from 0; all: its pages are channels.
        bands: which bands of the file are the channels, from 1; (): all in their order.
        max_megapixels: as of `open_image`.

    Raises:
        UserError: the options contradict each other.
    """

    channels: int = 3
    limits: Range = None
    page: int | str = 0
    bands: tuple[int, ...] = ()
    max_megapixels: float | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.channels, int) and not isinstance(self.channels, bool)
        if not is_number or self.channels < 1:
            raise UserError(
                f"data.channels={self.channels} must be 3 (colour), 1 (grey), or the number of "
                "bands of the files."
            )
        if self.page != ALL and (not isinstance(self.page, int) or self.page < 0):
            raise UserError(f"data.page={self.page} must be a number from 0, or all.")
        if any(not isinstance(band, int) or band < 1 for band in self.bands):
            raise UserError(f"data.bands={list(self.bands)} must be numbers from 1, as [3,2,1].")
        if self.bands and len(self.bands) != self.channels:
            raise UserError(
                f"data.bands={list(self.bands)} are {len(self.bands)} bands: give "
                f"data.channels={len(self.bands)} as well."
            )

    @property
    def is_deep(self) -> bool:
        is_picture = self.channels in PICTURE and not self.bands and self.page != ALL
        return self.limits is not None or not is_picture

    def open(self, file: Path | bytes, name: object = None) -> Any:
        """Return the whole image.

        Args:
            name: what errors call it; None: the path.

        Raises:
            CorruptImage: it cannot be decoded, or has other pages or channels.
        """
        if not self.is_deep:
            return open_image(
                file,
                self.channels,
                name=name,
                max_megapixels=self.max_megapixels,
                page=int(self.page),
            )
        with decoding_errors(name or file, self.max_megapixels):
            return _as_tensor(self._in_unit_range(self._fitting(self._read(file))))

    def values_of(self, file: Path | bytes, name: object = None) -> np.ndarray:
        """Return (height, width, channels) as the file has them.

        Raises:
            CorruptImage: as of `open`.
        """
        with decoding_errors(name or file, self.max_megapixels):
            return self._fitting(self._read(file))

    @property
    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint stores of it, as plain values; `of_facts` is the way back."""
        limits = list(self.limits) if isinstance(self.limits, tuple) else self.limits
        return {"range": limits, "page": self.page, "bands": list(self.bands) or None}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "Reading":
        return cls(
            facts.get("channels", 3),
            range_of(facts.get("range")),
            facts.get("page", 0),
            tuple(facts.get("bands") or ()),
        )

    def _read(self, file: Path | bytes) -> np.ndarray:
        """Return (height, width, bands) as the file has them; 8-bit pictures on white."""
        if is_array(file):
            return _with_bands(load_array(file))
        if needs_tifffile(file):
            return _with_bands(_read_tiff(file, self.page))
        if self.page != ALL:
            return self._page(upright(file, int(self.page)))
        count = header_of(file).pages
        return np.concatenate([self._page(upright(file, i)) for i in range(count)], axis=2)

    def _page(self, image: Image.Image) -> np.ndarray:
        """Return the bands of one page."""
        is_grey = len(image.getbands()) == 1
        keeps_bands = bool(self.bands) or self.channels not in PICTURE
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            return _with_bands(np.asarray(image))
        if keeps_bands and image.mode not in ("1", "P", "PA"):
            return _with_bands(np.asarray(image))
        # A palette has colours.
        return _with_bands(np.asarray(in_8_bits(image, 1 if is_grey and image.mode != "P" else 3)))

    def _fitting(self, values: np.ndarray) -> np.ndarray:
        """Return the bands that are the channels."""
        count = values.shape[2]
        if self.bands:
            if max(self.bands) > count:
                raise ValueError(f"data.bands={list(self.bands)}, and its bands are {count}")
            return values[..., [band - 1 for band in self.bands]]
        if count == self.channels:
            return values
        if count == 1 and self.channels == 3:
            return values.repeat(3, axis=2)
        if count == 3 and self.channels == 1:
            return (values @ np.array(LUMA)).astype(values.dtype)[..., None]
        raise ValueError(
            f"its bands are {count}: give data.channels={count}, or choose data.bands=[1,2,3]"
        )

    def _in_unit_range(self, values: np.ndarray) -> np.ndarray:
        """Return float32 from 0, black, to 1, white."""
        if values.dtype == np.uint8:
            return values.astype(np.float32) / 255
        low, high = self._limits_of(values)
        # Equal values are black.
        width = high - low if high > low else 1.0
        scaled = (values.astype(np.float64) - low) / width
        return np.nan_to_num(scaled.clip(0, 1)).astype(np.float32)

    def _limits_of(self, values: np.ndarray) -> tuple[float, float]:
        if isinstance(self.limits, str):
            finite = values[np.isfinite(values)]
            low, high = np.percentile(finite, PERCENTILES) if finite.size else (0, 1)
            return float(low), float(high)
        if self.limits is None:
            if values.dtype != np.uint16:
                raise ValueError("no number in it is known to be white: give data.range=[0,WHITE]")
            return 0.0, 65535.0
        return self.limits


def range_of(option: Any) -> Range:
    """Return data.range as `Reading` has it; auto stays.

    Raises:
        UserError: it is no range.
    """
    if option in (None, AUTO, BY_IMAGE):
        return option
    try:
        low, high = map(float, option)
        is_valid = low < high and bool(np.isfinite([low, high]).all())
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise UserError(
            f"data.range={option} must be auto, image, or two ascending numbers, as [0,4095]."
        )
    return low, high


@dataclass(frozen=True)
class Header:
    """The facts in the head of an image file.

    Args:
        kind: of its numbers.
        pages: 1 but for TIFF and GIF.
        is_cut: Pillow reads 8 of its bits.
    """

    kind: np.dtype
    pages: int = 1
    is_cut: bool = False

    @property
    def is_deep(self) -> bool:
        return self.kind != np.uint8 and not self.is_cut

    @property
    def depth(self) -> str:
        """Return "16 bits" or "32-bit floats"."""
        bits = 8 * self.kind.itemsize
        return f"{bits}-bit floats" if self.kind.kind == "f" else f"{bits} bits"


def header_of(file: Path | bytes) -> Header:
    """Return what the head of an image file says; it may raise nearly anything."""
    if is_array(file):
        return Header(load_array(file).dtype)
    if needs_tifffile(file) and has_tifffile():
        return _header_by_tifffile(file)
    with open_header(file) as image:
        pages = getattr(image, "n_frames", 1) if image.format in PAGED else 1
        if image.mode == "F":
            return Header(np.dtype(np.float32), pages)
        if image.mode == "I" and image.format != "PPM":
            return Header(np.dtype(np.int32), pages)
        if image.mode == "I" or image.mode.startswith("I;16"):
            return Header(np.dtype(np.uint16), pages)
        if _is_cut(image):
            return Header(np.dtype(np.uint16), pages, is_cut=True)
        return Header(np.dtype(np.uint8), pages)


def _is_cut(image: Image.Image) -> bool:
    """Return whether Pillow keeps 8 of the 16 bits that its raw mode names for several bands."""
    tiles = getattr(image, "tile", ())
    return len(image.getbands()) > 1 and any("16" in str(tile[3]) for tile in tiles)


def has_tifffile() -> bool:
    return find_spec("tifffile") is not None


def needs_tifffile(file: Path | bytes) -> bool:
    """Return whether a file is a TIFF that Pillow cannot read in full."""
    if not is_tiff(file):
        return False
    try:
        with Image.open(source_of(file), formats=FORMATS) as image:
            return _is_cut(image)
    except UnidentifiedImageError:
        return True


def _header_by_tifffile(file: Path | bytes) -> Header:
    import tifffile

    with tifffile.TiffFile(source_of(file)) as opened:
        return Header(np.dtype(opened.pages[0].dtype), len(opened.pages))


def _read_tiff(file: Path | bytes, page: int | str) -> np.ndarray:
    """Return (height, width[, bands]) of one page, or of all pages as bands."""
    if not has_tifffile():
        raise ValueError(NEEDS_TIFFFILE)
    import tifffile

    with tifffile.TiffFile(source_of(file)) as opened:
        if page != ALL and int(page) >= len(opened.pages):
            count = len(opened.pages)
            raise ValueError(f"data.page={page} counts from 0, and its pages are {count}")
        pages: Sequence[Any] = opened.pages if page == ALL else [opened.pages[int(page)]]
        return np.concatenate([_with_bands(_bands_last(each)) for each in pages], axis=2)


def _bands_last(page: Any) -> np.ndarray:
    """Return a page of tifffile, whose bands may lie in separate planes."""
    values = page.asarray()
    if values.ndim == 3 and page.planarconfig == 2:
        return np.moveaxis(values, 0, 2)
    return values


def _with_bands(values: np.ndarray) -> np.ndarray:
    return values[..., None] if values.ndim == 2 else values


def _as_tensor(values: np.ndarray) -> Any:
    """Return torchvision's image of (height, width, channels)."""
    import torch
    from torchvision.tv_tensors import Image as TensorImage

    return TensorImage(torch.from_numpy(np.ascontiguousarray(np.moveaxis(values, 2, 0))))
