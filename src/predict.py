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
from lockstep.runs.files import write_atomically
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.script import run_with_options

log = logging.getLogger(__name__)

OPTIONS: dict[str, str | None] = {
    "ckpt_path": None, "images": "", "out": "", "top": "1", "batch": "64", "log_dir": str(REPOSITORY / "logs"),
}  # fmt: skip
SHEET_IMAGES, UNSURE = 48, 0.5  # below this probability a caption is red
Row = dict[str, str | float]  # column → value


def predict(options: dict[str, str]) -> int:
    """Predict a folder of images into a CSV, or the run's own data into a .pt file."""
    from lockstep.data.listing import files_below
    from lockstep.training.inference import load_finished

    for key in ("top", "batch"):
        if not options[key].isdecimal() or int(options[key]) < 1:
            raise UserError(f"{key}={options[key]} must be a whole number from 1.")
    folder, left_out, names = Path(options["images"]), dict[str, list[str]](), list[str]()
    if options["images"]:
        if not folder.is_dir():
            raise UserError(f"images={folder} is not a folder. Pass the folder that contains the images.")
        names = [image.name for image in files_below(folder, left_out)]
        if not names:
            others = ", ".join(f"{len(found)} {reason}" for reason, found in left_out.items())
            raise UserError(f"images={folder} holds no image{f' (left out: {others})' if others else ''}.")
    model = load_finished(options["ckpt_path"], Path(options["log_dir"]))
    if not names:
        return predict_own_data(model, options, Path(options["out"] or "predictions.pt"))
    if "image_size" not in model.facts or "mean" not in model.facts:
        raise UserError("The run's data module does not define how images are made. Remove images= from the command.")
    out, batch = Path(options["out"] or "predictions.csv"), int(options["batch"])
    rows: dict[str, Row] = {}
    for start in range(0, len(names), batch):
        part = names[start : start + batch]
        rows |= predict_files(model, folder, part, out.with_name(f"{out.stem}_masks"), int(options["top"]))
    broken = [row["error"] for row in rows.values() if isinstance(row.get("error"), str)]  # a label may be named so
    if len(broken) == len(names):
        raise UserError(f"images={folder} holds no image that can be decoded: {broken[0]}.")
    columns = sorted(dict.fromkeys(key for row in rows.values() for key in row), key="error".__eq__)

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, ["file", *columns])
        writer.writeheader()
        for name, row in rows.items():
            shown = {key: f"{value:.6f}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({"file": name, **shown})

    write_atomically(out, write)
    log.info(f"{len(names)} images · {out}")
    if classified := [(folder / name, row) for name, row in rows.items() if "probability" in row][:SHEET_IMAGES]:
        write_sheet(out.with_suffix(".png"), classified)
    if broken:
        log.error(f"{len(broken)} of {len(names)} images cannot be decoded; {out} states why. The first: {broken[0]}")
    return EXIT_FAILED if broken else EXIT_OK


def predict_files(model: Any, folder: Path, names: list[str], masks: Path, top: int) -> dict[str, Row]:
    """Return the row of each file; its only column is `error` if it cannot be decoded."""
    import numpy as np
    import torch

    from lockstep.data.decoding import CorruptImage, open_image, pixels_of

    def decoded(name: str) -> Any:
        try:
            return pixels_of(model.framing.square(open_image(folder / name, model.framing.channels)))
        except CorruptImage as error:
            return {"error": str(error.args[0])}

    with ThreadPoolExecutor() as pool:
        found = dict(zip(names, pool.map(decoded, names), strict=True))
    if pixels := {name: each for name, each in found.items() if not isinstance(each, dict)}:
        outputs = model.predict(model.prepared(torch.from_numpy(np.stack(list(pixels.values())))))
        found |= dict(zip(pixels, rows_of(model, outputs, list(pixels), masks, top), strict=True))
    return found


def rows_of(model: Any, outputs: Any, names: list[str], masks: Path, top: int) -> list[Row]:
    """Return the row of each image from what predict_step returned for a batch; write masks as PNG files.

    Args:
        masks: the folder for them.
    Raises:
        UserError: the result is not a tensor of numbers, vectors or masks.
    """
    import torch
    from PIL import Image

    from lockstep.data.targets import grey_levels_of
    from tasks.classifier import ImageClassifier

    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else ()
    classes = [str(name) for name in model.facts.get("class_names") or ()]
    if isinstance(model.module, ImageClassifier):
        best, rows = outputs.topk(min(top, len(classes)), dim=1), list[Row]()
        for shares, places in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            rows.append({})
            for i, (share, place) in enumerate(zip(shares, places, strict=True), 1):
                end = f"_{i}" if i > 1 else ""
                rows[-1] |= {f"class{end}": classes[place], f"probability{end}": share}
        return rows
    if len(shape) == 1:
        return [{"value": value} for value in outputs.tolist()]
    if len(shape) == 2:
        columns = classes if len(classes) == shape[1] else [str(i) for i in range(shape[1])]
        return [dict(zip(columns, values, strict=True)) for values in outputs.tolist()]
    if len(shape) != 3 or outputs.is_floating_point():
        found = f"a tensor of the shape {shape}" if shape else f"a {type(outputs).__name__}"
        raise UserError(
            f"predict_step returns {found}, which is not a table: leave images= out, and out= is a .pt file."
        )
    levels = grey_levels_of(classes)
    if levels is not None:  # as in the masks that it was trained on
        outputs = torch.tensor(levels)[outputs.long().cpu()]
    paths = [masks / f"{name}.png" for name in names]  # a.jpg and a.png have a mask each
    for path, mask in zip(paths, outputs.to(torch.uint8).numpy(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path)
    return [{"mask": str(path)} for path in paths]


def write_sheet(path: Path, classified: list[tuple[Path, Row]]) -> None:
    """Draw images with their classes, and captions below UNSURE in red."""
    from lockstep.data.decoding import open_image
    from lockstep.data.report import contact_sheet

    tiles = [
        ([open_image(file, 3)], [f"{str(row['class'])[:16]} {row['probability']:.0%}", file.name],
         "black" if float(row["probability"]) >= UNSURE else "#c22745")
        for file, row in classified
    ]  # fmt: skip
    contact_sheet(path, tiles, columns=6)
    log.info(f"{path}: the first {len(tiles)} images; captions below {UNSURE:.0%} are red")


def predict_own_data(model: Any, options: dict[str, str], out: Path) -> int:
    """Save what predict_step returns for the batches of the run's data: predict_dataloader, else the test images."""
    import torch
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lockstep.training.inference import load_data

    if out.suffix != ".pt":
        raise UserError("images= is missing: a CSV is of a folder of images, and out=FILE.pt of the run's own data.")
    data = load_data(options["ckpt_path"], Path(options["log_dir"]))
    has_own = is_overridden("predict_dataloader", data)
    data.prepare_data()
    data.setup("predict" if has_own else "test")
    found = []
    with torch.inference_mode():
        for number, batch in enumerate(data.predict_dataloader() if has_own else data.test_dataloader()):
            ready = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
            found.append(model.module.predict_step(ready, number))
    write_atomically(out, lambda file: torch.save(found, file), binary=True)
    log.info(f"{len(found)} batches · {out}")
    return EXIT_OK


def main(argv: list[str]) -> int:
    return run_with_options(argv, __doc__ or "", OPTIONS, predict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
