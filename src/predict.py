"""Predict with a trained model: a CSV with a row for each image, and a contact sheet of classes.

    python src/predict.py ckpt_path=<run_id | FILE | s3://…> images=<DIR | FILE | FILE,FILE,DIR>
        [out=predictions-<run_id>.csv] [top=1] [batch=<that of evaluation>] [overwrite=false]
        [trainer=gpu | cpu | ddp | …] [task.test_time_flip=true] [data.num_workers=auto]

    python src/predict.py ckpt_path=<run_id> [out=predictions-<run_id>.pt]

If the task takes numbers beside images, images= is a CSV file with the column path and the columns
of data.inputs. The second command predicts the predict_dataloader of the run's data module.

Without trainer= one GPU predicts, or the CPU if the machine has no GPU, in the precision of the
training. trainer=ddp predicts images on all GPUs (ddp_sim: on two CPU processes).

The task of the run decides what the CSV has: classes and probabilities, a column for each label, a
number, or the file of a mask. The contact sheet of a classifier is a PNG beside the CSV. It shows
the first images; captions below 50 % are red. An image that cannot be decoded has a row with the
reason, and the exit code is then 1. A .pt file holds a list of what predict_step returned; with
several loaders it is a list of such lists. A file that out= names is replaced only with
overwrite=true.
"""

import csv
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.keys import root_of
from lockstep.config.schema import key_of
from lockstep.process.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.process.files import write_atomically
from lockstep.process.output import join_names
from lockstep.process.project import REPOSITORY
from lockstep.process.script import is_true, run_with_options
from lockstep.ranks.failures import report_failure
from lockstep.ranks.find import Cluster, find_ranks
from lockstep.records.batch import DEFAULT_EVAL_BATCH_SIZE
from lockstep.records.config import Config

if TYPE_CHECKING:
    from lockstep.data.unlabelled import UnlabelledImages

log = logging.getLogger(__name__)

OPTIONS: dict[str, str | None] = {
    "ckpt_path": None,
    "images": "",
    "out": "",
    "top": "1",
    "batch": "",
    "overwrite": "false",
    "task.test_time_flip": "",
    "data.num_workers": "auto",
    "log_dir": str(REPOSITORY / "logs"),
}
SHEET_IMAGES = 48
SHEET_COLUMNS = 6
CAPTION_LENGTH = 16  # characters
# A caption below this probability is red.
UNSURE_BELOW = 0.5
RED = "#c22745"
# A message names at most this many files.
SHOWN_FILES = 3

# The value of each column.
Row = dict[str, str | float]


@dataclass(frozen=True)
class OutputPaths:
    """The files that one prediction writes."""

    table: Path

    @property
    def sheet(self) -> Path:
        return self.table.with_suffix(".png")

    @property
    def masks(self) -> Path:
        return self.table.with_name(f"{self.table.stem}_masks")


def predict(options: dict[str, str], overrides: list[str]) -> int:
    """Predict images into a CSV, or the run's own data into a .pt file.

    Args:
        overrides: those of trainer=; if there are none, one process predicts.
    """
    from lockstep.training.prediction import (
        prediction_config,
        prediction_ranks,
        start_prediction_ranks,
    )

    check_positive("top", options["top"])
    check_positive("batch", options["batch"] or "1")
    files = {} if is_table(options) else find_image_files(options["images"])
    refuse_existing_output(options)
    if options["images"] and Path(options["out"]).suffix in (".png", ".pt"):
        raise UserError(
            f"out={options['out']}: with images= it is a table, and its pictures lie beside it. "
            "Give a name that ends with .csv."
        )

    config = prediction_config(overrides)
    cluster = find_ranks(config)
    if cluster.world_size > 1 and not options["images"]:
        raise UserError(
            "images= is missing: only one process can predict the run's own data. Give images=, or "
            "leave trainer= out."
        )
    if cluster.starts_ranks:
        return start_prediction_ranks(config["trainer"], cluster)
    try:
        with prediction_ranks(config["trainer"], cluster) as device:
            return predict_on_rank(device, cluster, config, options, files)
    except Exception as error:
        if not cluster.has_agent:
            raise
        return report_failure(error, cluster, None)


def predict_on_rank(
    device: Any,
    cluster: Cluster,
    config: Config,
    options: dict[str, str],
    files: dict[str, Path],
) -> int:
    """Predict the images of this rank on its device. Rank 0 writes the results of all ranks."""
    from data.predicted import read_listed_images
    from lockstep.ranks.collectives import gather_objects
    from lockstep.training.inference import load_finished
    from lockstep.training.prediction import (
        PredictionProgress,
        Predictor,
        create_patient_group,
        set_device,
        set_test_time_flip,
    )

    model = load_finished(options["ckpt_path"], Path(options["log_dir"]))
    model.check_prediction()
    numbers: dict[str, dict[str, float]] = {}
    if is_table(options):
        files, numbers = read_listed_images(Path(options["images"]), model.facts.get("inputs", ()))
    elif files:
        refuse_missing_numbers(model)
    set_test_time_flip(model, options["task.test_time_flip"])
    predictor = Predictor(model, device, choose_precision(model, config))
    if not files:
        return predict_own_data(predictor, options)
    data = build_unlabelled_data(model, files, numbers, options)
    set_device(data, device, cluster.rank, cluster.world_size)
    paths = OutputPaths(Path(options["out"] or default_output_name(model, ".csv")))
    progress = PredictionProgress(len(files), cluster.world_size)
    top = int(options["top"])
    rows: dict[str, Row] = {}
    group = create_patient_group()
    rows_of_rank = predict_files(predictor, data, files, paths.masks, top, progress)
    for part in gather_objects(rows_of_rank, group):
        rows |= part
    if not cluster.is_rank_zero:
        return EXIT_OK
    rows = {name: rows[name] for name in files}
    return write_results(rows, files, paths, options["images"], reading_of_sheet(model))


def choose_precision(model: Any, config: Config) -> str:
    """Return trainer.precision, or the precision of the training if it is not given."""
    trained_with = (model.config.get("trainer") or {}).get("precision") or "auto"
    return str(config["trainer"]["precision"] or trained_with)


def build_unlabelled_data(
    model: Any,
    files: dict[str, Path],
    numbers: dict[str, dict[str, float]],
    options: dict[str, str],
) -> "UnlabelledImages":
    """Return the data module of images= for a finished model.

    Raises:
        UserError: the run does not say how files become images.
    """
    from lockstep.data.unlabelled import UnlabelledImages

    if "image_size" not in model.facts or "mean" not in model.facts:
        raise UserError(
            "The run's data module does not define how images are made. "
            "Remove images= from the command."
        )
    batch = options["batch"] or model.config["data"].get("eval_batch_size")
    return UnlabelledImages(
        list(files.values()),
        model.reading,
        model.framing,
        model.facts["std"],
        scales=model.facts.get("inputs"),
        numbers=[numbers.get(name, {}) for name in files],
        eval_batch_size=int(batch or DEFAULT_EVAL_BATCH_SIZE),
        num_workers=parse_workers(options["data.num_workers"]),
    )


def is_table(options: dict[str, str]) -> bool:
    """Return whether images= is a table of images with numbers beside them."""
    return Path(options["images"]).suffix.lower() == ".csv"


def parse_workers(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise UserError(f"data.num_workers={text} must be auto or a whole number.")
    return int(text)


def check_positive(option: str, text: str) -> None:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{option}={text} must be a whole number from 1.")


def refuse_existing_output(options: dict[str, str]) -> None:
    """Refuse to replace files that out= names, because they may be of another run.

    Without out= the name contains the run's id or the checkpoint's sha256, so the files are of the
    same run.
    """
    if is_true(options, "overwrite") or not options["out"]:
        return

    paths = OutputPaths(Path(options["out"]))
    for path in (paths.table, paths.sheet, paths.masks):
        if path.exists():
            raise UserError(
                f"{path} exists, and may be of another run: give another out=, or overwrite=true."
            )


def default_output_name(model: Any, suffix: str) -> str:
    """Return the name of the output, which has the run's id or the checkpoint's name."""
    return f"predictions-{model.name.replace('/', '_')}{suffix}"


def find_image_files(images: str) -> dict[str, Path]:
    """Return the images of images= by their names in the CSV; {} without images=.

    If images= is a single folder, names are relative to it. Otherwise they are as typed.

    Raises:
        UserError: there are no images, or a path is neither an image nor a folder.
    """
    if not images:
        return {}
    paths_of_images = _split_paths(images)
    files: dict[str, Path] = {}
    left_out: dict[str, list[str]] = {}
    for path in paths_of_images:
        for name, file in _find_images(path, left_out).items():
            files[name if len(paths_of_images) == 1 else str(file)] = file

    # As "5 .txt files (a.txt, b.txt, c.txt, …)".
    reasons = [
        f"{len(names)} {reason} ({join_names(names, SHOWN_FILES)})"
        for reason, names in left_out.items()
    ]
    if not files:
        others = f" (left out: {'; '.join(reasons)})" if reasons else ""
        raise UserError(f"images={images} holds no image{others}.")
    if reasons:
        log.info(f"left out: {'; '.join(reasons)}")
    return files


def _split_paths(images: str) -> list[Path]:
    """Return the paths between the commas, or a single path that exists and has commas in it."""
    if Path(images).exists():
        return [Path(images)]
    parts = [part.strip() for part in images.split(",")]
    return [Path(part).expanduser() for part in parts if part]


def _find_images(path: Path, left_out: dict[str, list[str]]) -> dict[str, Path]:
    """Return the images below a folder by their names in it. A file is one image."""
    if path.is_dir():
        return {name: path / name for name in _images_below(path, left_out)}
    if path.is_file():
        return {path.name: path}
    raise UserError(
        f"images={path} is not a folder or an image. "
        "Pass the folder that contains the images, or files with commas between them."
    )


def _images_below(folder: Path, left_out: dict[str, list[str]]) -> list[str]:
    from lockstep.data.listing import list_files

    return [image.name for image in list_files(folder, left_out)]


def refuse_missing_numbers(model: Any) -> None:
    """Refuse images without numbers for a task that takes numbers beside an image."""
    inputs = model.facts.get("inputs")
    if inputs:
        raise UserError(
            f"The task takes {', '.join(inputs)} beside an image. Pass images=FILE.csv with the "
            f"columns path, {', '.join(inputs)}, or leave images= out."
        )


def predict_files(
    predictor: Any,
    data: Any,
    files: dict[str, Path],
    masks: Path,
    top: int,
    progress: Any,
) -> dict[str, Row]:
    """Return the row of each file of this rank. A damaged file has only the column `error`."""
    names = list(files)
    loader = data.predict_dataloader()
    rows: dict[str, Row] = {}
    for number, outputs in enumerate(predictor.predictions(loader, data)):
        positions = loader.positions(number).tolist()
        is_damaged = data.source.is_damaged[positions].bool()
        if is_damaged.any() and hasattr(outputs, "shape"):
            outputs = outputs[~is_damaged]
        undamaged_names = []
        for position in positions:
            if data.source.is_damaged[position]:
                rows[names[position]] = {"error": data.source.explain_damage(position)}
            else:
                undamaged_names.append(names[position])
        predicted = prediction_rows(predictor.model, outputs, undamaged_names, masks, top)
        rows |= zip(undamaged_names, predicted, strict=True)
        progress.add(len(positions))
    return rows


def prediction_rows(model: Any, outputs: Any, names: list[str], masks: Path, top: int) -> list[Row]:
    """Return the row of each image of a batch. Masks are written as PNG files.

    Args:
        outputs: what predict_step returned for the batch.
        masks: the folder for the files of masks.

    Raises:
        UserError: the outputs are not a tensor of numbers, vectors or masks.
    """
    import torch

    from tasks.classifier import ImageClassifier

    classes = [str(name) for name in model.facts.get("class_names") or ()]
    if isinstance(model.module, ImageClassifier):
        return _rows_of_classes(outputs, classes, top)

    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else ()
    if len(shape) == 1:
        return [{"value": value} for value in outputs.tolist()]
    if len(shape) == 2:
        return _rows_of_vectors(outputs, classes)
    if len(shape) == 3 and not outputs.is_floating_point():
        return _rows_of_masks(outputs, classes, names, masks)

    kind = f"a tensor of the shape {shape}" if shape else f"a {type(outputs).__name__}"
    raise UserError(
        f"predict_step returns {kind}, which is not a table: "
        "leave images= out, and out= is a .pt file."
    )


def _rows_of_vectors(outputs: Any, classes: list[str]) -> list[Row]:
    """Return a column for each class, or numbered columns if there are more or fewer values."""
    columns = classes
    if len(classes) != outputs.shape[1]:
        columns = [str(i) for i in range(outputs.shape[1])]
    return [dict(zip(columns, values, strict=True)) for values in outputs.tolist()]


def _rows_of_classes(probabilities: Any, classes: list[str], top: int) -> list[Row]:
    """Return the `top` classes of each image, in the columns class, probability, class_2 …"""
    best = probabilities.topk(min(top, len(classes)), dim=1)
    rows = []
    for shares, numbers in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        row: Row = {}
        for place, (share, number) in enumerate(zip(shares, numbers, strict=True), start=1):
            suffix = f"_{place}" if place > 1 else ""
            row[f"class{suffix}"] = classes[number]
            row[f"probability{suffix}"] = share
        rows.append(row)
    return rows


def _rows_of_masks(outputs: Any, classes: list[str], names: list[str], masks: Path) -> list[Row]:
    """Write a mask for each image. The masks of a.jpg and a.png are a.jpg.png and a.png.png."""
    import torch
    from PIL import Image

    from lockstep.data.targets import find_grey_levels

    # The masks have the grey levels of the masks in training.
    levels = find_grey_levels(classes)
    if levels is not None:
        outputs = torch.tensor(levels)[outputs.long().cpu()]
    rows: list[Row] = []
    for name, mask in zip(names, outputs.to(torch.uint8).numpy(), strict=True):
        # The name may be a path that was typed, as /photos/a.jpg or ../a.jpg.
        parts = [part for part in Path(f"{name}.png").parts if part not in ("/", "..")]
        path = masks.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path)
        rows.append({"mask": str(path)})
    return rows


def reading_of_sheet(model: Any) -> Any:
    """Return the reading of files for the contact sheet: in colour, also if the net gets grey."""
    reading = model.reading
    if reading.channels == 1 and not reading.bands:
        return replace(reading, channels=3)
    return reading


def write_results(
    rows: dict[str, Row], files: dict[str, Path], paths: OutputPaths, images: str, reading: Any
) -> int:
    """Write and log the table and the contact sheet, and return the exit code.

    Args:
        reading: how the files become pixels.
    """
    # A label may have the name "error", but then its value is a number.
    errors = [row["error"] for row in rows.values() if isinstance(row.get("error"), str)]
    if len(errors) == len(rows):
        raise UserError(f"images={images} holds no image that can be decoded: {errors[0]}.")

    write_table(paths.table, rows)
    log.info(f"{len(rows)} images · {paths.table}")
    classified = [(files[name], row) for name, row in rows.items() if "probability" in row]
    if classified:
        write_sheet(paths.sheet, classified[:SHEET_IMAGES], reading)
    if not errors:
        return EXIT_OK
    log.error(
        f"{len(errors)} of {len(rows)} images cannot be decoded; "
        f"{paths.table} states why. The first: {errors[0]}"
    )
    return EXIT_FAILED


def write_table(path: Path, rows: dict[str, Row]) -> None:
    """Write the CSV, with the errors in its last column."""
    columns: dict[str, None] = {}
    for row in rows.values():
        columns |= dict.fromkeys(row)
    ordered = sorted(columns, key=lambda column: column == "error")

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, ["file", *ordered])
        writer.writeheader()
        for name, row in rows.items():
            cells = {column: _format_cell(value) for column, value in row.items()}
            writer.writerow({"file": name, **cells})

    write_atomically(path, write)


def _format_cell(value: str | float) -> str | float:
    if not isinstance(value, float):
        return value
    # Small numbers keep six digits, too.
    return f"{value:.6g}" if 0 < abs(value) < 0.1 else f"{value:.6f}"


def write_sheet(path: Path, classified: list[tuple[Path, Row]], reading: Any) -> None:
    """Draw images with their classes. Captions below the probability UNSURE_BELOW are red."""
    from lockstep.data.contact_sheet import Tile, write_contact_sheet

    tiles = []
    for file, row in classified:
        probability = float(row["probability"])
        caption = f"{str(row['class'])[:CAPTION_LENGTH]} {probability:.0%}"
        colour = "black" if probability >= UNSURE_BELOW else RED
        tiles.append(Tile([reading.open(file)], [caption, file.name], colour))
    write_contact_sheet(path, tiles, columns=SHEET_COLUMNS)
    log.info(f"{path}: the first {len(tiles)} images; captions below {UNSURE_BELOW:.0%} are red")


def predict_own_data(predictor: Any, options: dict[str, str]) -> int:
    """Save what predict_step returns for the batches of the run's data.

    The batches are those of predict_dataloader, or of the test images if there is none.
    """
    import torch

    from lockstep.training.inference import load_data
    from lockstep.training.own_loaders import predict_own_batches
    from lockstep.training.prediction import set_device

    out = Path(options["out"] or default_output_name(predictor.model, ".pt"))
    if out.suffix != ".pt":
        raise UserError(
            "images= is missing: a CSV needs a folder of images. Predictions of the run's own "
            "data go into out=FILE.pt."
        )

    data = None
    # With data=none the LightningModule has the loaders.
    if predictor.model.config["data"].get("_target_"):
        data = load_data(options["ckpt_path"], Path(options["log_dir"]))
        set_device(data, predictor.device)
    results = predict_own_batches(predictor, data)
    write_atomically(out, lambda file: torch.save(results, file), binary=True)
    log.info(f"the run's own data · {out}")
    return EXIT_OK


def main(argv: list[str]) -> int:
    overrides = [word for word in argv if root_of(key_of(word)) == "trainer"]
    others = [word for word in argv if word not in overrides]
    return run_with_options(
        others, __doc__ or "", OPTIONS, lambda options: predict(options, overrides)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
