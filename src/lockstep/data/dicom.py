"""Read DICOM files by pydicom, if it is installed.

Values are in the unit of the modality, as Hounsfield units. They are computed from the stored
values by a slope and an intercept, or by a lookup table. The frames of a file are its pages.
"""

import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SUFFIXES = {".dcm", ".dicom"}
# The format's name stands behind a preamble of 128 bytes.
MAGIC = b"DICM"
MAGIC_START = 128
MAGIC_END = 132
NEEDS_PYDICOM = "a DICOM file: pip install pydicom"

Window = tuple[float, float]
"""The values that are shown black and white."""


@dataclass(frozen=True)
class DicomHeader:
    """The facts in the head of a DICOM file.

    Args:
        dtype: the type of its values. An 8-bit image that is not rescaled has uint8.
        bits: the number of bits of each value in the file.
        frames: the number of images in the file.
        has_window: whether it says which values are shown black and white.
    """

    dtype: np.dtype
    bits: int
    frames: int
    has_window: bool


def has_magic(start: bytes) -> bool:
    """Return whether the first bytes of a file are those of a DICOM file."""
    return start[MAGIC_START:MAGIC_END] == MAGIC


def has_pydicom() -> bool:
    return find_spec("pydicom") is not None


def read_dicom_header(file: Path | bytes) -> DicomHeader:
    """Return the facts in the head of a DICOM file. It may raise nearly any exception."""
    dataset = _read(file, reads_pixels=False)
    bits = int(dataset.get("BitsStored") or dataset.BitsAllocated)
    has_window = read_window(dataset, 0) is not None
    return DicomHeader(_get_dtype(dataset), bits, _count_frames(dataset), has_window)


def read_dicom(file: Path | bytes, frame: int) -> tuple[np.ndarray, Window | None]:
    """Return one frame, (height, width) or (height, width, 3), and its window if it has one.

    Small values are dark. The values of MONOCHROME1, where they are bright, are mirrored.

    Raises:
        ValueError: pydicom is missing, or the file has no such frame.
        DecompressionBombError: the image is larger than Pillow's limit.
    """
    dataset = _read(file, reads_pixels=True)
    count = _count_frames(dataset)
    if frame >= count:
        raise ValueError(f"data.page={frame} counts from 0, and its frames are {count}")
    _check_size(dataset)

    from pydicom.pixels import apply_color_lut, pixel_array

    # pydicom converts the colours of any file to RGB.
    stored = pixel_array(dataset, index=frame)
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        return apply_color_lut(stored, dataset), None
    if stored.ndim == 3:
        return stored, None
    values = _to_modality_values(stored, dataset, frame)
    window = read_window(dataset, frame)
    if dataset.PhotometricInterpretation != "MONOCHROME1":
        return values, window

    low, high = _to_modality_values(
        _get_stored_range(dataset, stored.dtype), dataset, frame
    ).tolist()
    if window is not None:
        window = (low + high - window[1], low + high - window[0])
    return low + high - values, window


def read_window(dataset: Any, frame: int) -> Window | None:
    """Return black and white of the first window, by DICOM's linear function."""
    attributes = _get_frame_attributes(dataset, frame, "FrameVOILUTSequence")
    center = _first_number(attributes.get("WindowCenter"))
    width = _first_number(attributes.get("WindowWidth"))
    if center is None or width is None or width <= 1:
        return None
    if attributes.get("VOILUTFunction", "LINEAR") == "LINEAR_EXACT":
        return center - width / 2, center + width / 2
    return center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2


def _first_number(value: Any) -> float | None:
    """Return the first value; None if there is none."""
    if value is None or value == "":
        return None
    numbers = np.atleast_1d(np.array(value, float))
    return float(numbers[0]) if len(numbers) else None


def _read(file: Path | bytes, *, reads_pixels: bool) -> Any:
    if not has_pydicom():
        raise ValueError(NEEDS_PYDICOM)
    import pydicom

    source = io.BytesIO(file) if isinstance(file, bytes) else file
    dataset = pydicom.dcmread(source, stop_before_pixels=not reads_pixels)
    if "Rows" not in dataset:
        raise ValueError("a DICOM file without pixels")
    return dataset


def _check_size(dataset: Any) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and int(dataset.Rows) * int(dataset.Columns) > 2 * limit:
        raise Image.DecompressionBombError


def _count_frames(dataset: Any) -> int:
    return int(dataset.get("NumberOfFrames") or 1)


def _get_frame_attributes(dataset: Any, frame: int, sequence: str) -> Any:
    """Return the data set that holds the attributes of a frame.

    Enhanced DICOM files have them in sequences, for each frame or for all frames. Other files have
    them at the top.
    """
    frame_groups = dataset.get("PerFrameFunctionalGroupsSequence") or []
    shared_groups = dataset.get("SharedFunctionalGroupsSequence") or []
    for groups in (*frame_groups[frame : frame + 1], *shared_groups[:1]):
        if groups.get(sequence):
            return groups[sequence][0]
    return dataset


def _to_modality_values(stored: np.ndarray, dataset: Any, frame: int) -> np.ndarray:
    """Return values in the unit of the modality. Values that are not rescaled keep their type."""
    from pydicom.pixels import apply_modality_lut

    attributes = _get_frame_attributes(dataset, frame, "PixelValueTransformationSequence")
    if not _is_rescaled(attributes):
        return stored
    return apply_modality_lut(stored, attributes)


def _is_rescaled(attributes: Any) -> bool:
    """Return whether the values differ from the stored ones."""
    if attributes.get("ModalityLUTSequence"):
        return True
    slope = attributes.get("RescaleSlope")
    intercept = attributes.get("RescaleIntercept")
    if slope is None or intercept is None:
        return False
    return (float(slope), float(intercept)) != (1, 0)


def _get_stored_range(dataset: Any, dtype: np.dtype) -> np.ndarray:
    """Return the smallest and the largest value that the stored bits can have."""
    bits = int(dataset.BitsStored)
    if int(dataset.PixelRepresentation):
        return np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]).astype(dtype)
    return np.array([0, 2**bits - 1]).astype(dtype)


def _get_dtype(dataset: Any) -> np.dtype:
    """Return the type of the values that `read_dicom` returns."""
    bits = int(dataset.BitsAllocated)
    is_signed = bool(dataset.get("PixelRepresentation"))
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        bits = int(dataset.RedPaletteColorLookupTableDescriptor[2])
    elif int(dataset.get("SamplesPerPixel") or 1) == 1:
        attributes = _get_frame_attributes(dataset, 0, "PixelValueTransformationSequence")
        if _is_rescaled(attributes):
            return np.dtype(np.float64)
    if bits <= 8:
        return np.dtype(np.int8 if is_signed else np.uint8)
    return np.dtype(f"{'i' if is_signed else 'u'}{bits // 8}")
