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
from lockstep.runs.output import printable, set_up
from lockstep.runs.script import exit_code_of

log = logging.getLogger(__name__)

USAGE = "python src/predict.py ckpt_path=… images=DIR"
OPTIONS: dict[str, str | None] = {
    "ckpt_path": None, "images": None, "out": "predictions.csv", "top": "1", "batch": "64", "log_dir": "",
    "endpoint_url": "",
}  # fmt: skip
SHEET_COLUMNS, SHEET_IMAGES, TILE = 6, 48, 128
UNSURE = 0.5  # below it a caption is red
Answer = list[tuple[str, float]]  # (class, probability), the likeliest first


def image_files(folder: Path) -> list[Path]:
    """Return all images under `folder` in alphabetical order, without hidden files and folders.

    Raises:
        UserError: there is no such folder, or no image in it.
    """
    from lockstep.data.decoding import SUFFIXES

    if not folder.is_dir():
        raise UserError(f"images={folder} is not a folder. Pass the folder that contains the images.")
    found = [
        path for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file() and "/." not in f"/{path.relative_to(folder)}"
    ]  # fmt: skip
    if not found:
        raise UserError(f"images={folder} holds no image ({', '.join(sorted(SUFFIXES))}).")
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
            part = files[start : start + batch]
            pixels = dict(zip(part, pool.map(decoded, part), strict=True))
            found.update({path: reason for path, reason in pixels.items() if isinstance(reason, str)})
            good = [path for path in part if path not in found]
            if not good:
                continue
            shares = model.probabilities(model.prepared(torch.from_numpy(np.stack([pixels[path] for path in good]))))
            values, places = shares.topk(min(top, len(names)), dim=1)
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


def write_contact_sheet(path: Path, answers: dict[Path, Answer]) -> None:
    from PIL import Image, ImageDraw

    from lockstep.data.decoding import open_image

    rows, columns = -(-len(answers) // SHEET_COLUMNS), min(SHEET_COLUMNS, len(answers))
    sheet = Image.new("RGB", (columns * (TILE + 8) + 8, rows * (TILE + 40) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (file, [(label, share), *_]) in enumerate(answers.items()):
        x, y = 8 + i % SHEET_COLUMNS * (TILE + 8), 8 + i // SHEET_COLUMNS * (TILE + 40)
        picture = open_image(file, 3)
        small = max(picture.size) < TILE
        picture = picture.resize((TILE, TILE), Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR)
        sheet.paste(picture, (x, y))
        colour = "black" if share >= UNSURE else "#c22745"
        draw.text((x, y + TILE + 2), f"{printable(label[:16])} {share:.0%}", fill=colour)
        draw.text((x, y + TILE + 16), printable(file.name[:20]), fill="#777777")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def predict(argv: list[str]) -> int:
    from lockstep.runs.provenance import REPOSITORY
    from lockstep.training.inference import load_finished, read_words

    options = read_words(argv, OPTIONS, USAGE)
    for key in ("top", "batch"):
        if not options[key].isdecimal() or int(options[key]) < 1:
            raise UserError(f"{key}={options[key]} must be a whole number from 1.")
    folder, out = Path(options["images"]), Path(options["out"])
    files = image_files(folder)
    logs = Path(options["log_dir"] or REPOSITORY / "logs")
    model = load_finished(options["ckpt_path"], logs, {"endpoint_url": options["endpoint_url"] or None})
    found = classify(model, files, int(options["top"]), int(options["batch"]))
    broken = [answer for answer in found.values() if isinstance(answer, str)]
    if len(broken) == len(files):
        raise UserError(f"images={folder} holds no image that can be decoded: {broken[0]}.")
    write_csv(out, folder, found)
    shown = [(path, answer) for path, answer in found.items() if not isinstance(answer, str)][:SHEET_IMAGES]
    write_contact_sheet(out.with_suffix(".png"), dict(shown))
    red = sum(answer[0][1] < UNSURE for _, answer in shown)
    notes = [f"{red} captions in red: below {UNSURE:.0%}"] if red else []
    log.info(" · ".join([f"{len(files)} images", str(out), str(out.with_suffix(".png")), *notes]))
    if broken:
        log.error(f"{len(broken)} of {len(files)} images cannot be decoded; {out} says why. The first: {broken[0]}")
    return EXIT_FAILED if broken else EXIT_OK


def main(argv: list[str]) -> int:
    set_up()
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return EXIT_OK
    return exit_code_of(lambda: predict(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
