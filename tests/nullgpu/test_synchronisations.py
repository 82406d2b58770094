"""The host waits for the device at log points, at validations and at checkpoints, and never for a step."""

import json
from collections import Counter

import pytest

from null_gpus import needs_null_gpus, run_on_null_gpus

pytestmark = [needs_null_gpus, pytest.mark.slow]
STEPS = 4
TRAINERS = {
    "gpu": ("trainer=gpu", 1),
    "ddp": ("trainer=ddp", 2),
    "fsdp": ("trainer=fsdp", 2),
    "allreduce": ("trainer=allreduce", 2),
    "dp": ("trainer=dp", 2),
    "model_parallel": ("trainer=model_parallel", 2),
    "accumulated": ("trainer=ddp trainer.accumulate_grad_batches=2", 2),
    "clipped": ("trainer=ddp trainer.gradient_clip_val=1.0", 2),
    "averaged": ("trainer=ddp trainer.ema_decay=0.9", 2),
    "shards within a node": ("trainer=fsdp trainer.shard_within_node=true", 2),
    "activations computed again": ("trainer=fsdp trainer.activation_checkpointing=true", 2),
    "shards in CPU memory": ("trainer=fsdp trainer.cpu_offload=true", 2),
    "images from workers": ("trainer=gpu data.path=loader", 1),
}
NEVER_LOG = 1000  # steps between log points


def by_line(words: str, devices: int, steps: int, logs, log_every: int = NEVER_LOG) -> Counter:
    """Synchronisations of all ranks in an epoch of `steps` steps with its validation and checkpoints."""
    options = [
        "experiment=quickstart", "trainer.max_epochs=1", f"trainer.limit_train_batches={steps}", "test=false",
        f"trainer.log_every_n_steps={log_every}", "data.num_val=64", "trainer.precision=bf16-mixed",
    ]  # fmt: skip
    if "accumulate" in words:
        options[2] = f"trainer.limit_train_batches={2 * steps}"
    done = run_on_null_gpus("train", *options, *words.split(), logs=logs, devices=devices, syncs=logs / "syncs")
    assert done.code == 0, done.output
    assert done.record["steps"] == steps
    counts = Counter()
    for path in sorted((logs / "syncs").glob("rank*.json")):
        counts.update(json.loads(path.read_text()))
    return counts


@pytest.mark.parametrize("name", TRAINERS)
def test_none_grows_with_the_steps(name, tmp_path):
    words, devices = TRAINERS[name]
    few = by_line(words, devices, STEPS, tmp_path / "few")
    many = by_line(words, devices, 2 * STEPS, tmp_path / "many")
    assert few, "the validation reads its counts"
    assert many - few == Counter(), "each of these lines waits in every step"


def test_log_points_wait_once_each(tmp_path):
    few, many = (by_line("trainer=gpu", 1, 8, tmp_path / str(n), log_every=n) for n in (8, 2))
    more = many - few
    assert list(more.values()) == [3], more
