"""Measure the input path on the CPU: images per second beside torchvision, and how long a training
step waits for images.

    python benchmarks/input_path.py --root FOLDER      # holds cifar-10-batches-py
    python benchmarks/input_path.py --images FOLDER    # holds train/<class>/ and test/<class>/ of
    JPEG files

--root: against torchvision's CIFAR10, transforms and DataLoader. Both sides read the same files,
draw at random, and give normalised float batches of 256. They take turns; torchvision runs with its
best number of workers. --images: photographs of some 500 x 400 pixels at 224 px, a random part of
each, mirrored; the share of a step that a run's record holds.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measuring import build_goal_row, measure_in_turns, median, paired_ratio, save, train_for_record

BATCH = 256
WORKERS = (0, 1, 2, 4)
# Each size in pixels has the seconds of its measurement.
SIZES = {32: 2.0, 224: 4.0}
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
MODELS = {"ViT-B/32": "vit_base_patch32_224", "EfficientNet-Lite0": "tf_efficientnet_lite0"}
WAIT_GOAL = 0.02
Batches = Callable[[], Iterator[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="folder that holds cifar-10-batches-py")
    parser.add_argument("--images", type=Path, help="folder that holds train/ and test/")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.root:
        compare(arguments.root, arguments.repetitions)
    if arguments.images:
        measure_wait(arguments.images.resolve())


def compare(root: Path, repetitions: int) -> None:
    # The best number of workers is measured here.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    goals = []
    figures = {}
    for size, seconds in SIZES.items():
        theirs = {workers: make_torchvision_batches(size, root, workers) for workers in WORKERS}
        trial = {
            workers: measure_images_per_s(batches, seconds) for workers, batches in theirs.items()
        }
        best = max(trial, key=trial.__getitem__)
        with tempfile.TemporaryDirectory() as scratch:
            ours, peer = measure_in_turns(
                repetitions,
                partial(measure_images_per_s, make_our_batches(size, root, scratch), seconds),
                partial(measure_images_per_s, theirs[best], seconds),
            )
        figures[f"{size} px"] = {"ours": ours, "torchvision": peer, "torchvision_by_workers": trial}
        what = f"input path ÷ torchvision at {size} px"
        detail = (
            f"{median(ours, 0):,.0f} images/s, torchvision {median(peer, 0):,.0f} with {best} "
            "workers"
        )
        goals.append(build_goal_row(what, "", paired_ratio(ours, peer), detail=detail))
    save("input_path", goals, batch=BATCH, images_per_s=figures)


def measure_wait(images: Path) -> None:
    """Measure the share of a step in which it waits for images."""
    goals = []
    figures = {}
    overrides = [
        "data=image_folder",
        f"data.root={images}",
        "data.path=loader",
        "data.val_fraction=0",
        "test=false",
        "data.global_batch_size=64",
        "model=timm",
        "model.pretrained=false",
        "augmentation=resized_crop",
        "optimizer=adamw",
        "trainer=cpu",
        "trainer.max_steps=20",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for label, name in MODELS.items():
            record = train_for_record(scratch, [*overrides, f"model.name={name}"])
            figures[name] = record["throughput"]
            share = figures[name]["data_wait_share"]
            goal = build_goal_row(
                f"{label} at 224 px from JPEG files: a step's wait for images",
                "≤ 2 %",
                round(100 * share, 2),
                share <= WAIT_GOAL,
                unit="%",
                detail="20 steps of 64 images",
            )
            goals.append(goal)
    save("loader_wait", goals, throughput=figures)


def measure_images_per_s(batches: Batches, seconds: float) -> float:
    """Return images per second over as many epochs as fit.

    The time of an epoch begins after its first batch, so that the start of the workers does not
    count.
    """
    images = 0
    elapsed = 0.0
    while elapsed < seconds:
        iterator = batches()
        next(iterator)
        start = time.perf_counter()
        for x, _ in iterator:
            assert x.shape[0] == BATCH
            images += BATCH
            if elapsed + time.perf_counter() - start > seconds:
                break
        elapsed += time.perf_counter() - start
    return images / elapsed


def make_our_batches(size: int, root: Path, scratch: str) -> Batches:
    from data.torchvision_sets import CIFAR10DataModule

    data = CIFAR10DataModule(
        root=root,
        cache_dir=scratch,
        image_size=size,
        crop_padding=4 if size == 32 else 0,
        flip=True,
        global_batch_size=BATCH,
        mean=MEAN,
        std=STD,
        num_val=1,
    )
    data.attach_to_ranks()
    loader: Any = data.train_dataloader()
    return lambda: (data.on_after_batch_transfer(batch, 0) for batch in loader)


def make_torchvision_batches(size: int, root: Path, workers: int) -> Batches:
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    first = transforms.RandomCrop(32, padding=4) if size == 32 else transforms.Resize(size)
    rest = [
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    images = CIFAR10(root, train=True, transform=transforms.Compose([first, *rest]))
    return lambda: iter(
        DataLoader(images, BATCH, shuffle=True, drop_last=True, num_workers=workers)
    )


if __name__ == "__main__":
    main()
