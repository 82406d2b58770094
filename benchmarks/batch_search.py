"""Tables of the batch search: found against every batch tried, DDP against FSDP, against Lightning's finder.

    python benchmarks/batch_search.py                       two CPU ranks that play a small device
    python benchmarks/batch_search.py --gpu                 vit_base_patch32_224 on this machine's GPU

Prints Markdown. "most" is the largest batch whose real steps stay within the limit, by trying each one above the found.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "harness")]

GIB = 2**30
DATA = ["data=synthetic", "data.num_images=6000", "data.num_test_images=100", "data.eval_batch_size=32"]
MODELS = {  # options, GiB of the device played
    "vit_tiny_32": (["model=vit_tiny_32"], 0.3),
    "small_cnn": (["model=small_cnn"], 0.1),
    "alexnet": (["model=alexnet", "data.image_size=64"], 1.3),
    "alexnet_bn": (["model=alexnet_bn", "data.image_size=64"], 1.3),
}
RANKS = {"cpu": 1, "ddp_sim": 2, "fsdp_sim": 2}


def search(options: list[str], folder: Path, ranks: int) -> dict[str, Any]:
    from batch_sessions import find_largest
    from cluster import Cluster
    from memory_runs import composed

    config = composed(options, folder)
    cluster = Cluster("none", 1, ranks, 0, None if ranks > 1 else 0, "127.0.0.1", None)
    return find_largest(config, cluster, dict(os.environ)).record()


def most(options: list[str], folder: Path, ranks: int, found: int, limit_gib: float) -> int:
    """Try every batch from the found to where 5 % more would be, on real ranks without a limit."""
    from memory_runs import composed, peaks

    batches = list(range(found, int(found / 0.95) + 2))
    measured = peaks(composed(options, folder), folder, ranks, batches)
    largest = [max(max(rank[i].values()) for rank in measured) for i in range(len(batches))]
    return max((b for b, size in zip(batches, largest, strict=True) if size <= limit_gib * GIB), default=found)


def simulated(models: list[str], trainers: list[str], exhaustive: bool) -> None:
    print("| model | trainer | limit GiB | largest | most | probes | out of memory | s | peak GiB | prediction error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in models:
        options, limit = MODELS[model]
        for trainer in trainers:
            with tempfile.TemporaryDirectory() as name:
                every = [*DATA, *options, f"trainer={trainer}"]
                fields = search([*every, f"trainer.memory_limit_gib={limit}"], Path(name), RANKS[trainer])
                found = fields["per_device"]
                best = most(every, Path(name), RANKS[trainer], found, limit) if exhaustive else "–"
                row(model, trainer, fields, best)


def row(model: str, trainer: str, fields: dict[str, Any], best: Any) -> None:
    error = fields["prediction_error"]
    cells = [model, trainer, f"{fields['limit_gib']:.3g}", fields["per_device"], best, fields["probes"]]
    cells += [fields["out_of_memory"], f"{fields['seconds']:.0f}", f"{fields['peak_memory_gib']:.3f}"]
    print(
        "| " + " | ".join(str(cell) for cell in [*cells, "–" if error is None else f"{error:+.2%}"]) + " |", flush=True
    )


def lightning_finder(options: list[str], folder: Path) -> tuple[int, float]:
    """Lightning's BatchSizeFinder (binary search) on the same GPU, one process: what it returns, and its seconds."""
    import torch
    from lightning.pytorch.tuner import Tuner

    import assemble
    from cluster import Cluster
    from memory_runs import composed

    config, cluster = composed(options, folder), Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)
    began = time.perf_counter()
    data = assemble.build_data(config, cluster, torch.device("cuda", 0))
    module = assemble.build_module(config, assemble.data_facts(data))
    trainer = assemble.build_trainer(config, cluster, [], [], folder)
    tuner = Tuner(trainer)
    size = tuner.scale_batch_size(module, datamodule=data, mode="binsearch", batch_arg_name="global_batch_size")
    return int(size or 0), time.perf_counter() - began


def on_gpu() -> None:
    print("| model | trainer | limit GiB | largest | most | probes | out of memory | s | peak GiB | prediction error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    base = ["data=synthetic", "data.num_images=60000", "data.stored_size=32", "data.image_size=224"]
    base += ["model=timm_vit", "model.pretrained=false"]
    with tempfile.TemporaryDirectory() as name:
        for trainer in (["trainer=gpu"], ["trainer=fsdp", "trainer.devices=1"]):
            row("vit_base_patch32_224", trainer[0].split("=")[1], search([*base, *trainer], Path(name), 1), "–")
        size, seconds = lightning_finder([*base, "trainer=gpu"], Path(name))
        print(f"\nLightning's BatchSizeFinder under trainer=gpu: {size} in {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--trainers", nargs="*", default=list(RANKS), choices=list(RANKS))
    parser.add_argument("--exhaustive", action="store_true", help="try every batch above the found (minutes)")
    arguments = parser.parse_args()
    if arguments.gpu:
        on_gpu()
    else:
        simulated(arguments.models, arguments.trainers, arguments.exhaustive)


if __name__ == "__main__":
    main()
