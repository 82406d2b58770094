"""The base of data modules that list their encoded images before reading them.

The images lie in files, tables or shards.
"""

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import decode_all, to_array
from lockstep.data.depth import (
    EXTREMES,
    HEADER_SAMPLE,
    MEASURED_IMAGES,
    Survey,
    describe_narrow_range,
    find_range,
    measure_colours,
    pick_evenly,
    write_extremes,
)
from lockstep.data.image_datamodule import CHECK, ImageDataModule
from lockstep.data.image_list import ImageList
from lockstep.data.listing import hash_json
from lockstep.data.node_cache import Metadata, load_or_build
from lockstep.data.reading import AUTO, BY_WINDOW, PICTURE, Range, Reading, parse_range
from lockstep.data.sampling import BY_CLASS
from lockstep.data.source import Source
from lockstep.data.targets import describe_grey_levels, find_levels, name_mask_classes
from lockstep.process.errors import UserError

CACHE_VERSION = 8
ARRAY_FILE = "images.npy"


class ListedDataModule(ImageDataModule):
    """Labelled images of any size, listed by the subclass.

    With path="array" each node decodes all images once into one array. With path="loader" an image
    is decoded when a batch needs it.

    Args:
        test_fraction: the share of all images that tests, if the source names no test split. Every
            seed has the same test images.
        fit: crop or squash, see Framing.
        group: a column of the table, or a regular expression on the path. Images with the same
            value stay in one split.
        splits: whether folders, files or a column name splits; auto: if they have such names.
        unknown: the number in several labels that means "not known" (nan in a batch); None: none.
        max_megapixels: the largest image that is decoded, in millions of pixels; None: Pillow's
            limit, 179.
        range, page, bands: see Reading, whose `value_range` is `range`. range="auto" stands for the
            windows of DICOM files, or else for the smallest and the largest value of the training
            images. Images of 8 bits have none.
        options: see ImageDataModule.
    """

    own_mean: Sequence[float] = (0.485, 0.456, 0.406)  # ImageNet statistics
    own_std: Sequence[float] = (0.229, 0.224, 0.225)
    # If the decoded images are larger, path="auto" chooses the loader.
    array_limit_gib = 16.0
    target_choices: tuple[str, ...] = ("class", "number")
    source: ImageList

    def __init__(
        self,
        *,
        image_size: int = 224,
        channels: int = 3,
        test_fraction: float = 0.1,
        fit: str = "crop",
        group: str | None = None,
        target: str = "class",
        splits: bool | str = "auto",
        unknown: float | None = None,
        max_megapixels: float | None = None,
        range: Sequence[float] | str | None = AUTO,
        page: int | str = 0,
        bands: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if target not in self.target_choices:
            raise UserError(
                f"data.target={target} must be one of {', '.join(self.target_choices)}."
            )
        if splits not in ("auto", True, False):
            raise UserError(f"data.splits={splits} must be one of auto, true, false.")
        if max_megapixels is not None and max_megapixels <= 0:
            raise UserError(f"data.max_megapixels={max_megapixels} must be positive, or null.")
        self.channels = channels
        self.fit = fit
        self.group = group
        self.target = target
        self.splits_option = splits
        self.unknown = unknown
        self.range_option = parse_range(range)
        self.reading = Reading(channels, None, page, tuple(bands or ()), max_megapixels)
        self.has_float_pixels = self.reading.has_float_pixels
        if channels == 1:
            self.own_mean = (0.449,)
            self.own_std = (0.226,)
        elif channels not in PICTURE:
            # Statistics of photographs do not fit. Measured ones replace these later.
            self.own_mean = (0.5,)
            self.own_std = (0.5,)
        super().__init__(image_size=image_size, **options)
        self.split_rule = replace(self.split_rule, test_fraction=test_fraction)

    @property
    def column_options(self) -> dict[str, str]:
        """Return the option that names each further column of numbers in a table."""
        options = {}
        if self.options.sampling not in (None, *BY_CLASS):
            options[self.options.sampling] = "sampling"
        return options | dict.fromkeys(self.options.inputs, "inputs")

    def list_images(self) -> ImageList:
        """Return all images with their labels, without opening any.

        Raises:
            UserError: there is nothing to list, or it does not fit together.
        """
        raise NotImplementedError

    def refuse_faults(self, faults: list[str], usable: Collection[Any], hint: str = "") -> None:
        """Refuse images that cannot be used. In a check collect them, as check_data.py lists all.

        Args:
            faults: a sentence for each such image.
            usable: the images that can be used.
            hint: a sentence on how to avoid the faults.

        Raises:
            UserError: there are faults, and this is no check or no image is usable.
        """
        if self.stage == CHECK and usable:
            self.faults += [f"{fault} {hint}".strip() for fault in faults]
        elif faults:
            sentences = [faults[0], hint]
            if len(faults) > 1:
                count = len(faults) - 1
                sentences.append(
                    f"{count} more cannot be used: `python src/check_data.py` lists them."
                )
            raise UserError(" ".join(filter(None, sentences)))

    def cache_folder(self, identity: Any) -> Path:
        """Return the folder in this node's cache for content that depends on `identity`.

        Args:
            identity: JSON values.
        """
        key = hash_json([CACHE_VERSION, type(self).__name__, identity])
        return self.cache_dir / f"{self.name}-{key[:16]}"

    def open_source(self) -> Source:
        images = self.list_images()
        images.reading = self.reading
        if self.unknown is not None and images.target_kind not in ("labels", "dict"):
            raise UserError(
                f"data.unknown={self.unknown} is for several labels of each image: give "
                "data.label_columns=[a,b], or leave it out."
            )
        return images

    def decode_source(self) -> None:
        """Decode all images on the array path, or find the classes of their masks.

        Each node does so once.
        """
        self._set_depth()
        images = self.source
        if images.mask_names:
            folder = self.cache_folder(["grey levels", images.identity])
            levels = load_or_build(folder, self._read_levels)["levels"]
            images.class_names = name_mask_classes(levels)
            images.warnings += describe_grey_levels(images.class_names)
        elif self.choose_path()[0] == "array":
            framing = self.framing
            decoding = [
                self.channels,
                framing.resize,
                framing.image_size,
                framing.fit,
                framing.interpolation,
                *self._identify_depth(),
            ]
            folder = self.cache_folder([images.identity, decoding])
            load_or_build(folder, self._write_array)
            images.pixels = [np.load(folder / ARRAY_FILE, mmap_mode="c")]

    def _set_depth(self) -> None:
        """Find the depth of the images. If they are deep, find their range, mean and deviation."""
        images = self.source
        everything = np.arange(len(images))
        is_check = self.stage == CHECK
        sampled = pick_evenly(everything, len(images) if is_check else HEADER_SAMPLE)
        survey = Survey.read_headers(images, sampled)
        images.warnings += survey.warnings()

        value_range = self.range_option
        if value_range == AUTO:
            value_range = self._choose_range(survey)
        elif value_range is not None and not survey.has_over_8_bits:
            images.warnings.append(
                f"data.range={value_range} changes nothing: the images have 8 bits, from 0 to 255."
            )
        self.reading = images.reading = replace(self.reading, value_range=value_range)
        self.has_float_pixels = self.reading.has_float_pixels
        self.depth_note = self._describe_depth(survey.depth)
        if self.has_float_pixels:
            self._measure_colours()

    def _choose_range(self, survey: Survey) -> Range:
        """Return black and white of data.range=auto."""
        if not survey.has_over_8_bits:
            return None
        return BY_WINDOW if survey.has_windows else self._measure_range()

    def _measure_range(self) -> Range:
        """Return the smallest and the largest value of the training images.

        Without training images it is that of all images.
        """
        images = self.source
        identity = ["extremes", images.identity, self.reading.facts, self.channels]
        if self.stage == CHECK:
            # This cache may lack images that cannot be read. A training must not find it.
            identity.append(CHECK)
        folder = self.cache_folder(identity)

        def write(folder: Path) -> Metadata:
            return write_extremes(images, folder, skips_damaged=self.stage == CHECK)

        has_all_images = not load_or_build(folder, write).get("unreadable")
        extremes = np.load(folder / EXTREMES)
        if not has_all_images:
            # The next check may be able to read the missing images, although no file has changed.
            shutil.rmtree(folder, ignore_errors=True)
        train = self.splits.train
        return find_range(extremes[train] if len(train) else extremes)

    def _identify_depth(self) -> list[Any]:
        """Return the options that deep pixels depend on.

        It is empty for pictures, so that caches of earlier versions still count.
        """
        if self.has_float_pixels or self.reading.page:
            return [self.reading.facts, self.channels]
        return []

    def _describe_depth(self, depth: str) -> str:
        """Return "16 bits, black 0 and white 4095 (data.range=auto, of the training images)".

        Args:
            depth: "16 bits".
        """
        note = depth
        value_range = self.reading.value_range
        if value_range == BY_WINDOW:
            return f"{note}, black and white by the window of each file"
        if isinstance(value_range, str):
            return f"{note}, black and white by each image (data.range={value_range})"
        if value_range is not None:
            note += f", black {value_range[0]:.6g} and white {value_range[1]:.6g}"
            if self.range_option == AUTO:
                note += " (data.range=auto, of the training images)"
        return note

    def _measure_colours(self) -> None:
        """Measure and set mean and deviation of deep images.

        The statistics of photographs do not fit them.
        """
        options = (self.options.mean, self.options.std)
        if self.stage == "test" and not any(value in (None, AUTO) for value in options):
            self._set_framing()
            return
        images = self.source
        positions = self._pick_measured_positions(MEASURED_IMAGES)
        identity = ["colours", images.identity, self._identify_depth(), positions]
        framing = self.framing
        folder = self.cache_folder([*identity, framing.resize, framing.fit, framing.interpolation])
        colours = load_or_build(folder, lambda _: measure_colours(images, positions, framing))
        self._set_colours(colours)

    def _pick_measured_positions(self, count: int) -> list[int]:
        """Return positions of at most `count` training images, or of any if none trains."""
        train = self.splits.train
        return pick_evenly(train if len(train) else np.arange(len(self.source)), count)

    def _set_colours(self, colours: Metadata) -> None:
        """Set the mean and the deviation that `measure_colours` returned."""
        self.own_mean = colours["mean"]
        self.own_std = colours["std"]
        self._set_framing()
        sentence = describe_narrow_range(colours["filled"], self.reading.value_range)
        if sentence:
            self.source.warnings.append(sentence)

    def _read_levels(self, _: Path) -> Metadata:
        """Return the grey levels in all masks."""
        levels: set[int] = set()

        def read(i: int) -> None:
            levels.update(find_levels([self.source.read_mask(i)]))

        decode_all(len(self.source), read)
        return {"levels": sorted(levels)}

    def _write_array(self, folder: Path) -> Metadata:
        """Decode all images into the array file in `folder`."""
        n = len(self.source)
        side = self.framing.resize
        path = folder / ARRAY_FILE
        shape = (n, side, side, self.channels)
        dtype = np.float32 if self.has_float_pixels else np.uint8
        out = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        # Without this allocation a full disk would kill the process at a write to the array.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, out.offset + out.nbytes)

        def decode_one(i: int) -> None:
            out[i] = to_array(self.framing.square(self.source.open(i)[0]))

        decode_all(n, decode_one)
        out.flush()
        return {}

    def choose_path(self) -> tuple[str, str]:
        path = self.options.path
        side = self.framing.resize
        if self.source.mask_names:
            return "loader", "masks are read with their images"
        if self._pipeline is not None and path != "loader":
            reason = (
                f"single images are augmented, and an array would hold them resized to {side} px"
            )
            if path == "array":
                raise UserError(f"data.path=array is not possible: {reason}. Set data.path=auto.")
            return "loader", reason
        gib = len(self.source) * side**2 * self.channels / 2**30
        if self.has_float_pixels:
            # A float has four bytes.
            gib *= 4
        if path == "auto" and gib > self.array_limit_gib:
            limit = f"the limit is {self.array_limit_gib:g} GiB"
            return "loader", f"the decoded images take {gib:.3g} GiB, {limit}"
        return super().choose_path()
