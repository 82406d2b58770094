"""Invented run folders for tests of the logbook: the same arguments give the same bytes."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.00                 Driver Version: 570.00         CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
|   0  Tesla T4                       On  |   00000000:00:1E.0 Off |                    0 |
| N/A   71C    P0             69W /   70W |   11822MiB /  15360MiB |     97%      Default |
+-----------------------------------------------------------------------------------------+
"""


def example_record(run_id: str, **changes: Any) -> dict[str, Any]:
    """A full record of a finished run; `changes` replace fields, None removes one."""
    record = {
        "schema_version": 1, "run_id": run_id, "task_name": "train", "tags": ["example"], "status": "finished",
        "error": None, "exit_code": 0, "started_at": "2026-11-20T20:15:00Z", "updated_at": "2026-11-20T20:22:31Z",
        "finished_at": "2026-11-20T20:22:31Z", "command": "python src/train.py experiment=vit_ddp trainer.devices=2",
        "overrides": ["experiment=vit_ddp", "trainer.devices=2"], "experiment": "vit_ddp",
        "code": {"commit": "3b18e512dba79e4c8300dd08aeb37f8e728b8dad", "dirty": False, "tree_hash": "9f2c"},
        "versions": {"python": "3.11.2", "torch": "2.14.1", "lightning": "2.6.6"},
        "hosts": [{"node_rank": 0, "host": "node-a", "cores": 8}],
        "launcher": "supervisor", "model": "vit_tiny_32", "data": "cifar10", "trainer": "ddp",
        "world_size": 2, "num_nodes": 1, "devices": 2, "precision": "16-mixed", "seed": 42, "global_batch_size": 256,
        "per_device_batch_size": 64, "accumulate_grad_batches": 2, "epochs": 12, "steps": 2100,
        "num_parameters": 5_400_000, "num_train": 45_000, "num_val": 5_000, "num_test": 10_000,
        "data_hash": "17ca19f1db5a",
        "metrics": {"test/correct": 8643, "test/images": 10_000, "val/acc": 0.871, "val/loss": 0.412,
                    "test/acc": 0.8643, "test/loss": 0.431},
        "fit_seconds": 431.2, "images_per_s": 1246.0, "peak_memory_gib": 4.71,
        "throughput": {"images_per_s": 1246.0, "images_per_s_per_device": 623.0, "data_wait_share": 0.021,
                       "step_seconds": {"p50": 0.205, "p95": 0.223},
                       "slowest_rank": {"rank": 1, "host": "node-a", "own_seconds": 0.21},
                       "fastest_rank": {"rank": 0, "host": "node-a", "own_seconds": 0.198}},
        "hardware": {"nodes": [{"node_rank": 0, "host": "node-a", "cpu": "Xeon Platinum 8259CL", "cores": 8,
                                "memory_gib": 31.0, "gpus": [{"name": "Tesla T4"}] * 2, "nvidia_smi": SMI,
                                "stats": {"gpu0/utilisation_percent": {"p50": 94.0, "max": 99.0},
                                          "gpu1/utilisation_percent": {"p50": 91.0, "max": 98.0}}}]},
        "cost": {"usd": 0.126, "usd_per_epoch": 0.0105, "price_per_hour": 1.052, "instance": "2 × g4dn.xlarge"},
        "largest_batch": {"per_device": 412, "global": 824, "probes": 11, "seconds": 41.0, "peak_memory_gib": 14.2,
                          "limit_gib": 14.6, "bounded_by": "memory"},
        "restarts": [], "resumed_from": None,
        "summary": {"changed": [["trainer.devices", 1, 2]]},
        "best_checkpoint": {"path": "checkpoints/best-step00001925.ckpt", "bytes": 64_910_233, "epoch": 11,
                            "sha256": "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c", "step": 1925,
                            "metric": {"val/acc": 0.871}, "s3_uri": f"s3://models/vit/{run_id}/best-step00001925.ckpt"},
        "upload": {"uri": f"s3://models/vit/{run_id}/best-step00001925.ckpt", "seconds": 2.1, "error": None},
    }  # fmt: skip
    record.update(changes)
    return {key: value for key, value in record.items() if value is not None or key in ("error", "resumed_from")}


def example_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model": {"name": "vit_tiny_32"}, "data": {"name": "cifar10", "global_batch_size": 256},
        "trainer": {"devices": 2, "accumulate_grad_batches": 2, "max_epochs": 12}, "optimizer": {"lr": 0.0005},
        "choices": {"trainer": "ddp"}, "seed": 42, "paths": {"output_dir": "logs/somewhere"},
    }  # fmt: skip
    for key, value in changes.items():
        group, _, name = key.partition("__")
        config[group] = {**config[group], name: value} if name else value
    return config


def write_run(
    root: Path, run_id: str, *, config: dict | None = None, speed: float = 1.0, epochs: int = 12, **changes: Any
) -> Path:
    """A whole run folder under `root`; returns it.

    Args:
        speed: how quickly the invented loss falls.
        changes: fields of the record; `changes={}` gives a finished run of two GPUs.
    """
    folder = root / run_id
    folder.mkdir(parents=True)
    record = example_record(run_id, epochs=epochs, **changes)
    (folder / "run.json").write_text(json.dumps(record, indent=1))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or example_config()))
    (folder / "tensorboard").mkdir()
    chance = random.Random(run_id)
    write_metrics(folder, epochs, speed, chance)
    if record["status"] == "finished":
        write_confusion(folder, chance)
    if record.get("code", {}).get("dirty"):
        (folder / "code.diff").write_text("--- a/src/train.py\n+++ b/src/train.py\n@@ -1 +1 @@\n-lr = 1\n+lr = 2\n")
    return folder


def write_metrics(folder: Path, epochs: int, speed: float, chance: random.Random) -> None:
    hardware = "hardware/gpu_percent,hardware/gpu_memory_gib,hardware/cpu_percent"
    lines = [f"step,epoch,time_s,train/loss,lr,{hardware},val/loss,val/acc"]
    for step in range(25, epochs * 175 + 1, 25):
        share = step / (epochs * 175)
        loss = 0.25 + 2.05 * math.exp(-4 * share * speed) + chance.gauss(0, 0.03)
        lr = 0.0005 * min(1, step / 300) * (1 + math.cos(math.pi * share)) / 2
        row = f"{step},{(step - 1) // 175},{step * 0.205:.2f},{loss:.5f},{lr:.6g}"
        row += f",{92 + chance.gauss(0, 2):.1f},4.5,{28 + chance.gauss(0, 4):.1f}"
        if step % 175 == 0:
            row += f",{loss + 0.12:.5f},{0.88 - 0.6 * math.exp(-4 * share * speed) + chance.gauss(0, 0.004):.4f}"
        else:
            row += ",,"
        lines.append(row)
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def write_confusion(folder: Path, chance: random.Random) -> None:
    lines = [",".join(CLASSES)]
    for true in range(10):
        row = [chance.randrange(2, 22) for _ in range(10)]
        if true in (3, 5):
            row[8 - true] += 90
        row[true] = 1000 - sum(row) + row[true]
        lines.append(",".join(map(str, row)))
    (folder / "confusion_matrix.csv").write_text("\n".join(lines) + "\n")
