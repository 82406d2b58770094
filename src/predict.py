"""Classify a folder of images with a trained model: a CSV of classes and probabilities, and a contact sheet.

    python src/predict.py ckpt_path=<run_id | FILE | s3://…> images=DIR [out=predictions.csv] [top=1] [batch=64]

The contact sheet, the first images with what they were taken for, lies beside the CSV as a PNG; there what is below
50 % is red.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import csv
import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.runs.errors import EXIT_OK, UserError
from lockstep.runs.output import printable, set_up
from lockstep.runs.script import exit_code_of

log = logging.getLogger(__name__)

USAGE = "python src/predict.py ckpt_path=… images=DIR"
OPTIONS: dict[str, str | None] = {
    "ckpt_path": None, "images": None, "out": "predictions.csv", "top": "1", "batch": "64", "log_dir": "",
    "endpoint_url": "",
}  # fmt: skip
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
SHEET_COLUMNS, SHEET_IMAGES, TILE = 6, 48, 128
UNSURE = 0.5  # below it a caption is red


def image_files(folder: Path) -> list[Path]:
    """All images under `folder`, in alphabetical order.

    Raises:
        UserError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise UserError(f"images={folder} is no folder.")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise UserError(f"images={folder} holds no image ({', '.join(sorted(SUFFIXES))}).")
    return found


def positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name}={text} must be a whole number from 1.")
    return int(text)


def classify(model: Any, files: list[Path], top: int, batch: int) -> list[list[tuple[str, float]]]:
    """For each file its `top` classes with their probabilities, the likeliest first.

    Raises:
        UserError: a file that cannot be decoded, named.
    """
    import numpy as np
    import torch

    from lockstep.data.image_tree import CorruptImage, decode

    names, found = model.facts["class_names"], []
    for start in range(0, len(files), batch):
        try:
            pixels = [decode(path, model.framing) for path in files[start : start + batch]]
        except CorruptImage as error:
            raise UserError(f"{error}; take it out of the folder.") from None
        with torch.inference_mode():
            shares = model.probabilities(model.prepared(torch.from_numpy(np.stack(pixels))))
        values, places = shares.topk(min(top, len(names)), dim=1)
        for row, indices in zip(values.tolist(), places.tolist(), strict=True):
            found.append([(names[i], value) for i, value in zip(indices, row, strict=True)])
    return found


def write_csv(path: Path, folder: Path, files: list[Path], found: list[list[tuple[str, float]]]) -> None:
    from lockstep.runs.csv_files import guarded
    from lockstep.runs.files import write_atomically

    head = ["file", "class", "probability"]
    head += [name for i in range(2, len(found[0]) + 1) for name in (f"class_{i}", f"probability_{i}")]

    def write(file: Any) -> None:
        writer = csv.writer(file)
        writer.writerow(head)
        for name, classes in zip(files, found, strict=True):
            cells = [cell for label, share in classes for cell in (label, f"{share:.6f}")]
            writer.writerow(map(guarded, [str(name.relative_to(folder)), *cells]))

    write_atomically(path, write)


def write_contact_sheet(path: Path, files: list[Path], found: list[list[tuple[str, float]]]) -> None:
    from PIL import Image, ImageDraw

    from lockstep.data.image_tree import open_image

    shown = list(zip(files, found, strict=True))[:SHEET_IMAGES]
    rows = -(-len(shown) // SHEET_COLUMNS)
    columns = min(SHEET_COLUMNS, len(shown))
    sheet = Image.new("RGB", (columns * (TILE + 8) + 8, rows * (TILE + 40) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (file, classes) in enumerate(shown):
        x, y = 8 + i % SHEET_COLUMNS * (TILE + 8), 8 + i // SHEET_COLUMNS * (TILE + 40)
        picture = open_image(file, 3)
        small = max(picture.size) < TILE
        picture = picture.resize((TILE, TILE), Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR)
        sheet.paste(picture, (x, y))
        label, share = printable(classes[0][0][:16]), classes[0][1]
        draw.text((x, y + TILE + 2), f"{label} {share:.0%}", fill="black" if share >= UNSURE else "#c22745")
        draw.text((x, y + TILE + 16), printable(file.name[:20]), fill="#777777")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def predict(argv: list[str]) -> None:
    from lockstep.runs.provenance import REPOSITORY
    from lockstep.training.inference import load_finished, read_words

    options = read_words(argv, OPTIONS, USAGE)
    top, batch = positive("top", options["top"]), positive("batch", options["batch"])
    folder, out = Path(options["images"]), Path(options["out"])
    files = image_files(folder)
    logs = Path(options["log_dir"] or REPOSITORY / "logs")
    model = load_finished(options["ckpt_path"], logs, {"endpoint_url": options["endpoint_url"] or None})
    found = classify(model, files, top, batch)
    write_csv(out, folder, files, found)
    write_contact_sheet(out.with_suffix(".png"), files, found)
    red = sum(classes[0][1] < UNSURE for classes in found[:SHEET_IMAGES])
    words = [f"{red} captions in red: below {UNSURE:.0%}"] if red else []
    log.info(" · ".join([f"{len(files)} images", str(out), str(out.with_suffix(".png")), *words]))


def main(argv: list[str]) -> int:
    set_up()
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return EXIT_OK
    return exit_code_of(lambda: predict(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
