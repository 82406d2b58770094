"""Images per second of the whole input path against torchvision's CIFAR10 + transforms + DataLoader.

    python benchmarks/input_path.py                    # made-up images in CIFAR-10's layout: nothing is downloaded
    python benchmarks/input_path.py --root FOLDER      # the real ones (holds cifar-10-batches-py)

Both sides read the same files, draw at random, and give normalised float batches of 256 on the CPU. Repetitions
alternate, so that what else the machine does hits both; torchvision runs with its best worker count. The results go
to benchmarks/results/input_path.json.
"""

import argparse
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from measuring import goal_row, save

BATCH = 256
WORKERS = (0, 1, 2, 4)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Case:
    """required: how many times as fast the input path must be."""

    name: str
    image_size: int
    crop_padding: int
    required: float
    seconds: float  # of each measurement


CASES = (
    Case("32 px: crop with border 4, flip, normalise", 32, 4, 60, 2.0),
    Case("224 px: resize, flip, normalise", 224, 0, 10, 4.0),
    Case("96 px: resize, flip, normalise", 96, 0, 7, 3.0),
    Case("160 px: resize, flip, normalise", 160, 0, 7, 3.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder that holds cifar-10-batches-py; default: made-up images")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, help="torch's threads in the main process; default: one per core")
    arguments = parser.parse_args()
    import torch

    warnings.filterwarnings("ignore", "This DataLoader will create")  # that it is too many is for us to find out
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.root or write_made_up(Path(scratch))
        results = [measure(case, root, Path(scratch), arguments.repetitions) for case in CASES]
    goals = [
        goal_row(3, f"input path ÷ torchvision at {case.image_size} px", f"≥ {case.required:g}", result["ratio"],
                 result["ratio"] >= case.required, detail=f"{result['images_per_s']:,} images/s on the CPU")
        for case, result in zip(CASES, results, strict=True) if case.image_size in (32, 224)
    ]  # fmt: skip
    images = "CIFAR-10" if arguments.root else "random bytes in CIFAR-10's layout"
    save("input_path", goals, batch=BATCH, threads=torch.get_num_threads(), images=images, cases=results)


def measure(case: Case, root: Path, scratch: Path, repetitions: int) -> dict:
    theirs = {workers: torchvision_batches(case, root, workers) for workers in WORKERS}
    trial = {workers: images_per_s(batches, case.seconds) for workers, batches in theirs.items()}
    best = max(trial, key=trial.get)
    ours = our_batches(case, root, scratch)
    images_per_s(ours, 0.5)
    pairs = []
    for _ in range(repetitions):
        pairs.append((images_per_s(ours, case.seconds), images_per_s(theirs[best], case.seconds)))
    speed, baseline = (statistics.median(column) for column in zip(*pairs))
    ratio = statistics.median(a / b for a, b in pairs)
    ratio_of_best = max(a for a, _ in pairs) / max(b for _, b in pairs)  # where something else takes the machine's time
    error = largest_difference(case, root, scratch)
    print(
        f"{case.name:45s} {speed:10,.0f} images/s, torchvision {baseline:8,.0f} ({best} workers, the best) → "
        f"{ratio:6.1f} × ({ratio_of_best:.1f} × best to best; needed {case.required:g} ×), pixels within {error:.1e}",
        flush=True,
    )
    return {
        "case": case.name,
        "images_per_s": round(speed),
        "torchvision_images_per_s": round(baseline),
        "torchvision_workers": best,
        "torchvision_by_workers": {str(workers): round(rate) for workers, rate in trial.items()},
        "ratio": round(ratio, 1),
        "ratios": [round(a / b, 1) for a, b in pairs],
        "ratio_of_best": round(ratio_of_best, 1),
        "required": case.required,
        "largest_pixel_difference": error,
    }


def images_per_s(batches: Callable[[], Iterator], seconds: float) -> float:
    """From the first batch on, so that starting workers does not count; as many epochs as fit."""
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


def our_batches(case: Case, root: Path, scratch: Path) -> Callable[[], Iterator]:
    dm = data_module(case, root, scratch)

    def batches() -> Iterator:
        loader = dm.train_dataloader()
        loader.set_epoch(batches.epoch)
        batches.epoch += 1
        return (dm.on_after_batch_transfer(batch, 0) for batch in loader)

    batches.epoch = 0
    return batches


def data_module(case: Case, root: Path, scratch: Path):
    from data.cifar10 import CIFAR10DataModule

    dm = CIFAR10DataModule(
        root=root, cache_dir=scratch / "cache", image_size=case.image_size, crop_padding=case.crop_padding, flip=True,
        global_batch_size=BATCH, mean=MEAN, std=STD, num_val=1,
    )  # fmt: skip
    dm.place()
    return dm


def torchvision_batches(case: Case, root: Path, workers: int) -> Callable[[], Iterator]:
    from torch.utils.data import DataLoader
    from torchvision import transforms as T
    from torchvision.datasets import CIFAR10

    CIFAR10._check_integrity = lambda self: True  # made-up files do not have the official checksums
    CIFAR10._load_meta = lambda self: None
    first = T.RandomCrop(32, padding=case.crop_padding) if case.image_size == 32 else T.Resize(case.image_size)
    transform = T.Compose([first, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])
    data = CIFAR10(root, train=True, transform=transform)

    def batches() -> Iterator:
        return iter(DataLoader(data, BATCH, shuffle=True, drop_last=True, num_workers=workers))

    return batches


def largest_difference(case: Case, root: Path, scratch: Path) -> float:
    """Against torchvision v2 in float on the test images, which the centre crop leaves whole."""
    import torch
    from torchvision.transforms.v2 import functional as F

    dm = data_module(case, root, scratch)
    batch = next(iter(dm.test_dataloader()))
    images, _ = dm.on_after_batch_transfer(batch, 0)
    raw = dm._batch_transforms.cut(dm._delivery.array, batch["index"], batch["draws"])
    expected = raw.permute(0, 3, 1, 2).float() / 255
    if case.image_size != 32:
        expected = F.resize(expected, [case.image_size] * 2, antialias=True)
    expected = F.normalize(expected, MEAN, STD)
    return (images - expected).abs().max().item() if torch.isfinite(images).all() else float("inf")


def write_made_up(root: Path) -> Path:
    """60,000 images of random bytes as CIFAR-10's Python files."""
    import numpy as np

    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels = generator.integers(0, 256, (10_000, 3072), dtype=np.uint8)
        labels = generator.integers(0, 10, 10_000).tolist()
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}, 2))
    return root


if __name__ == "__main__":
    main()
