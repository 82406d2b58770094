"""Compare timm's training script with ours, as whole processes.

Both have the same weights, images, batch, epochs and augmentation.

    git clone --branch v1.0.28 https://github.com/huggingface/pytorch-image-models timm
    pip install --target pillow 'pillow<13'      # timm's RandAugment raises under 13
    FILES="--timm timm --pillow pillow --images FOLDER --weights FILE.safetensors"
    python benchmarks/timm_script.py speed $FILES
    python benchmarks/timm_script.py accuracy $FILES

FOLDER has train/<class>/ and test/<class>/. `speed` measures the seconds of a whole process: one
epoch at 224 px with RandAugment, mixup and erasing. `accuracy` trains three seeds for some epochs at
64 px with mixup and erasing. It leaves RandAugment off, because the two projects draw its operations
from different lists. The new head starts at zero on both sides, which is our default and an option
of timm: timm's default starts far above the loss of chance, which costs many points in few epochs.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import (
    build_goal_row,
    measure_in_turns,
    median,
    paired_ratio,
    run_for_output,
    save,
    train_for_record,
)

MODEL = "tf_efficientnet_lite0"
RATE = 1e-3
DECAY = 0.05
SMOOTHING = 0.1
MIXUP = 0.2
ERASING = 0.25
SPEED_GOAL = 1.5


class Sides:
    """Train the same in both projects; each returns its accuracy in percent.

    Attributes:
        seconds: the times of the whole processes, by side.
    """

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.rand_augment = options.what == "speed"
        classes = [path for path in (options.images / "train").iterdir() if path.is_dir()]
        self.num_classes = len(classes)
        self.seconds: dict[str, list[float]] = {"ours": [], "timm": []}

    def run_ours(self) -> float:
        options = self.options
        augmentation = ["augmentation=resized_crop"]
        if self.rand_augment:
            # The magnitude is one of 30.
            augmentation = ["augmentation=rand_augment", "augmentation.magnitude=27"]
        overrides = [
            "data=image_folder",
            f"data.root={options.images}",
            f"data.image_size={options.size}",
            "data.val_fraction=0",
            f"data.global_batch_size={options.batch}",
            "model=timm",
            f"model.name={MODEL}.in1k",
            "model.pretrained=false",
            f"model.weights={options.weights}",
            *augmentation,
            f"augmentation.mixup_alpha={MIXUP}",
            f"augmentation.erasing_prob={ERASING}",
            "optimizer=adamw",
            f"optimizer.lr={RATE}",
            f"optimizer.weight_decay={DECAY}",
            "optimizer.decay_norms=false",
            "scheduler=cosine",
            "scheduler.warmup_epochs=0",
            f"task.label_smoothing={SMOOTHING}",
            "trainer=cpu",
            f"trainer.max_epochs={options.epochs}",
            f"seed={len(self.seconds['ours'])}",
            *options.overrides,
        ]
        began = time.perf_counter()
        record = train_for_record(self.scratch / f"ours-{time.time_ns()}", overrides)
        self.seconds["ours"].append(time.perf_counter() - began)
        return 100 * record["metrics"]["test/acc"]

    def run_theirs(self) -> float:
        options = self.options
        name = str(time.time_ns())
        arguments = {
            "--data-dir": options.images,
            "--train-split": "train",
            "--val-split": "test",
            "--model": MODEL,
            "--pretrained-path": options.weights,
            "--num-classes": self.num_classes,
            "--device": "cpu",
            "--img-size": options.size,
            "--batch-size": options.batch,
            "--epochs": options.epochs,
            "--workers": 2,
            "--opt": "adamw",
            "--lr": RATE,
            "--weight-decay": DECAY,
            "--sched": "cosine",
            "--warmup-epochs": 0,
            "--smoothing": SMOOTHING,
            "--mixup": MIXUP,
            "--reprob": ERASING,
            "--remode": "const",
            "--train-interpolation": "bicubic",
            "--color-jitter": 0,
            "--seed": len(self.seconds["timm"]),
            "--head-init-scale": 0,
            "--output": self.scratch,
            "--experiment": name,
        }
        if self.rand_augment:
            arguments["--aa"] = "rand-m9-n2"
        command = [sys.executable, "train.py", "--pretrained", "--sched-on-updates"]
        for flag, value in arguments.items():
            command += [flag, str(value)]
        folders = [options.timm]
        if options.pillow:
            folders.insert(0, options.pillow)
        environment = {"PYTHONPATH": os.pathsep.join(map(str, folders))}

        began = time.perf_counter()
        run_for_output(command, env=environment, cwd=options.timm)
        self.seconds["timm"].append(time.perf_counter() - began)
        rows = list(csv.DictReader((self.scratch / name / "summary.csv").open()))
        return float(rows[-1]["eval_top1"])


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory() as scratch:
        sides = Sides(options, Path(scratch))
        ours, theirs = measure_in_turns(options.repetitions, sides.run_ours, sides.run_theirs)
    files = [path for path in (options.images / "train").rglob("*") if path.is_file()]
    images = options.epochs * len(files)
    if options.what == "speed":
        goal = build_speed_goal(options, images, sides.seconds)
    else:
        goal = build_accuracy_goal(options, ours, theirs)
    accuracies = {"ours": ours, "timm": theirs}
    save(
        f"timm_{options.what}",
        [goal],
        seconds=sides.seconds,
        accuracies=accuracies,
        images=images,
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "accuracy"))
    paths = {
        "timm": "a clone of its repository",
        "images": "train/<class>/ and test/<class>/",
        "weights": f"ImageNet weights of {MODEL}",
    }
    for name, text in paths.items():
        parser.add_argument(f"--{name}", type=resolve_path, required=True, help=text)
    parser.add_argument(
        "--pillow", type=resolve_path, help="a folder with a Pillow that timm takes"
    )
    parser.add_argument("--size", type=int, help="pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of our run")
    options = parser.parse_args()
    options.size = options.size or (224 if options.what == "speed" else 64)
    options.epochs = options.epochs or (1 if options.what == "speed" else 4)
    return options


def resolve_path(path: str) -> Path:
    return Path(path).resolve()


def build_speed_goal(
    options: argparse.Namespace, images: int, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    rate = {side: round(images / median(values), 1) for side, values in seconds.items()}
    ratio = paired_ratio(seconds["timm"], seconds["ours"])
    what = f"whole process from JPEG files at {options.size} px, images/s ÷ timm's script"
    detail = f"{images:,} images, ours {rate['ours']} images/s, timm's {rate['timm']}"
    return build_goal_row(what, f"≥ {SPEED_GOAL}", ratio, ratio >= SPEED_GOAL, detail=detail)


def build_accuracy_goal(
    options: argparse.Namespace, ours: list[float], theirs: list[float]
) -> dict[str, Any]:
    distance = abs(median(ours, 2) - median(theirs, 2))
    spread = max(theirs) - min(theirs)
    what = "fine-tuning, test accuracy apart from timm's script, medians of the seeds"
    detail = (
        f"ours {ours}, timm's {theirs} %, spread {spread:.2f}; {options.epochs} epochs at "
        f"{options.size} px"
    )
    return build_goal_row(
        what,
        "within its spread",
        round(distance, 2),
        distance <= spread,
        unit="points",
        detail=detail,
    )


if __name__ == "__main__":
    main()
