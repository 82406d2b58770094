"""Describe the images of a run before its first step: in the log, in run.json, and in a file of the run folder.

It finds images that occur twice: in two splits, or under two labels. `data` is a prepared ImageDataModule.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.listing import TEST, TRAIN, VAL
from lockstep.runs.files import write_atomically
from lockstep.runs.output import printable

log = logging.getLogger(__name__)

LISTS = "data_report.txt"
SHOWN_CLASSES = 10
MAX_COMPARED = 50_000  # files of equal size that a start may open
TILE = 128  # side of a picture in a contact sheet
IDENTICAL = {  # of several images, and of one
    "test images are identical to training images": "test image is identical to a training image",
    "validation images are identical to training images": "validation image is identical to a training image",
    "images occur under two labels": "image occurs under two labels",
}


def report_of(data: Any, *, compare_all: bool = False) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return `data_report` of the record, and the names of the images that it counts.

    Args:
        compare_all: look for identical files, however many have the same size.
    """
    identical, counts = data.identical_images(compare_all), data.counts_per_split
    sizes = ["×".join(map(str, size)) for size in sorted(data.image_sizes(), key=np.prod)]
    fields = {
        "images_per_class": {name: dict(zip(counts, each)) for name, *each in zip(data.class_names, *counts.values())},
        "left_out": {reason: len(names) for reason, names in data.left_out.items()},
        "identical_images": list(identical),
        "smallest_image": sizes[0] if sizes else None,
        "largest_image": sizes[-1] if sizes else None,
    }
    return fields, {**data.left_out, **identical}


def settings_of(data: Any, augmentation: str | None) -> dict[str, Any]:
    """Return `images` of the record: how images are resized, normalised and augmented."""
    path, why = data.path_taken()
    return {
        "path": path, "why": why, "augmentation": augmentation, "mean": data.mean, "std": data.std,
        "crop_pct": data.settings.crop_pct, "interpolation": data.framing.interpolation, "resize": data.framing.resize,
        "fit": data.framing.fit, "from_weights": list(data.settings.from_weights),
    }  # fmt: skip


def log_contents(data: Any, fields: Mapping[str, Any]) -> None:
    """Log classes and splits, and of `report_of` what was left out and which images are identical."""
    names = ", ".join(data.class_names[:SHOWN_CLASSES]) + (", …" if len(data.class_names) > SHOWN_CLASSES else "")
    what = {
        "class": f"{data.num_classes} classes: {names}", "labels": f"{data.num_classes} labels: {names}",
        "mask": f"masks of {data.num_classes} classes: {names}", "number": "a number for each image",
        "dict": "several targets for each image",
    }  # fmt: skip
    counts = f"{data.num_train} images to train, {data.num_val} to validate, {data.num_test} to test"
    if data.stage == "test":
        counts = f"testing on {'' if data.num_train or data.num_val else 'all '}{data.num_test} images"
    log.info(f"data: {what[data.target_kind]} · {counts}")
    for note in data.notes:
        log.info(note)
    if left_out := fields.get("left_out"):
        log.info(f"left out: {', '.join(f'{count} {reason}' for reason, count in left_out.items())} ({LISTS})")
    for sentence in fields.get("identical_images", ()):
        log.warning(f"{sentence} ({LISTS}).")


def log_settings(data: Any, augmentation: str | None) -> None:
    """Log how images are made, and warn about settings that the pretrained weights were not trained with.

    Args:
        augmentation: the option of a training; None for an evaluation.
    """
    path, why = data.path_taken()
    mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (data.mean, data.std))
    weights = f" · the weights say {', '.join(data.settings.from_weights)}" if data.settings.from_weights else ""
    changed = f" · augmentation={augmentation}" if augmentation else ""
    log.info(f"images: {path}, as {why}{changed} · mean {mean} · std {std}{weights}")
    for key in data.settings.against_weights:
        stated = f"data.{key}={getattr(data.settings, key)}"
        log.warning(f"{stated} is not what the pretrained weights were trained with: data.{key}=auto takes theirs.")


def write_lists(folder: Path, lists: Mapping[str, list[str]]) -> None:
    """Write the names of images that were left out or are identical, a line each, with the reason."""
    lines = [f"{name}  # {reason}\n" for reason, names in lists.items() for name in names]
    if lines:
        write_atomically(folder / LISTS, lambda file: file.writelines(lines))


def contact_sheet(path: Path, tiles: Sequence[tuple[list[Any], list[str], str]], columns: int) -> None:
    """Write a PNG of pictures with captions.

    Args:
        tiles: Pillow images that stand side by side, the lines of their caption, and the colour of its first line.
    """
    from PIL import Image, ImageDraw

    width, height = TILE * max(len(pictures) for pictures, _, _ in tiles) + 8, TILE + 40
    sheet = Image.new("RGB", (min(columns, len(tiles)) * width + 8, -(-len(tiles) // columns) * height + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (pictures, lines, colour) in enumerate(tiles):
        x, y = 8 + i % columns * width, 8 + i // columns * height
        for k, picture in enumerate(pictures):
            filter_ = Image.Resampling.NEAREST if max(picture.size) < TILE else Image.Resampling.BILINEAR
            sheet.paste(picture.convert("RGB").resize((TILE, TILE), filter_), (x + k * TILE, y))
        for k, line in enumerate(lines):
            text, fill = printable(line[: 20 * len(pictures)]), "#777777" if k else colour
            draw.text((x, y + TILE + 2 + 14 * k), text, fill)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def identical_images(
    data: Any, keys: np.ndarray, index: np.ndarray, content: Callable[[int], bytes], limit: int | None = None
) -> dict[str, list[str]]:
    """Return sentences on equal images, each with the pairs of images that it counts, "a = b".

    Args:
        keys: (n,) of any type; only images of equal keys are compared as a whole, and at most `limit` of them.
        index: (n,) the positions of the images.
    """
    _, of_key, counts = np.unique(keys, return_inverse=True, return_counts=True)
    index = index[counts[of_key] > 1]
    if limit is not None and len(index) > limit:
        too_many = "not checked for identical images (too many files of equal size): run `python src/check_data.py`"
        return {too_many: []}
    groups: dict[bytes, list[int]] = {}
    for i in index.tolist():
        groups.setdefault(hashlib.blake2b(content(i)).digest(), []).append(i)
    splits, label_of = data.splits.of_each, data.target_name
    pairs: list[list[tuple[int, int]]] = [[] for _ in IDENTICAL]
    test, val, two_labels = pairs
    for group in groups.values():
        trained = [i for i in group if splits[i] == TRAIN][:1]
        test += [(i, j) for j in trained for i in group if splits[i] == TEST]
        val += [(i, j) for j in trained for i in group if splits[i] == VAL]
        two_labels += [(group[0], i) for i in group if label_of(i) != label_of(group[0])][:1]
    found = {}
    for (several, one), some in zip(IDENTICAL.items(), pairs):
        if some:
            sentence = f"{len(some)} {several if len(some) > 1 else one}"
            found[sentence] = [f"{data.image_name(a)} = {data.image_name(b)}" for a, b in some]
    return found


def samples_of(images: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the middle row of each image, (n,) of one type of fixed size."""
    rows = np.ascontiguousarray(images[index, images.shape[1] // 2]).reshape(len(index), -1)
    return rows.view(f"V{rows.shape[1]}").ravel()
