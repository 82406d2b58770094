"""What a run says of its images: one line, warnings, fields of its record, and a list of what was skipped."""

import logging
from typing import Any

from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder

log = logging.getLogger(__name__)

SKIPPED = "skipped.txt"
SHOWN_CLASSES = 10


def record_fields(data: Any, augmentation: str | None) -> dict[str, Any]:
    """`images` of the record.

    Args:
        augmentation: the option that was chosen.
    """
    path, why = data.path_taken()
    return {
        "path": path,
        "why": why,
        "augmentation": augmentation,
        "mean": data.mean,
        "std": data.std,
        "crop_pct": data.settings.crop_pct,
        "interpolation": data.framing.interpolation,
        "resize": data.framing.resize,
        "fit": data.framing.fit,
        "from_weights": list(data.settings.from_weights),
        "skipped": len(data.skipped),
    }


def say(data: Any, augmentation: str | None) -> None:
    """Classes and splits, which path images take, how they are normalised; a warning of what weights do not want.

    Args:
        augmentation: the option of a training; None where nothing is trained.
    """
    names = ", ".join(data.class_names[:SHOWN_CLASSES]) + (", …" if len(data.class_names) > SHOWN_CLASSES else "")
    counts = f"{data.num_train} images to train, {data.num_val} to validate, {data.num_test} to test"
    if augmentation is None:
        whole = len(data.class_names) and data.num_test == data.num_images
        counts = f"testing on {'all ' if whole else ''}{data.num_test} images"
    log.info(f"data: {len(data.class_names)} classes: {names} · {counts}")
    path, why = data.path_taken()
    mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (data.mean, data.std))
    weights = f" · the weights say {', '.join(data.settings.from_weights)}" if data.settings.from_weights else ""
    changed = f" · augmentation={augmentation}" if augmentation else ""
    log.info(f"images: {path}, as {why}{changed} · mean {mean} · std {std}{weights}")
    for key in data.settings.against_weights:
        log.warning(
            f"data.{key}={getattr(data.settings, key)} is not what the pretrained weights were trained with: "
            f"data.{key}=auto takes theirs."
        )


def list_skipped(data: Any, folder: RunFolder) -> None:
    """Log what was left out and which images are identical, and list their names in the run folder."""
    for note in data.notes:
        log.info(note)
    if data.left_out:
        log.info(
            f"left out: {', '.join(f'{len(names)} {reason}' for reason, names in data.left_out.items())} ({SKIPPED})"
        )
    identical = data.identical_images()
    for sentence, pairs in identical.items():
        log.warning(f"{sentence}{f' ({SKIPPED})' if pairs else ''}.")
    parts = {**data.left_out, **identical}
    if any(parts.values()):
        lines = [f"{name}  # {reason}" for reason, names in parts.items() for name in names]
        write_atomically(folder.path / SKIPPED, lambda file: file.write("".join(f"{line}\n" for line in lines)))
