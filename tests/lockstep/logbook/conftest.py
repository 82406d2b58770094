"""Three invented run folders: DDP, FSDP, and one out of memory after a restart."""

import pytest

from example_runs import write_run


@pytest.fixture
def folders(tmp_path):
    failed = {
        "status": "failed", "exit_code": 1, "metrics": {}, "tags": ["a|b", "<b>"], "best_checkpoint": None,
        "error": {"message": "torch.OutOfMemoryError: CUDA out of memory.", "rank": 1, "host": "node-a"},
        "code": {"commit": "3b18e512dba79e4c8300dd08aeb37f8e728b8dad", "dirty": True},
        "restarts": [{"at": "2026-11-20T22:45:00Z", "resumed_step": 100, "lost_steps": 12, "downtime_s": 31}],
    }  # fmt: skip
    fsdp = {
        "trainer": "fsdp",
        "fit_seconds": 862.4,
        "metrics": {"test/acc": 0.8651, "test/images": 10_000},
        "epochs": 24,
    }
    return [
        write_run(tmp_path / "runs", name, **more)
        for name, more in (("ddp", {}), ("fsdp", fsdp), ("failed", failed))
    ]
