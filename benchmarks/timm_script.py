"""timm's training script beside ours: the same weights, images, batch, epochs and augmentation, as
whole processes.

    git clone --branch v1.0.28 https://github.com/huggingface/pytorch-image-models timm
    pip install --target pillow 'pillow<13'      # timm's RandAugment raises under 13
    python benchmarks/timm_script.py speed    --timm timm --pillow pillow --images FOLDER --weights
    FILE.safetensors python benchmarks/timm_script.py accuracy --timm timm --pillow pillow --images
    FOLDER --weights FILE.safetensors

FOLDER has train/<class>/ and test/<class>/. `speed`: one epoch at 224 px with RandAugment, mixup
and erasing, seconds of the whole process. `accuracy`: three seeds, some epochs at 64 px with mixup
and erasing and without RandAugment, whose operations the two draw from different lists; the new
head starts at zero on both sides, as ours does, which timm needs told: by itself it starts far
above the loss of chance, and that costs it many points in so few epochs.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import goal_row, in_turns, median, output_of, paired_ratio, run_record, save

MODEL = "tf_efficientnet_lite0"
RATE, DECAY, SMOOTHING, MIXUP, ERASING = 1e-3, 0.05, 0.1, 0.2, 0.25
SPEED_GOAL = 1.5


class Work:
    """What both sides do: accuracy in percent after so many epochs."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.rand_augment = options.what == "speed"
        self.num_classes = sum(path.is_dir() for path in (options.images / "train").iterdir())

    def ours(self, seed: int) -> float:
        options = self.options
        pictures = (
            ["rand_augment", "augmentation.magnitude=27"] if self.rand_augment else ["resized_crop"]
        )  # of 30
        record = run_record(self.scratch / f"ours-{time.time_ns()}", [
            "data=image_folder", f"data.root={options.images}", f"data.image_size={options.size}",
            "data.val_fraction=0", f"data.global_batch_size={options.batch}",
            "model=timm", f"model.name={MODEL}.in1k", "model.pretrained=false", f"model.weights={options.weights}",
            f"augmentation={pictures[0]}", *pictures[1:],
            f"augmentation.mixup_alpha={MIXUP}", f"augmentation.erasing_prob={ERASING}",
            "optimizer=adamw", f"optimizer.lr={RATE}", f"optimizer.weight_decay={DECAY}", "optimizer.decay_norms=false",
            "scheduler=cosine", "scheduler.warmup_epochs=0", f"task.label_smoothing={SMOOTHING}",
            "trainer=cpu", f"trainer.max_epochs={options.epochs}", f"seed={seed}", *options.overrides,
        ])  # fmt: skip
        return 100 * record["metrics"]["test/acc"]

    def theirs(self, seed: int) -> float:
        options, name = self.options, str(time.time_ns())
        words: list[Any] = [
            "train.py", "--data-dir", options.images, "--train-split", "train", "--val-split", "test", "--model", MODEL,
            "--pretrained", "--pretrained-path", options.weights, "--num-classes", self.num_classes, "--device", "cpu",
            "--img-size", options.size, "--batch-size", options.batch, "--epochs", options.epochs, "--workers", 2,
            "--opt", "adamw", "--lr", RATE, "--weight-decay", DECAY, "--sched", "cosine", "--sched-on-updates",
            "--warmup-epochs", 0, "--smoothing", SMOOTHING, "--mixup", MIXUP, "--reprob", ERASING, "--remode", "const",
            "--train-interpolation", "bicubic", "--color-jitter", 0, "--seed", seed, "--head-init-scale", 0,
            "--output", self.scratch, "--experiment", name,
        ]  # fmt: skip
        words += ["--aa", "rand-m9-n2"] if self.rand_augment else []
        path = os.pathsep.join(map(str, filter(None, [options.pillow, options.timm])))
        output_of([sys.executable, *map(str, words)], env={"PYTHONPATH": path}, cwd=options.timm)
        rows = list(csv.DictReader((self.scratch / name / "summary.csv").open()))
        return float(rows[-1]["eval_top1"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "accuracy"))
    for name, text in (("timm", "a clone of its repository"), ("images", "train/<class>/ and test/<class>/"),
                       ("weights", f"ImageNet weights of {MODEL}")):  # fmt: skip
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    parser.add_argument("--pillow", type=Path, help="a folder with a Pillow that timm takes")
    parser.add_argument("--size", type=int, help="pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of our run")
    options = parser.parse_args()
    for name in ("timm", "images", "weights", "pillow"):
        setattr(options, name, (value := getattr(options, name)) and value.resolve())
    options.size = options.size or (224 if options.what == "speed" else 64)
    options.epochs = options.epochs or (1 if options.what == "speed" else 4)
    seconds: dict[str, list[float]] = {"ours": [], "timm": []}

    def timed(side: str, work: Any) -> float:
        began = time.perf_counter()
        accuracy = work(len(seconds[side]))
        seconds[side].append(time.perf_counter() - began)
        return accuracy

    with tempfile.TemporaryDirectory() as scratch:
        both = Work(options, Path(scratch))
        ours, theirs = in_turns(
            options.repetitions,
            lambda: timed("ours", both.ours),
            lambda: timed("timm", both.theirs),
        )
    images = options.epochs * sum(
        1 for path in (options.images / "train").rglob("*") if path.is_file()
    )
    rate = {side: round(images / median(values), 1) for side, values in seconds.items()}
    if options.what == "speed":
        ratio = paired_ratio(seconds["timm"], seconds["ours"])
        text = f"whole process from JPEG files at {options.size} px, images/s ÷ timm's script"
        detail = f"{images:,} images, ours {rate['ours']} images/s, timm's {rate['timm']}"
        goal = goal_row(text, f"≥ {SPEED_GOAL}", ratio, ratio >= SPEED_GOAL, detail=detail)
    else:
        apart, spread = abs(median(ours, 2) - median(theirs, 2)), max(theirs) - min(theirs)
        text = "fine-tuning, test accuracy apart from timm's script, medians of the seeds"
        detail = f"ours {ours}, timm's {theirs} %, spread {spread:.2f}; {options.epochs} epochs at {options.size} px"
        goal = goal_row(
            text,
            "within its spread",
            round(apart, 2),
            apart <= spread,
            unit="points",
            detail=detail,
        )
    save(
        f"timm_{options.what}",
        [goal],
        seconds=seconds,
        accuracies={"ours": ours, "timm": theirs},
        images=images,
    )


if __name__ == "__main__":
    main()
