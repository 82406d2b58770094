"""Invented run folders for tests of the logbook: the same arguments give the same bytes."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.00                 Driver Version: 570.00         CUDA Version: 12.8     |
|   0  Tesla T4                       On  |   00000000:00:1E.0 Off |                    0 |
+-----------------------------------------------------------------------------------------+
"""


def example_record(run_id: str, **changes: Any) -> dict[str, Any]:
    """A full record of a finished run; `changes` replace fields, None removes one."""
    s3_uri = f"s3://models/vit/{run_id}/best-step00001925.ckpt"
    record = {
        "schema_version": 1, "run_id": run_id, "task_name": "train", "tags": ["example"], "status": "finished",
        "error": None, "exit_code": 0, "started_at": "2026-11-20T20:15:00Z", "updated_at": "2026-11-20T20:22:31Z",
        "finished_at": "2026-11-20T20:22:31Z", "command": "python src/train.py experiment=vit_ddp trainer.devices=2",
        "overrides": ["experiment=vit_ddp", "trainer.devices=2"], "experiment": "vit_ddp",
        "code": {"commit": "3b18e512dba79e4c8300dd08aeb37f8e728b8dad", "dirty": False, "tree_hash": "9f2c"},
        "versions": {"python": "3.11.2", "torch": "2.14.1", "lightning": "2.6.6"},
        "hosts": [{"node_rank": 0, "host": "node-a", "cores": 8}],
        "launcher": "supervisor", "model": "vit_tiny_32", "data": "cifar10", "trainer": "ddp",
        "world_size": 2, "num_nodes": 1, "precision": "16-mixed", "seed": 42, "global_batch_size": 256,
        "per_device_batch_size": 64, "accumulate_grad_batches": 2, "epochs": 12, "steps": 2100,
        "num_parameters": 5_400_000, "num_train": 45_000, "num_val": 5_000, "num_test": 10_000,
        "data_hash": "17ca19f1db5a",
        "metrics": {"test/correct": 8643, "test/images": 10_000, "val/images": 5000, "val/acc": 0.871, "val/loss": 0.412,
                    "test/acc": 0.8643, "test/loss": 0.431},
        "fit_seconds": 431.2, "images_per_s": 1246.0, "peak_memory_gib": 4.71,
        "throughput": {"images_per_s": 1246.0, "images_per_s_per_device": 623.0, "data_wait_share": 0.021,
                       "step_seconds": {"p50": 0.205, "p95": 0.223}},
        "hardware": {"nodes": [{"node_rank": 0, "host": "node-a", "cpu": "Xeon Platinum 8259CL", "cores": 8,
                                "memory_gib": 31.0, "gpus": [{"name": "Tesla T4"}] * 2, "nvidia_smi": SMI,
                                "stats": {"gpu0/utilisation_percent": {"p50": 94.0, "max": 99.0},
                                          "gpu1/utilisation_percent": {"p50": 91.0, "max": 98.0}}}]},
        "cost": {"usd": 0.126, "usd_per_epoch": 0.0105, "price_per_hour": 1.052},
        "largest_batch": {"per_device": 412, "global": 824, "peak_memory_gib": 14.2, "limit_gib": 14.6,
                          "bounded_by": "memory"},
        "restarts": [], "summary": {"changed": [["trainer.devices", 1, 2]]},
        "best_checkpoint": {"path": "checkpoints/best-step00001925.ckpt", "bytes": 64_910_233, "epoch": 11,
                            "sha256": "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c", "step": 1925,
                            "metric": {"val/loss": 0.412, "val/acc": 0.871}, "s3_uri": s3_uri},
        "upload": {"uri": s3_uri, "seconds": 2.1, "error": None},
    }  # fmt: skip
    record.update(changes)
    return {key: value for key, value in record.items() if value is not None or key == "error"}


def write_run(root: Path, run_id: str, **changes: Any) -> Path:
    """Write a whole run folder under `root`, of two GPUs; `changes` are fields of its record."""
    folder, record = root / run_id, example_record(run_id, **changes)
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record, indent=1))
    config = {
        "optimizer": {"lr": 0.0005},
        "choices": {"trainer": record["trainer"]},
        "paths": {"output_dir": "logs/x"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    head = "step,epoch,time_s,train/loss,lr,hardware/gpu_percent,hardware/gpu_memory_gib,hardware/cpu_percent"
    lines, last = [f"{head},val/loss,val/acc"], record["epochs"] * 175
    for step in range(25, last + 1, 25):
        left = math.exp(-4 * step / last)
        row = f"{step},{(step - 1) // 175},{step * 0.205:.2f},{0.25 + 2 * left:.5f},{0.0005 * left:.6g},{92 + left:.1f}"
        row += f",4.5,{28 + left:.1f},"
        lines.append(
            row + (f"{0.37 + 2 * left:.5f},{0.88 - 0.6 * left:.4f}" if step % 175 == 0 else ",")
        )
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    if record["status"] == "finished":
        rows = [
            ",".join(str(955 if true == taken else 5) for taken in range(10)) for true in range(10)
        ]
        names = "plane,car,bird,cat,deer,dog,frog,horse,ship,truck"
        (folder / "confusion_matrix.csv").write_text("\n".join([names, *rows]) + "\n")
    if record["code"].get("dirty"):
        (folder / "code.diff").write_text(
            "--- a/src/train.py\n+++ b/src/train.py\n@@ -1 +1 @@\n-lr = 1\n+lr = 2\n"
        )
    return folder
