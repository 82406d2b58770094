"""Predict with a trained model: a CSV with a row for each image, of a classifier also a contact sheet.

    python src/predict.py ckpt_path=<run_id | FILE | s3://…> images=DIR [out=predictions.csv] [top=1] [batch=64]
    python src/predict.py ckpt_path=<run_id> [out=predictions.pt]      predict_dataloader of the run's data module

The CSV has classes and probabilities, a column for each label, a number, or the file of a mask, by the run's task. The
contact sheet, a PNG beside the CSV, shows the first images; captions below 50 % are red. An image that cannot be
decoded has a row with the reason, and the exit code is then 1. A .pt file holds what predict_step returned, as a list.
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
    "ckpt_path": None, "images": "", "out": "", "top": "1", "batch": "64",
    "log_dir": str(REPOSITORY / "logs"), "endpoint_url": "",
}  # fmt: skip
SHEET_IMAGES, UNSURE = 48, 0.5  # below this probability a caption is red
Row = dict[str, str | float]  # column → value


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


def predict_files(model: Any, files: list[Path], folder: Path, options: dict[str, str]) -> dict[Path, Row]:
    """Return the row of each file; its only column is `error` if it cannot be decoded."""
    import numpy as np
    import torch

    from lockstep.data.decoding import CorruptImage, decode

    def decoded(path: Path) -> np.ndarray | str:
        try:
            return decode(path, model.framing)
        except CorruptImage as error:
            return str(error)

    found: dict[Path, Row] = {}
    batch = int(options["batch"])
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), batch):
            pixels = dict(zip(files[start : start + batch], pool.map(decoded, files[start : start + batch])))
            found |= {path: {"error": reason} for path, reason in pixels.items() if isinstance(reason, str)}
            good = [path for path in pixels if path not in found]
            if good:
                images = torch.from_numpy(np.stack([pixels[path] for path in good]))
                outputs = model.predict(model.prepared(images))
                rows = rows_of(model, outputs, [path.relative_to(folder) for path in good], options)
                found |= dict(zip(good, rows, strict=True))
    return {path: found[path] for path in files}


def rows_of(model: Any, outputs: Any, names: list[Path], options: dict[str, str]) -> list[Row]:
    """Return the row of each image from what predict_step returned for a batch; write masks as PNG files.

    Raises:
        UserError: it is no tensor of numbers, vectors or masks.
    """
    import torch
    from PIL import Image

    from tasks.classifier import ImageClassifier

    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else ()
    classes = [str(name) for name in model.facts.get("class_names") or ()]
    if isinstance(model.module, ImageClassifier):
        values, places = outputs.topk(min(int(options["top"]), len(classes)), dim=1)
        rows: list[Row] = []
        for shares, indices in zip(values.tolist(), places.tolist(), strict=True):
            rows.append({})
            for i, (share, index) in enumerate(zip(shares, indices, strict=True), 1):
                end = f"_{i}" if i > 1 else ""
                rows[-1] |= {f"class{end}": classes[index], f"probability{end}": share}
        return rows
    if len(shape) == 1:
        return [{"value": value} for value in outputs.tolist()]
    if len(shape) == 2:
        columns = classes if len(classes) == shape[1] else [str(i) for i in range(shape[1])]
        return [dict(zip(columns, row, strict=True)) for row in outputs.tolist()]
    if len(shape) == 3 and not outputs.is_floating_point():
        rows = []
        for name, mask in zip(names, outputs.to(torch.uint8).numpy(), strict=True):
            path = (Path(options["out"]).with_suffix("") / name).with_suffix(".png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask).save(path)
            rows.append({"mask": str(path)})
        return rows
    found = f"a tensor of the shape {shape}" if shape else f"a {type(outputs).__name__}"
    raise UserError(f"predict_step returns {found}, which is no table: leave images= out, and out= is a .pt file.")


def write_csv(path: Path, folder: Path, found: dict[Path, Row]) -> None:
    """Write a row for each file, the column of errors last."""
    from lockstep.runs.files import write_atomically

    rows = [
        {"file": str(file.relative_to(folder))}
        | {key: f"{value:.6f}" if isinstance(value, float) else value for key, value in row.items()}
        for file, row in found.items()
    ]
    columns = sorted(dict.fromkeys(key for row in rows for key in row), key="error".__eq__)

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)

    write_atomically(path, write)


def predict(options: dict[str, str]) -> int:
    from lockstep.training.inference import load_finished

    for key in ("top", "batch"):
        if not options[key].isdecimal() or int(options[key]) < 1:
            raise UserError(f"{key}={options[key]} must be a whole number from 1.")
    folder, s3 = Path(options["images"]), {"endpoint_url": options["endpoint_url"] or None}
    files = image_files(folder) if options["images"] else []
    model = load_finished(options["ckpt_path"], Path(options["log_dir"]), s3)
    out = Path(options["out"] or ("predictions.csv" if files else "predictions.pt"))
    if not files and out.suffix != ".pt":
        raise UserError("images= is missing: a CSV is of a folder of images, and out=FILE.pt of the run's own data.")
    if not files:
        return predict_own_data(model, options, out)
    if "image_size" not in model.facts or "mean" not in model.facts:
        raise UserError("The run's data module does not say how images are made: leave images= out.")
    found = predict_files(model, files, folder, {**options, "out": str(out)})
    broken = [row["error"] for row in found.values() if "error" in row]
    if len(broken) == len(files):
        raise UserError(f"images={folder} holds no image that can be decoded: {broken[0]}.")
    write_csv(out, folder, found)
    words = [f"{len(files)} images", str(out)]
    classified = [(path, row) for path, row in found.items() if "probability" in row]
    if classified:
        words += write_sheet(out.with_suffix(".png"), classified)
    log.info(" · ".join(words))
    if broken:
        log.error(f"{len(broken)} of {len(files)} images cannot be decoded; {out} says why. The first: {broken[0]}")
    return EXIT_FAILED if broken else EXIT_OK


def write_sheet(path: Path, classified: list[tuple[Path, Row]]) -> list[str]:
    """Draw the first images with their classes; return what to log."""
    from lockstep.data.decoding import open_image
    from lockstep.data.report import contact_sheet

    tiles, red = [], 0
    for file, row in classified[:SHEET_IMAGES]:
        share = float(row["probability"])
        red += share < UNSURE
        caption = [f"{str(row['class'])[:16]} {share:.0%}", file.name]
        tiles.append(([open_image(file, 3)], caption, "black" if share >= UNSURE else "#c22745"))
    contact_sheet(path, tiles, columns=6)
    return [str(path), *([f"{red} captions in red: below {UNSURE:.0%}"] if red else [])]


def predict_own_data(model: Any, options: dict[str, str], out: Path) -> int:
    """Save what predict_step returns for the batches of the run's data: predict_dataloader, else the test images."""
    import torch
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lockstep.training.inference import load_data

    s3 = {"endpoint_url": options["endpoint_url"] or None}
    data = load_data(options["ckpt_path"], Path(options["log_dir"]), s3)
    has_own = is_overridden("predict_dataloader", data)
    data.prepare_data()
    data.setup("predict" if has_own else "test")
    found = []
    with torch.inference_mode():
        for number, batch in enumerate(data.predict_dataloader() if has_own else data.test_dataloader()):
            ready = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
            found.append(model.module.predict_step(ready, number))
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, out)
    log.info(f"{len(found)} batches · {out}")
    return EXIT_OK


def main(argv: list[str]) -> int:
    return run_with_options(argv, __doc__ or "", OPTIONS, predict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
