"""Check labelled images without training: skipped files, duplicates, images with two labels.

    python src/check_data.py data=image_folder data.root=DIR [key=value …] [--augmented]

It logs the same as a run, and finds near duplicates: pairs whose 8 × 8 grey thumbnails are far
more similar than those of the next similar images. The names and a contact sheet of suspicious
pairs are written to logs/check_data/<data.name>/; with --augmented also batch.png, training images
as the net sees them. The exit code is 1 if a test image is identical
to a training image, or if rows of a table cannot be used.
"""

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.commands.command_line import read_command, take_flag
from lockstep.config.schema import key_of
from lockstep.process.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.process.script import script
from lockstep.records.config import Config

if TYPE_CHECKING:
    from lockstep.data.report import Finding

log = logging.getLogger(__name__)

SIDE = 8  # pixels along each side of a thumbnail
NEIGHBOURS = 10
BLOCK_IMAGES = 1024  # images that are compared with all others at once
# A near duplicate is nearer than this share of the distance to the tenth neighbour. It finds 303 of
# CIFAR-10's test images; ciFAIR counts 325.
DISTANCE_RATIO = 0.3
LEAST_SIMILARITY = 0.9  # the least similarity of a pair
COPY_SIMILARITY = 0.9995  # above it a pair counts, however many copies there are
# Where there are more images, only those of validation and test are compared with all others.
MAX_COMPARED_IMAGES = 100_000
SHOWN_PAIRS = 40
Pair = tuple[int, int]  # positions of two images


def find_near_duplicates(thumbnail_pixels: np.ndarray, rows: np.ndarray) -> list[Pair]:
    """Return pairs of similar thumbnails, the most similar first.

    Args:
        thumbnail_pixels: (n, 64), zero-mean with norm 1.
        rows: the positions that are compared with all others.
    """
    import torch

    thumbnails = torch.from_numpy(thumbnail_pixels)
    distance_of: dict[Pair, float] = {}
    for start in range(0, len(rows), BLOCK_IMAGES):
        block = torch.from_numpy(rows[start : start + BLOCK_IMAGES])
        similarity = thumbnails[block] @ thumbnails.T
        # No image is its own neighbour.
        similarity[torch.arange(len(block)), block] = -1
        neighbours = similarity.topk(min(NEIGHBOURS, len(thumbnails) - 1), dim=1)
        distance = 1 - neighbours.values
        is_far_nearer = distance <= DISTANCE_RATIO * distance[:, -1:]
        stands_out = (neighbours.values >= LEAST_SIMILARITY) & is_far_nearer
        is_copy = neighbours.values >= COPY_SIMILARITY
        for row, number in (stands_out | is_copy).nonzero().tolist():
            first, second = sorted((int(block[row]), int(neighbours.indices[row, number])))
            distance_of[first, second] = float(distance[row, number])
    return sorted(distance_of, key=lambda pair: distance_of[pair])


@dataclass
class Thumbnails:
    """The size and the thumbnail of each image, and the images that are damaged."""

    # (n, 64) float32, zero-mean with norm 1; zeros where there is no contrast.
    pixels: np.ndarray
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width and height
    damaged: list[str] = field(default_factory=list)


def read_thumbnails(data: Any) -> Thumbnails:
    """Open all images of a prepared data module."""
    from PIL import Image

    from lockstep.data.decoding import CorruptImage, decode_all, get_size, to_pillow

    count = len(data.source)
    thumbnails = Thumbnails(np.zeros((count, SIDE * SIDE), np.float32))

    def read(i: int) -> None:
        try:
            image = data.source.open(i)[0]
        except CorruptImage as error:
            thumbnails.damaged.append(error.args[0])
            return
        thumbnails.sizes.append(get_size(image))
        small = to_pillow(image).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
        pixels = np.asarray(small, np.float32).ravel()
        scale = max(pixels.std() * SIDE, 1e-6)
        thumbnails.pixels[i] = (pixels - pixels.mean()) / scale

    decode_all(count, read)
    return thumbnails


@dataclass(frozen=True)
class Likeness:
    """The splits and labels of two nearly identical images.

    Args:
        splits: their names, each once.
    """

    splits: tuple[str, ...]
    has_one_label: bool

    @property
    def splits_text(self) -> str:
        return " and ".join(self.splits)

    @property
    def reason(self) -> str:
        labels = "same label" if self.has_one_label else "two labels"
        return f"nearly identical, {self.splits_text}, {labels}"

    @property
    def is_suspicious(self) -> bool:
        return not self.has_one_label or "test" in self.splits


def find_similar_pairs(data: Any, thumbnail_pixels: np.ndarray) -> dict[Pair, Likeness]:
    """Return the pairs of nearly identical images, the most similar first."""
    from lockstep.data.listing import SPLITS, TRAIN, VAL

    split_of = data.splits.split_ids
    least_split = TRAIN if len(thumbnail_pixels) <= MAX_COMPARED_IMAGES else VAL
    rows = np.flatnonzero(thumbnail_pixels.any(1) & (split_of >= least_split))
    likenesses = {}
    for i, j in find_near_duplicates(thumbnail_pixels, rows):
        if min(split_of[i], split_of[j]) < 0:
            continue
        splits = tuple(sorted({SPLITS[split_of[i]], SPLITS[split_of[j]]}))
        has_one_label = data.source.target_name(i) == data.source.target_name(j)
        likenesses[i, j] = Likeness(splits, has_one_label)
    return likenesses


def list_findings(data: Any, likenesses: Mapping[Pair, Likeness]) -> "list[Finding]":
    """Return the names of similar pairs, those of one kind together."""
    from lockstep.data.report import Finding, FindingKind

    names_of: dict[Likeness, list[str]] = {}
    for (i, j), likeness in likenesses.items():
        pair = f"{data.source.name(i)} = {data.source.name(j)}"
        names_of.setdefault(likeness, []).append(pair)
    return [Finding(FindingKind.SIMILAR, each.reason, names) for each, names in names_of.items()]


def draw_pairs(data: Any, likenesses: Mapping[Pair, Likeness], path: Path) -> None:
    """Draw the most suspicious pairs first: those of two labels, or with test images."""
    from lockstep.data.contact_sheet import Tile, write_contact_sheet

    suspicious = [pair for pair in likenesses if likenesses[pair].is_suspicious]
    harmless = [pair for pair in likenesses if not likenesses[pair].is_suspicious]
    tiles = []
    for pair in (suspicious + harmless)[:SHOWN_PAIRS]:
        labels = dict.fromkeys(data.source.target_name(i) for i in pair)
        caption = [likenesses[pair].splits_text, " | ".join(labels)]
        tiles.append(Tile([data.source.open(i)[0] for i in pair], caption))
    if tiles:
        write_contact_sheet(path, tiles, columns=4)


def draw_batch(data: Any, path: Path) -> None:
    """Draw the first training images of a prepared data module, augmented, with their targets."""
    from lockstep.data.pictures import MAX_SHEET_IMAGES, write_batch

    # Mixing takes images in pairs.
    data.global_batch_size = min(MAX_SHEET_IMAGES, data.num_train // 2 * 2)
    if not data.global_batch_size:
        log.info(f"{path.name} is not drawn: it takes two training images.")
        return
    data.attach_to_ranks()
    try:
        batch = next(iter(data.train_dataloader()))
    except UserError as error:
        # A damaged image is among those that have been listed.
        log.info(f"{path.name} is not drawn: {error}")
        return
    write_batch(path, data.on_after_batch_transfer(batch, 0), data)
    log.info(f"{path}: training images as the net sees them")


def log_report(data: Any, *, names_model: bool) -> "list[Finding]":
    """Log what a run says of its data, and return the images that it counts."""
    from lockstep.data import report

    findings = report.make_report(data, max_compared=None).findings
    report.log_classes(data)
    # Without a model of the user's there are no weights that say how images are normalised.
    if names_model:
        report.log_settings(data)
    elif data.depth_note:
        log.info(f"depth: {data.depth_note}")
    report.log_remarks(data)
    report.log_findings(findings)
    if data.faults:
        log.warning(f"{len(data.faults)} images cannot be used: {data.faults[0]}")
        findings.append(report.Finding(report.FindingKind.UNUSABLE, "cannot be used", data.faults))
    return findings


def log_images(thumbnails: Thumbnails) -> "list[Finding]":
    """Log the smallest and the largest image, and return those that are damaged."""
    from lockstep.data.report import Finding, FindingKind

    if thumbnails.sizes:
        smallest = min(thumbnails.sizes, key=np.prod)
        largest = max(thumbnails.sizes, key=np.prod)
        log.info(f"sizes: {smallest[0]}×{smallest[1]} to {largest[0]}×{largest[1]} px")
    if not thumbnails.damaged:
        return []
    log.warning(f"{len(thumbnails.damaged)} images are damaged: {thumbnails.damaged[0]}")
    return [Finding(FindingKind.DAMAGED, "damaged images", sorted(thumbnails.damaged))]


def log_pairs(findings: "Iterable[Finding]") -> None:
    """Log how many pairs of each kind are nearly identical."""
    for finding in sorted(findings, key=lambda finding: finding.reason):
        log.info(f"{finding.reason}: {len(finding.names)} pairs")


def list_data(config: Config) -> Any:
    """Return the data module of a config, which lists its images and decodes none.

    Raises:
        UserError: there is none.
    """
    from lockstep.training.build_data import build_prepared_data

    if config["choices"]["data"] == "none":
        module = config["task"]["_target_"]
        raise UserError(
            f"With data=none the images are in the loaders of {module}, where they cannot be "
            "listed. Pass data=image_folder data.root=DIR, or data=NAME."
        )
    options = {**config["data"], "global_batch_size": 1}
    if "path" in options:
        # The loader opens no image before it is needed.
        options["path"] = "loader"
    if "num_workers" in options:
        options["num_workers"] = 0
    return build_prepared_data(config, options, "check")


def check(config: Config, *, is_augmented: bool = False) -> int:
    """Check the data of a config, and return the exit code.

    Args:
        is_augmented: draw training images as the net sees them.
    """
    from lockstep.data.report import LISTS, FindingKind, write_findings

    data = list_data(config)
    groups = [key_of(override).partition(".")[0] for override in config["overrides"]]
    findings = log_report(data, names_model="model" in groups)
    thumbnails = read_thumbnails(data)
    findings += log_images(thumbnails)
    likenesses = find_similar_pairs(data, thumbnails.pixels)
    similar = list_findings(data, likenesses)
    log_pairs(similar)
    findings += similar

    name = str(config["data"].get("name") or "data")
    folder = Path(config["paths"]["log_dir"]) / "check_data" / name
    folder.mkdir(parents=True, exist_ok=True)
    # An earlier check may have been of other images.
    for file_name in (LISTS, "pairs.png", "batch.png"):
        (folder / file_name).unlink(missing_ok=True)
    write_findings(folder, findings)
    draw_pairs(data, likenesses, folder / "pairs.png")
    if is_augmented:
        draw_batch(data, folder / "batch.png")
    if any(finding.names for finding in findings):
        files = ", ".join(sorted(path.name for path in folder.iterdir()))
        log.info(f"{folder}: {files}")
    kinds = {finding.kind for finding in findings}
    return EXIT_FAILED if kinds & {FindingKind.TEST_IN_TRAIN, FindingKind.UNUSABLE} else EXIT_OK


@script
def main(argv: list[str]) -> int:
    overrides, is_augmented = take_flag(argv, "--augmented")
    config = read_command("train", overrides, __doc__ or "").compose()
    return check(config, is_augmented=is_augmented)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
