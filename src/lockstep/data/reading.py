"""Read an image file as the pixels of a net: its depth, its page and its channels.

A deep image has more than 8 bits, or other channels than a picture. It is torchvision's, of floats
from 0 to 1. All other images are Pillow's, in 8 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.data.decoding import (
    decoding_errors,
    is_array,
    is_dicom,
    load_array,
    open_image,
    open_upright,
    to_8_bits,
)
from lockstep.data.dicom import Window, read_dicom
from lockstep.data.file_values import (
    ALL,
    add_band_axis,
    blend_on_white,
    has_deep_colours,
    needs_tifffile,
    read_deep_colours,
    read_header,
    read_tiff,
)
from lockstep.process.errors import UserError

AUTO = "auto"
# These percentiles of an image's values are its black and white.
BY_IMAGE = "image"
PERCENTILES = (0.5, 99.5)
# The window in its DICOM file has the black and white of an image.
BY_WINDOW = "window"
# Channels of a picture: grey, or red, green and blue.
PICTURE = (1, 3)
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's

Range = tuple[float, float] | str | None
"""Black and white. image: the percentiles of each image; window: the window of each DICOM file;
None: the 8 bits that a viewer shows."""


@dataclass(frozen=True)
class FileValues:
    """The values of an image as its file has them.

    Args:
        array: (height, width, channels).
        window: black and white as the file says; None: it says none.
    """

    array: np.ndarray
    window: Window | None = None


@dataclass(frozen=True)
class Reading:
    """The part of an image file that becomes pixels.

    Args:
        channels: 1 for grey, 3 for colour; other numbers are the bands of a file.
        value_range: black and white of images of more than 8 bits. Others are from 0 to 255.
        page: the page of a TIFF or GIF, or the frame of a DICOM file, from 0; all: each page is a
            channel.
        bands: the bands of the file that are the channels, from 1; (): all in their order.
        max_megapixels: see `open_image`.

    Raises:
        UserError: the options contradict each other.
    """

    channels: int = 3
    value_range: Range = None
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
        self._check_bands()

    def _check_bands(self) -> None:
        if any(not isinstance(band, int) or band < 1 for band in self.bands):
            raise UserError(f"data.bands={list(self.bands)} must be numbers from 1, as [3,2,1].")
        if self.bands and len(self.bands) != self.channels:
            raise UserError(
                f"data.bands={list(self.bands)} are {len(self.bands)} bands: give "
                f"data.channels={len(self.bands)} as well."
            )

    @property
    def has_float_pixels(self) -> bool:
        is_picture = self.channels in PICTURE and not self.bands and self.page != ALL
        return self.value_range is not None or not is_picture

    def open(self, file: Path | bytes, name: object = None) -> Any:
        """Return the whole image.

        Args:
            name: the name of the image in errors; None: the path.

        Raises:
            CorruptImage: it cannot be decoded, or has other pages or channels.
        """
        if not self.has_float_pixels:
            return open_image(
                file,
                self.channels,
                name=name,
                max_megapixels=self.max_megapixels,
                page=int(self.page),
            )
        with decoding_errors(name or file, self.max_megapixels):
            return self.to_image(self._read(file))

    def to_image(self, values: FileValues) -> Any:
        """Return torchvision's image of the values of a file.

        Raises:
            ValueError: the values have other channels, or nothing says which value is white.
        """
        fitting = self._select_channels(values.array)
        return _to_tensor(self._scale_to_unit_range(fitting, values.window))

    def read_values(self, file: Path | bytes, name: object = None) -> np.ndarray:
        """Return (height, width, channels) as the file has them.

        Raises:
            CorruptImage: see `open`.
        """
        with decoding_errors(name or file, self.max_megapixels):
            return self._select_channels(self._read(file).array)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the options that a checkpoint stores. `from_facts` reads them."""
        value_range: Any = self.value_range
        if isinstance(value_range, tuple):
            value_range = list(value_range)
        return {"range": value_range, "page": self.page, "bands": list(self.bands) or None}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Reading":
        return cls(
            facts.get("channels", 3),
            parse_range(facts.get("range")),
            facts.get("page", 0),
            tuple(facts.get("bands") or ()),
        )

    def _read(self, file: Path | bytes) -> FileValues:
        """Return the bands of the chosen pages. An 8-bit picture has a white background."""
        if is_array(file):
            return FileValues(add_band_axis(load_array(file)))
        if needs_tifffile(file):
            return FileValues(read_tiff(file, self.page))
        if self.page != ALL:
            return self._read_page(file, int(self.page))
        pages = [self._read_page(file, page) for page in range(read_header(file).pages)]
        return FileValues(np.concatenate([page.array for page in pages], axis=2), pages[0].window)

    def _read_page(self, file: Path | bytes, page: int) -> FileValues:
        if is_dicom(file):
            array, window = read_dicom(file, page)
            return FileValues(add_band_axis(array), window)
        if not has_deep_colours(file):
            return FileValues(self.to_bands(open_upright(file, page)))
        if page:
            raise ValueError(f"data.page={page} counts from 0, and its pages are 1")
        colours = read_deep_colours(file)
        return FileValues(colours if self._keeps_bands else blend_on_white(colours))

    @property
    def _keeps_bands(self) -> bool:
        """Return whether all bands are kept, also an alpha channel."""
        return bool(self.bands) or self.channels not in PICTURE

    def to_bands(self, image: Image.Image) -> np.ndarray:
        """Return (height, width, bands) of Pillow's image.

        An 8-bit picture has a white background.
        """
        is_grey = len(image.getbands()) == 1
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            return add_band_axis(np.asarray(image))
        if self._keeps_bands and image.mode not in ("1", "P", "PA"):
            return add_band_axis(np.asarray(image))
        # The numbers of a palette stand for colours.
        return add_band_axis(
            np.asarray(to_8_bits(image, 1 if is_grey and image.mode != "P" else 3))
        )

    def _select_channels(self, values: np.ndarray) -> np.ndarray:
        """Return the channels of all bands."""
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

    def _scale_to_unit_range(self, values: np.ndarray, window: Window | None) -> np.ndarray:
        """Return float32 from 0 for black to 1 for white."""
        if values.dtype == np.uint8:
            return values.astype(np.float32) / 255
        low, high = self._find_value_range(values, window)
        # If all values are equal, they become black.
        width = high - low if high > low else 1.0
        scaled = (values.astype(np.float64) - low) / width
        return np.nan_to_num(scaled.clip(0, 1)).astype(np.float32)

    def _find_value_range(self, values: np.ndarray, window: Window | None) -> tuple[float, float]:
        if self.value_range == BY_WINDOW and window is not None:
            return window
        if isinstance(self.value_range, str):
            finite = values[np.isfinite(values)]
            low, high = np.percentile(finite, PERCENTILES) if finite.size else (0, 1)
            return float(low), float(high)
        if self.value_range is None:
            if values.dtype != np.uint16:
                raise ValueError("no number in it is known to be white: give data.range=[0,WHITE]")
            return 0.0, 65535.0
        return self.value_range


def parse_range(option: Any) -> Range:
    """Return data.range as a Reading takes it; auto stays auto.

    Raises:
        UserError: it is no range.
    """
    if option in (None, AUTO, BY_IMAGE, BY_WINDOW):
        return option
    try:
        low, high = map(float, option)
        is_valid = low < high and bool(np.isfinite([low, high]).all())
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise UserError(
            f"data.range={option} must be auto, image, or two ascending numbers, as [0,4095]; of "
            "DICOM files also window."
        )
    return low, high


def _to_tensor(values: np.ndarray) -> Any:
    """Return torchvision's image of (height, width, channels)."""
    import torch
    from torchvision.tv_tensors import Image as TensorImage

    return TensorImage(torch.from_numpy(np.ascontiguousarray(np.moveaxis(values, 2, 0))))
