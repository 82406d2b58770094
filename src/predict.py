"""Classify a folder of images with a trained model: a CSV of classes and probabilities, and a contact sheet.

    python src/predict.py ckpt_path=<run_id | FILE | s3://…> images=DIR [out=predictions.csv] [top=1] [batch=64]

The contact sheet, a PNG beside the CSV, shows the first images; captions below 50 % are red. An image that cannot be
decoded has a row with the reason, and the exit code is then 1.
"""

import csv
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.script import run_with_options

log = logging.getLogger(__name__)

OPTIONS: dict[str, str | None] = {
    "ckpt_path": None, "images": None, "out": "predictions.csv", "top": "1", "batch": "64",
    "log_dir": str(REPOSITORY / "logs"), "endpoint_url": "",
}  # fmt: skip
SHEET_IMAGES, UNSURE = 48, 0.5  # below this probability a caption is red
Answer = list[tuple[str, float]]  # (class, probability), the likeliest first


def image_files(folder: Path) -> list[Path]:
    """Return all images at any depth below `folder` in natural order, without hidden ones."""
    from lockstep.data.listing import images_below

    if not folder.is_dir():
        raise UserError(f"images={folder} is not a folder. Pass the folder that contains the images.")
    left_out: dict[str, list[str]] = {}
    found = [folder / image.name for image in images_below(folder, left_out)]
    if not found:
        others = ", ".join(f"{len(names)} {reason}" for reason, names in left_out.items())
        raise UserError(f"images={folder} holds no image{f' (left out: {others})' if others else ''}.")
    return found


def classify(model: Any, files: list[Path], top: int, batch: int) -> dict[Path, Answer | str]:
    """Return the `top` classes of each file, or the reason why it cannot be decoded."""
    import numpy as np
    import torch

    from lockstep.data.decoding import CorruptImage, decode

    def decoded(path: Path) -> np.ndarray | str:
        try:
            return decode(path, model.framing)
        except CorruptImage as error:
            return str(error)

    names = model.facts["class_names"]
    found: dict[Path, Answer | str] = {}
    with ThreadPoolExecutor() as pool, torch.inference_mode():
        for start in range(0, len(files), batch):
            pixels = dict(zip(files[start : start + batch], pool.map(decoded, files[start : start + batch])))
            found |= {path: reason for path, reason in pixels.items() if isinstance(reason, str)}
            good = [path for path in pixels if path not in found]
            if good:
                images = torch.from_numpy(np.stack([pixels[path] for path in good]))
                values, places = model.probabilities(model.prepared(images)).topk(min(top, len(names)), dim=1)
                for path, row, indices in zip(good, values.tolist(), places.tolist(), strict=True):
                    found[path] = [(names[i], value) for i, value in zip(indices, row, strict=True)]
    return {path: found[path] for path in files}


def write_csv(path: Path, folder: Path, found: dict[Path, Answer | str]) -> None:
    """Write a row for each file; an error column if a file cannot be decoded."""
    from lockstep.runs.files import write_atomically

    rows: list[dict[str, str]] = []
    for file, answer in found.items():
        rows.append({"file": str(file.relative_to(folder))})
        if isinstance(answer, str):
            rows[-1]["error"] = answer
            continue
        for i, (label, share) in enumerate(answer, 1):
            end = f"_{i}" if i > 1 else ""
            rows[-1] |= {f"class{end}": label, f"probability{end}": f"{share:.6f}"}
    columns = sorted(dict.fromkeys(key for row in rows for key in row), key="error".__eq__)  # error last

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)

    write_atomically(path, write)


def predict(options: dict[str, str]) -> int:
    from lockstep.data.decoding import open_image
    from lockstep.data.report import contact_sheet
    from lockstep.training.inference import load_finished

    for key in ("top", "batch"):
        if not options[key].isdecimal() or int(options[key]) < 1:
            raise UserError(f"{key}={options[key]} must be a whole number from 1.")
    folder, out = Path(options["images"]), Path(options["out"])
    files = image_files(folder)
    s3 = {"endpoint_url": options["endpoint_url"] or None}
    model = load_finished(options["ckpt_path"], Path(options["log_dir"]), s3)
    found = classify(model, files, int(options["top"]), int(options["batch"]))
    broken = [answer for answer in found.values() if isinstance(answer, str)]
    if len(broken) == len(files):
        raise UserError(f"images={folder} holds no image that can be decoded: {broken[0]}.")
    write_csv(out, folder, found)
    shown = [(path, answer[0]) for path, answer in found.items() if not isinstance(answer, str)][:SHEET_IMAGES]
    tiles = [
        ([open_image(path, 3)], [f"{label[:16]} {share:.0%}", path.name], "black" if share >= UNSURE else "#c22745")
        for path, (label, share) in shown
    ]
    contact_sheet(out.with_suffix(".png"), tiles, columns=6)
    red = sum(share < UNSURE for _, (_, share) in shown)
    notes = [f"{red} captions in red: below {UNSURE:.0%}"] if red else []
    log.info(" · ".join([f"{len(files)} images", str(out), str(out.with_suffix(".png")), *notes]))
    if broken:
        log.error(f"{len(broken)} of {len(files)} images cannot be decoded; {out} says why. The first: {broken[0]}")
    return EXIT_FAILED if broken else EXIT_OK


def main(argv: list[str]) -> int:
    return run_with_options(argv, __doc__ or "", OPTIONS, predict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
