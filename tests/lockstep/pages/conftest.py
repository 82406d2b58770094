"""Three invented runs (DDP, FSDP, one out of memory after a restart) and a logbook of them."""

from pathlib import Path

import pytest

from example_runs import example_config, write_run
from lockstep.pages.build import build
from lockstep.pages.comparison_page import save_comparison
from lockstep.pages.notes import add_note, run_note_path

NOW = "2026-11-21T00:00:00Z"
DDP, FSDP, FAILED = "2026-11-20_20-15-00_aa11bb", "2026-11-20_21-40-00_cc22dd", "2026-11-20_22-40-00_ee33ff"


def write_three_runs(root: Path) -> list[Path]:
    fsdp = {
        "experiment": "vit_fsdp", "trainer": "fsdp", "started_at": "2026-11-20T21:40:00Z", "fit_seconds": 466.0,
        "command": "python src/train.py experiment=vit_fsdp trainer.devices=2", "peak_memory_gib": 2.93,
        "metrics": {"val/acc": 0.8637, "test/acc": 0.8651}, "cost": {"usd": 0.136},
        "largest_batch": {"per_device": 618, "global": 1236, "probes": 12, "seconds": 50.0, "peak_memory_gib": 14.3,
                          "limit_gib": 14.6, "bounded_by": "memory"},
        "throughput": {"images_per_s": 1150.0, "images_per_s_per_device": 575.0,
                       "step_seconds": {"p50": 0.222, "p95": 0.25}},
    }  # fmt: skip
    failed = {
        "status": "failed", "exit_code": 1, "started_at": "2026-11-20T22:40:00Z", "metrics": {}, "tags": ["a|b", "<b>"],
        "error": {"message": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.5 GiB", "rank": 1,
                  "host": "node-a", "phase": "training"},
        "code": {"commit": "3b18e512dba79e4c8300dd08aeb37f8e728b8dad", "dirty": True}, "global_batch_size": 2048,
        "restarts": [{"at": "2026-11-20T22:45:00Z", "resumed_step": 100, "lost_steps": 12, "downtime_s": 31,
                      "command": "python src/train.py resume=2026-11-20_22-40-00_ee33ff"}],
        "best_checkpoint": None, "upload": None, "cost": None, "largest_batch": None,
    }  # fmt: skip
    return [
        write_run(root, DDP),
        write_run(root, FSDP, config=example_config(choices__trainer="fsdp"), **fsdp),
        write_run(root, FAILED, config=example_config(data__global_batch_size=2048), epochs=2, **failed),
    ]


def build_three(root: Path) -> Path:
    """A logbook at root/logbook of the three runs, with a note and a comparison; nothing in it depends on `root`."""
    folders, logbook = write_three_runs(root / "runs"), root / "logbook"
    add_note(run_note_path(logbook, DDP), "Baseline of the *report*.", name="DDP baseline", tags=["paper"])
    save_comparison(logbook, "DDP beside FSDP", [DDP, FSDP])
    build(logbook, folders, NOW, shown_as={folder: f"logs/train/runs/{folder.name}" for folder in folders})
    return logbook


@pytest.fixture
def logbook(tmp_path: Path) -> Path:
    return build_three(tmp_path)
