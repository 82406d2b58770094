"""The small run that tests on null GPUs compare: a ViT of two blocks, four steps."""

from pathlib import Path
from typing import Any

import pytest

from null_gpus import run_on_null_gpus

SMALL = (
    "model=vit_tiny_32", "model.depth=2", "model.embed_dim=48", "data=synthetic", "data.num_images=160",
    "data.num_test_images=40", "data.image_size=16", "data.global_batch_size=32", "trainer.max_epochs=1",
)  # fmt: skip
FLOAT32 = "trainer.precision=32-true"
TOLERANCE = 1e-4  # float32, summed in another order


def losses(words: str, devices: int, logs: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The metrics of a small run on null GPUs that ended well and said nothing of them."""
    done = run_on_null_gpus("train", *SMALL, *words.split(), logs=logs, devices=devices, environment=environment)
    assert done.code == 0, done.output
    assert "nullgpu:" not in done.output, done.output
    return done.record["metrics"]


def agree(found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> bool:
    """Whether two runs have the same losses of validation and test."""
    names = ("val/loss", "test/loss")
    return [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=tolerance)
