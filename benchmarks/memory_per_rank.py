"""What each rank holds: bytes of weights, gradients and optimizer state, and the peak of tracked bytes in a step.

    python benchmarks/memory_per_rank.py

Writes benchmarks/results/memory_per_rank.json and logbook/measurements/memory_per_rank.md. The bytes are those of
tensors in CPU memory as torch's MemTracker sees them: what a GPU's allocator would hold, without its rounding.
"""

import argparse
import json
import logging
import platform
import sys
import tempfile
import warnings
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "harness"))

from classifier import ImageClassifier
from data.synthetic import SyntheticDataModule
from local_ranks import local_cluster, meet, run_ranks
from lockstep.batch_size.memory import TrackedBytes
from lockstep.distributed.cluster import Cluster
from lockstep.strategies.allreduce import AllReduce
from lockstep.strategies.ddp import DDP
from lockstep.strategies.sharded import Sharded
from lockstep.training.rank import StartedRanks
from models.timm import TimmModel

HERE = Path(__file__).resolve().parent
PAGES = HERE.parent / "logbook" / "measurements"
ONE, ACCUMULATED = "one process", "one process, 4 × 4 images accumulated"
ROWS = ((ONE, 1), (ACCUMULATED, 1), ("ddp_sim", 2), ("ddp_sim", 4), ("allreduce_sim", 2), ("fsdp_sim", 2),
        ("fsdp_sim", 4))  # fmt: skip
VIT = {"name": "vit_tiny_patch16_224", "pretrained": False, "patch_size": 4, "embed_dim": 192, "depth": 12}
IMAGE_SIZE, PER_RANK_BATCH, STEPS = 32, 16, 3
MIB = 2**20


def local_bytes(tensors: Any) -> int:
    """Of this rank's shards, or of whole tensors."""
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in own)


class Measure(pl.Callback):
    """Gradients as the optimizer gets them, and the peak of the last step, whose optimizer state exists already."""

    def __init__(self, tracked: TrackedBytes) -> None:
        self.tracked, self.gradients, self.peak = tracked, 0, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.tracked.reset()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.gradients = local_bytes(p.grad for p in pl_module.parameters() if p.grad is not None)

    def on_train_batch_end(self, *_: Any) -> None:
        self.peak = self.tracked.peaks()[""]


def in_rank(cluster: Cluster, trainer_name: str, cache_dir: str) -> dict[str, int]:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    meet(cluster)
    data = SyntheticDataModule(
        image_size=IMAGE_SIZE, num_images=4 * STEPS * PER_RANK_BATCH + 8, num_val=8, num_test_images=8,
        global_batch_size=PER_RANK_BATCH * cluster.world_size, cache_dir=cache_dir,
    )  # fmt: skip
    data.prepare()
    accumulate = 4 if trainer_name == ACCUMULATED else 1
    data.place(rank=cluster.rank, world_size=cluster.world_size, accumulate_grad_batches=accumulate)
    net = TimmModel(num_classes=10, image_size=IMAGE_SIZE, channels=3, **VIT)
    module = ImageClassifier(net, partial(torch.optim.AdamW, lr=1e-3), num_classes=10)
    strategies = {"ddp_sim": DDP, "allreduce_sim": AllReduce, "fsdp_sim": Sharded}
    strategy = strategies.get(trainer_name, lambda: "auto")()
    tracked = TrackedBytes()
    tracked.track_external(net)
    measure = Measure(tracked)
    trainer = pl.Trainer(
        accelerator="cpu", devices=cluster.devices, strategy=strategy, plugins=[StartedRanks(cluster)],
        callbacks=[measure], accumulate_grad_batches=accumulate, max_steps=STEPS, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    with tracked:
        trainer.fit(module, datamodule=data)
    states = [
        v for state in trainer.optimizers[0].state.values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    return {
        "parameters": local_bytes(net.parameters()),
        "gradients": measure.gradients,
        "optimizer_state": local_bytes(value for value in states if isinstance(value, torch.Tensor)),
        "peak": measure.peak,
    }


def measure_row(trainer_name: str, world_size: int, cache_dir: str) -> dict[str, Any]:
    if world_size == 1:
        ranks = [in_rank(local_cluster(0, 1, 0), trainer_name, cache_dir)]
    else:
        ranks = run_ranks(in_rank, world_size, trainer_name, cache_dir)
    largest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return {"trainer": trainer_name, "ranks": world_size, "largest_rank": largest, "every_rank": ranks}


def page(facts: dict[str, Any]) -> str:
    """The table in markdown, of what results/memory_per_rank.json holds."""
    rows = facts["rows"]
    lines = [
        "# Memory of one rank",
        "",
        "Written by `benchmarks/memory_per_rank.py`; do not edit. MiB of the rank that holds most; a ViT of "
        f"{facts['num_parameters'] / 1e6:.1f} M parameters, AdamW, float32, {PER_RANK_BATCH} images of {IMAGE_SIZE} px "
        "a rank. The peak is that of tracked tensor bytes in a step, activations, gathered weights and DDP's buckets "
        "included.",
        "",
        f"{facts['date']} · {facts['machine']} · torch {facts['torch']}",
        "",
        "| trainer | ranks | parameters | gradients | optimizer state | these | peak of a step | of one process |",
        "|---|---|---|---|---|---|---|---|",
    ]
    whole = rows[0]["largest_rank"]["peak"]
    for row in rows:
        largest = row["largest_rank"]
        held = [largest[name] for name in ("parameters", "gradients", "optimizer_state")]
        numbers = [f"{value / MIB:.1f}" for value in [*held, sum(held), largest["peak"]]]
        lines.append(f"| {row['trainer']} | {row['ranks']} | {' | '.join(numbers)} | {largest['peak'] / whole:.2f} × |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Bytes that each rank holds, by strategy.")
    parser.add_argument("--out", type=Path, help="folder for page and results, instead of the repository's own")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache_dir:
        rows = [measure_row(name, world_size, cache_dir) for name, world_size in ROWS]
    num_parameters = rows[0]["largest_rank"]["parameters"] // 4
    content = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": platform.machine(), "torch": torch.__version__,
        "num_parameters": num_parameters, "command": "python benchmarks/memory_per_rank.py",
        "rows": rows,
    }  # fmt: skip
    results, file = (options.out or HERE) / "results", (options.out or PAGES) / "memory_per_rank.md"
    for folder in (results, file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    (results / "memory_per_rank.json").write_text(json.dumps(content, indent=1) + "\n")
    file.write_text(page(content))
    print(page(content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
