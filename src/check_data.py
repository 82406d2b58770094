"""Check labelled images without training: skipped files, duplicates across splits, images with two labels.

    python src/check_data.py data=image_folder data.root=DIR [key=value …]

It logs the same as a run, and finds near duplicates: pairs whose 8 × 8 grey thumbnails are far more similar than those
of the next similar images. The names and a contact sheet of suspicious pairs are written to
logs/check_data/<data.name>/. The exit code is 1 if a test image is identical to a training image.
"""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.commands.command_line import run_script
from lockstep.config.compose import plain
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK

log = logging.getLogger(__name__)

SIDE, NEIGHBOURS = 8, 10
RATIO = 0.3  # of the distance to the tenth neighbour: finds 303 of CIFAR-10's test images, where ciFAIR counts 325
ALIKE, SAME = 0.9, 0.9995  # the least similarity of a pair; above the second it counts, however many copies there are
EVERY_PAIR = 100_000  # of more images, only those of validation and test are compared with all others
SHOWN_PAIRS = 40


def near_duplicates(thumbs: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs of `thumbs` (n, 64), zero-mean with norm 1, the most similar first; `rows` are compared with all."""
    import torch

    every, pairs = torch.from_numpy(thumbs), {}
    for start in range(0, len(rows), 1024):
        block = torch.from_numpy(rows[start : start + 1024])
        similar = every[block] @ every.T
        similar[torch.arange(len(block)), block] = -1
        best = similar.topk(min(NEIGHBOURS, len(every) - 1), dim=1)
        distance = 1 - best.values
        near = (best.values >= ALIKE) & (distance <= RATIO * distance[:, -1:]) | (best.values >= SAME)
        for row, place in near.nonzero().tolist():
            pair = sorted((int(block[row]), int(best.indices[row, place])))
            pairs[pair[0], pair[1]] = float(distance[row, place])
    return sorted(pairs, key=lambda pair: pairs[pair])


def check(cfg: Any) -> int:
    from PIL import Image

    from lockstep.data.decoding import CorruptImage, decode_all
    from lockstep.data.listing import SPLITS
    from lockstep.data.report import contact_sheet, log_contents, report_of, write_lists
    from lockstep.training.build_data import prepared_data

    config = plain(cfg)
    loader = {"path": "loader"} if "path" in config["data"] else {}  # which opens no image before it is needed
    data = prepared_data(config, {**config["data"], "global_batch_size": 1, **loader})
    _, lists = report_of(data, limit=None)
    log_contents(data, lists)
    opened, split_of, damaged, sizes = data.sample_opener(), data.splits.of_each, [], []
    thumbs = np.zeros((len(split_of), SIDE * SIDE), np.float32)

    def take(i: int) -> None:
        try:
            image = opened(i)[0]
        except CorruptImage as error:
            return damaged.append(error.args[0])
        sizes.append(image.size)
        pixels = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX), np.float32).ravel()
        thumbs[i] = (pixels - pixels.mean()) / max(pixels.std() * SIDE, 1e-6)

    decode_all(len(thumbs), take)
    if damaged:
        log.warning(f"{len(damaged)} images are damaged: {damaged[0]}")
        lists["damaged images"] = sorted(damaged)
    if sizes:
        smallest, largest = (choose(sizes, key=np.prod) for choose in (min, max))
        log.info(f"sizes: {smallest[0]}×{smallest[1]} to {largest[0]}×{largest[1]} px")
    rows = np.flatnonzero(thumbs.any(1) & (split_of >= (0 if len(thumbs) <= EVERY_PAIR else 1)))
    kinds: dict[tuple[int, int], str] = {}
    for i, j in near_duplicates(thumbs, rows):
        if min(split_of[i], split_of[j]) >= 0:
            splits = " and ".join(sorted({SPLITS[split_of[i]], SPLITS[split_of[j]]}))
            labels = "same label" if data.target_name(i) == data.target_name(j) else "two labels"
            kinds[i, j] = f"nearly identical, {splits}, {labels}"
            lists.setdefault(kinds[i, j], []).append(f"{data.image_name(i)} = {data.image_name(j)}")
    for kind in sorted(set(kinds.values())):
        log.info(f"{kind}: {len(lists[kind])} pairs")
    folder = Path(config["paths"]["log_dir"]) / "check_data" / str(config["data"].get("name") or "data")
    folder.mkdir(parents=True, exist_ok=True)
    write_lists(folder, lists)
    tiles = []
    for pair in sorted(kinds, key=lambda pair: "same label" in kinds[pair] and "test" not in kinds[pair])[:SHOWN_PAIRS]:
        names = [kinds[pair].split(", ")[1], " | ".join(dict.fromkeys(map(data.target_name, pair)))]
        tiles.append(([opened(i)[0] for i in pair], names, "black"))
    if tiles:
        contact_sheet(folder / "pairs.png", tiles, columns=4)
    if any(lists.values()):
        log.info(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return EXIT_FAILED if any(re.match("[0-9]+ test image", sentence) for sentence in lists) else EXIT_OK


def main(argv: list[str]) -> int:
    return run_script("train", argv, check, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
