"""Describe the images of a run before its first step: in the log, in run.json and in a file.

The report names images that occur in two splits or under two labels. In all functions `data` is a
prepared ImageDataModule.
"""

import hashlib
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import CorruptImage, get_size
from lockstep.data.listing import TEST, TRAIN, VAL, describe_counts
from lockstep.data.source import Source
from lockstep.process.files import write_atomically
from lockstep.process.output import join_names

log = logging.getLogger(__name__)

LISTS = "data_report.txt"
SHOWN_CLASSES = 10  # in the log
# The images that are opened to measure their size.
SIZE_SAMPLE = 64
# The most files of equal size that the start of a run may read.
MAX_COMPARED = 50_000
NAME_OF_TARGETS = {"class": "classes", "labels": "labels", "mask": "classes of pixels"}


class FindingKind(Enum):
    """The reasons why images are listed."""

    LEFT_OUT = auto()
    # Images of a split that are identical to training images.
    TEST_IN_TRAIN = auto()
    VAL_IN_TRAIN = auto()
    # Identical images with two labels.
    TWO_LABELS = auto()
    NOT_COMPARED = auto()
    UNUSABLE = auto()
    DAMAGED = auto()
    SIMILAR = auto()


# The rest of the sentence after the number of images, for one image and for several.
IDENTICAL_PHRASES = {
    FindingKind.TEST_IN_TRAIN: (
        "test image is identical to a training image",
        "test images are identical to training images",
    ),
    FindingKind.VAL_IN_TRAIN: (
        "validation image is identical to a training image",
        "validation images are identical to training images",
    ),
    FindingKind.TWO_LABELS: ("image occurs under two labels", "images occur under two labels"),
}


@dataclass(frozen=True)
class Finding:
    """Images that are listed for one reason.

    Args:
        reason: a phrase for the log and the list.
        names: the images, or pairs of them as "a = b".
    """

    kind: FindingKind
    reason: str
    names: list[str]


@dataclass(frozen=True)
class Report:
    """The report on the images of a run.

    Args:
        fields: `data_report` of the record.
        findings: the images that the fields count.
    """

    fields: dict[str, Any]
    findings: list[Finding]


def make_report(data: Any, max_compared: int | None = MAX_COMPARED) -> Report:
    """Return the report on a run's images: their number, the ones left out, and repeated ones.

    Args:
        max_compared: the most files of equal size that are compared; None: all.
    """
    identical = find_identical_images(data, max_compared)
    sizes = _measure_sample(data)
    fields = {
        "images_per_class": _count_per_class(data),
        "left_out": {reason: len(names) for reason, names in data.left_out.items()},
        "identical_images": [finding.reason for finding in identical],
        "smallest_image": sizes[0] if sizes else None,
        "largest_image": sizes[-1] if sizes else None,
    }
    if data.groups_note:
        fields["groups"] = data.groups_note
    if data.inputs:
        fields["inputs"] = "; ".join(_describe_scales(data))
    if data.sampling_note:
        fields["sampling"] = data.sampling_note
    left_out = [Finding(FindingKind.LEFT_OUT, *entry) for entry in data.left_out.items()]
    return Report(fields, left_out + identical)


def _describe_scales(data: Any) -> list[str]:
    """Return "age: mean 61.2, deviation 9.4" for each number beside the images."""
    return [
        f"{name}: mean {mean:.6g}, deviation {std:.6g}" for name, (mean, std) in data.inputs.items()
    ]


def _count_per_class(data: Any) -> dict[str, dict[str, int]]:
    """Return the number of images in each split by class."""
    counts = data.counts_per_split
    classes = zip(data.class_names, *counts.values())
    return {name: dict(zip(counts, numbers)) for name, *numbers in classes}


def _measure_sample(data: Any) -> list[str]:
    """Return the sizes of some images as "width×height", the smallest first."""
    positions = np.flatnonzero(data.splits.split_ids >= 0)
    sampled = np.linspace(0, len(positions) - 1, min(len(positions), SIZE_SAMPLE)).astype(int)
    sizes = []
    for position in positions[sampled].tolist():
        # The loader will name a damaged image. Five channels raise a TypeError.
        with suppress(CorruptImage, TypeError):
            sizes.append(get_size(data.source.open(position)[0]))
    return ["×".join(map(str, size)) for size in sorted(sizes, key=np.prod)]


def collect_settings(data: Any, augmentation: str | None) -> dict[str, Any]:
    """Return the field `images` of the record: how they are resized, normalised and augmented."""
    path, why = data.choose_path()
    depth = {}
    if data.depth_note:
        depth = {"depth": data.depth_note, **data.source.reading.facts}
    return {
        "path": path,
        "why": why,
        "augmentation": augmentation,
        "mean": data.mean,
        "std": data.std,
        "crop_pct": data.normalisation.crop_pct,
        "interpolation": data.framing.interpolation,
        "resize": data.framing.resize,
        "fit": data.framing.fit,
        "from_weights": list(data.normalisation.from_weights),
        **depth,
        **data.target_scale,
    }


def log_contents(data: Any, augmentation: str | None = None) -> None:
    """Log classes and splits, how images are made, and what was left out.

    Args:
        augmentation: the option of a training; None: this is an evaluation.
    """
    log_classes(data)
    log_settings(data, augmentation)
    log_remarks(data)


def log_classes(data: Any) -> None:
    """Log the classes and the number of images in each split."""
    targets = f"targets of the kind {data.target_kind}"
    if data.target_kind in NAME_OF_TARGETS:
        names = join_names(data.class_names, SHOWN_CLASSES)
        targets = f"{data.num_classes} {NAME_OF_TARGETS[data.target_kind]}: {names}"
    if data.target_scale:
        mean, std = data.target_scale.values()
        targets = f"numbers, mean {mean:.6g} and deviation {std:.6g} of the training images"
    log.info(f"data: {targets} · {_describe_split_sizes(data)}")
    if data.inputs:
        log.info(f"inputs: images and numbers beside them · {' · '.join(_describe_scales(data))}")
    if data.sampling_note:
        log.info(f"sampling: {data.sampling_note}")


def _describe_split_sizes(data: Any) -> str:
    if data.stage == "test":
        others = data.num_train or data.num_val
        return f"testing on {'' if others else 'all '}{data.num_test} images"
    return f"{data.num_train} images to train, {data.num_val} to validate, {data.num_test} to test"


def log_settings(data: Any, augmentation: str | None = None) -> None:
    """Log how images are read, augmented and normalised."""
    settings = collect_settings(data, augmentation)
    parts = [f"images: {settings['path']}, as {settings['why']}"]
    if data.depth_note:
        parts.append(data.depth_note)
    if augmentation:
        parts.append(f"augmentation={augmentation}")
    for key in ("mean", "std"):
        parts.append(f"{key} " + ", ".join(f"{value:.3g}" for value in settings[key]))
    if settings["from_weights"]:
        parts.append(f"the weights say {', '.join(settings['from_weights'])}")
    log.info(" · ".join(parts))


def log_remarks(data: Any) -> None:
    """Log how the images are split, what was left out, and what is likely to be a mistake."""
    if data.splits.note:
        log.info(data.splits.note)
    if data.groups_note:
        log.info(f"groups: {data.groups_note}")
    if data.left_out:
        log.info(f"left out: {describe_counts(data.left_out)} ({LISTS})")
    for sentence in data.warnings:
        log.warning(sentence)


def log_findings(findings: Iterable[Finding]) -> None:
    """Log the findings, except for images left out, which `log_remarks` counts."""
    for finding in findings:
        if finding.kind is not FindingKind.LEFT_OUT:
            # A finding without names is not in the file of `write_findings`.
            file = f" ({LISTS})" if finding.names else ""
            log.warning(f"{finding.reason}{file}.")


def write_findings(folder: Path, findings: Iterable[Finding]) -> None:
    """Write a line with the name and the reason for each image of the findings."""
    lines: list[str] = []
    for finding in findings:
        lines += [f"{name}  # {finding.reason}\n" for name in finding.names]
    if lines:
        write_atomically(folder / LISTS, lambda file: file.writelines(lines))


def find_identical_images(data: Any, max_compared: int | None = MAX_COMPARED) -> list[Finding]:
    """Return the findings on equal images that are in two splits or under two labels.

    Args:
        max_compared: the most files of equal size that are compared; None: all.
    """
    source = data.source
    if not source.is_comparable:
        return []
    positions = np.flatnonzero(data.splits.split_ids >= 0)
    num_bytes = source.num_bytes[positions]
    _, size_group, counts = np.unique(num_bytes, return_inverse=True, return_counts=True)
    positions = positions[counts[size_group] > 1]
    if source.reads_files and max_compared is not None and len(positions) > max_compared:
        too_many = (
            "not checked for identical images (too many files of equal size): run "
            "`python src/check_data.py`"
        )
        return [Finding(FindingKind.NOT_COMPARED, too_many, [])]

    pairs: dict[FindingKind, list[str]] = {kind: [] for kind in IDENTICAL_PHRASES}
    for group in _group_equal_images(source, positions):
        _add_pairs(data, group, pairs)
    return [_make_finding(kind, names) for kind, names in pairs.items() if names]


def _make_finding(kind: FindingKind, names: list[str]) -> Finding:
    singular, plural = IDENTICAL_PHRASES[kind]
    count = len(names)
    return Finding(kind, f"{count} {plural if count > 1 else singular}", names)


def _group_equal_images(source: Source, positions: np.ndarray) -> list[list[int]]:
    """Return groups of images of equal content, two images or more in each.

    An image that cannot be read is in no group. The loader will name it.
    """
    groups: dict[bytes, list[int]] = {}
    for i in positions.tolist():
        with suppress(CorruptImage):
            groups.setdefault(hashlib.blake2b(source.read_bytes(i)).digest(), []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def _add_pairs(data: Any, group: list[int], pairs: dict[FindingKind, list[str]]) -> None:
    """Add the pairs among equal images that are in two splits or under two labels."""
    source = data.source
    splits = data.splits.split_ids
    training_images = [i for i in group if splits[i] == TRAIN]
    if training_images:
        for kind, split in ((FindingKind.TEST_IN_TRAIN, TEST), (FindingKind.VAL_IN_TRAIN, VAL)):
            others = [i for i in group if splits[i] == split]
            pairs[kind] += [f"{source.name(i)} = {source.name(training_images[0])}" for i in others]
    first = group[0]
    others = [i for i in group if source.target_name(i) != source.target_name(first)]
    if others:
        pairs[FindingKind.TWO_LABELS].append(f"{source.name(first)} = {source.name(others[0])}")
