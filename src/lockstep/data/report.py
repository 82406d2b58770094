"""Describe the images of a run before its first step: in the log, in run.json, and in a file of the run folder.

It finds images that occur twice: in two splits, or under two labels. `data` is a prepared ImageDataModule.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import CorruptImage
from lockstep.data.listing import TEST, TRAIN, VAL, counts_of
from lockstep.runs.files import write_atomically
from lockstep.runs.output import printable

log = logging.getLogger(__name__)

LISTS = "data_report.txt"
SHOWN_CLASSES, SAMPLE = 10, 64  # classes in the log; images that are opened for their size
MAX_COMPARED = 50_000  # files of equal size that a start may open
TILE = 128  # side of a picture in a contact sheet
IDENTICAL = (  # of one, and of several
    ("test image is identical to a training image", "test images are identical to training images"),
    ("validation image is identical to a training image", "validation images are identical to training images"),
    ("image occurs under two labels", "images occur under two labels"),
)


def report_of(data: Any, limit: int | None = MAX_COMPARED) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return `data_report` of the record, and the names of the images that it counts.

    Args:
        limit: the most files of equal size that are compared; None: all.
    """
    identical, counts = data.identical_images(limit), data.counts_per_split
    index, open_one, found = np.flatnonzero(data.splits.of_each >= 0), data.sample_opener(), []
    for place in np.linspace(0, len(index) - 1, min(len(index), SAMPLE)).astype(int):
        with suppress(CorruptImage, TypeError):  # which the loader names; five channels
            found.append(open_one(int(index[place]))[0].size)
    sizes = ["×".join(map(str, size)) for size in sorted(found, key=np.prod)]
    fields = {
        "images_per_class": {name: dict(zip(counts, each)) for name, *each in zip(data.class_names, *counts.values())},
        "left_out": {reason: len(names) for reason, names in data.left_out.items()},
        "identical_images": list(identical),
        "smallest_image": sizes[0] if sizes else None, "largest_image": sizes[-1] if sizes else None,
    }  # fmt: skip
    return fields, {**data.left_out, **identical}


def settings_of(data: Any, augmentation: str | None) -> dict[str, Any]:
    """Return `images` of the record: how images are resized, normalised and augmented."""
    path, why = data.path_taken()
    return {
        "path": path, "why": why, "augmentation": augmentation, "mean": data.mean, "std": data.std,
        "crop_pct": data.settings.crop_pct, "interpolation": data.framing.interpolation, "resize": data.framing.resize,
        "fit": data.framing.fit, "from_weights": list(data.settings.from_weights),
    }  # fmt: skip


def log_contents(data: Any, lists: Mapping[str, list[str]], augmentation: str | None = None) -> None:
    """Log classes and splits, how images are made, what was left out and which images are identical.

    Args:
        lists: as of `report_of`.
        augmentation: the option of a training; None for an evaluation.
    """
    names = ", ".join(data.class_names[:SHOWN_CLASSES]) + (", …" if len(data.class_names) > SHOWN_CLASSES else "")
    what = {"class": "classes", "labels": "labels", "mask": "classes of pixels"}.get(data.target_kind)
    what = f"{data.num_classes} {what}: {names}" if what else f"targets of the kind {data.target_kind}"
    counts = f"{data.num_train} images to train, {data.num_val} to validate, {data.num_test} to test"
    if data.stage == "test":
        counts = f"testing on {'' if data.num_train or data.num_val else 'all '}{data.num_test} images"
    log.info(f"data: {what} · {counts}")
    used = settings_of(data, augmentation)
    mean, std = (", ".join(f"{value:.3g}" for value in used[key]) for key in ("mean", "std"))
    weights = f" · the weights say {', '.join(used['from_weights'])}" if used["from_weights"] else ""
    changed = f" · augmentation={augmentation}" if augmentation else ""
    log.info(f"images: {used['path']}, as {used['why']}{changed} · mean {mean} · std {std}{weights}")
    if data.splits.note:
        log.info(data.splits.note)
    if data.left_out:
        log.info(f"left out: {counts_of(data.left_out)} ({LISTS})")
    for sentence in lists.keys() - data.left_out.keys():
        log.warning(f"{sentence} ({LISTS}).")


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
    data: Any, sizes: np.ndarray, index: np.ndarray, content: Callable[[int], bytes], limit: int | None
) -> dict[str, list[str]]:
    """Return sentences on equal images, each with the pairs of images that it counts, "a = b".

    Args:
        sizes: (n,) bytes; only images of one size are compared, and at most `limit` of them.
        index: (n,) the positions of the images.
    """
    _, of_size, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    index = index[counts[of_size] > 1]
    if limit is not None and len(index) > limit:
        too_many = "not checked for identical images (too many files of equal size): run `python src/check_data.py`"
        return {too_many: []}
    groups: dict[bytes, list[int]] = {}
    for i in index.tolist():
        groups.setdefault(hashlib.blake2b(content(i)).digest(), []).append(i)
    splits, label_of = data.splits.of_each, data.target_name
    kinds: list[list[tuple[int, int]]] = [[], [], []]
    for group in groups.values():
        trained = [i for i in group if splits[i] == TRAIN][:1]
        for found, split in zip(kinds, (TEST, VAL)):
            found += [(j, i) for i in trained for j in group if splits[j] == split]
        kinds[2] += [(group[0], i) for i in group if label_of(i) != label_of(group[0])][:1]
    sentences = {}
    for pairs, words in zip(kinds, IDENTICAL, strict=True):
        if pairs:
            sentence = f"{len(pairs)} {words[len(pairs) > 1]}"
            sentences[sentence] = [f"{data.image_name(a)} = {data.image_name(b)}" for a, b in pairs]
    return sentences
