"""Images per second of the input path on the CPU against torchvision's CIFAR10, transforms and DataLoader.

    python benchmarks/input_path.py --root FOLDER      # holds cifar-10-batches-py

Both sides read the same files, draw at random, and give normalised float batches of 256. They take turns; torchvision
runs with its best number of workers.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measuring import goal_row, in_turns, median, paired_ratio, save

BATCH, WORKERS, SIZES = 256, (0, 1, 2, 4), {32: 2.0, 224: 4.0}  # pixels and the seconds of a measurement
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Batches = Callable[[], Iterator[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder that holds cifar-10-batches-py")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # the best number of workers is measured here
    goals, figures = [], {}
    for size, seconds in SIZES.items():
        theirs = {workers: torchvision_batches(size, arguments.root, workers) for workers in WORKERS}
        trial = {workers: images_per_s(batches, seconds) for workers, batches in theirs.items()}
        best = max(trial, key=trial.__getitem__)
        with tempfile.TemporaryDirectory() as scratch:
            sides = (our_batches(size, arguments.root, scratch), theirs[best])
            ours, peer = in_turns(arguments.repetitions, *(partial(images_per_s, side, seconds) for side in sides))
        figures[f"{size} px"] = {"ours": ours, "torchvision": peer, "torchvision_by_workers": trial}
        detail = f"{median(ours, 0):,.0f} images/s, torchvision {median(peer, 0):,.0f} with {best} workers"
        goals.append(goal_row(f"input path ÷ torchvision at {size} px", "", paired_ratio(ours, peer), detail=detail))
    save("input_path", goals, batch=BATCH, images_per_s=figures)


def images_per_s(batches: Batches, seconds: float) -> float:
    """Count from the first batch on, so that starting workers does not count; as many epochs as fit."""
    images, elapsed = 0, 0.0
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


def our_batches(size: int, root: Path, scratch: str) -> Batches:
    from data.cifar10 import CIFAR10DataModule

    data = CIFAR10DataModule(
        root=root, cache_dir=scratch, image_size=size, crop_padding=4 if size == 32 else 0, flip=True,
        global_batch_size=BATCH, mean=MEAN, std=STD, num_val=1,
    )  # fmt: skip
    data.place()
    loader: Any = data.train_dataloader()
    return lambda: (data.on_after_batch_transfer(batch, 0) for batch in loader)


def torchvision_batches(size: int, root: Path, workers: int) -> Batches:
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    first = transforms.RandomCrop(32, padding=4) if size == 32 else transforms.Resize(size)
    rest = [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    images = CIFAR10(root, train=True, transform=transforms.Compose([first, *rest]))
    return lambda: iter(DataLoader(images, BATCH, shuffle=True, drop_last=True, num_workers=workers))


if __name__ == "__main__":
    main()
