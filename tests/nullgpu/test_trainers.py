"""Every trainer on null GPUs trains, validates, saves and tests, and finds the losses of one CPU process.

A warning is an error in these runs.
"""

import pytest

from null_gpus import needs_null_gpus, run_on_null_gpus
from null_runs import FLOAT32, SMALL, TOLERANCE, agree, losses
from runs import run_door

pytestmark = needs_null_gpus
TRAINERS = {
    "gpu": ("trainer=gpu", 1),
    "ddp": ("trainer=ddp", 2),
    "fsdp": ("trainer=fsdp", 2),
}
VARIANTS = {
    "model_parallel": ("trainer=model_parallel", 2),
    "allreduce": ("trainer=allreduce", 2),
    "dp": ("trainer=dp", 2),
    "one rank of ddp": ("trainer=ddp", 1),
    "one rank of fsdp": ("trainer=fsdp", 1),
    "ddp on four": ("trainer=ddp", 4),
    "fsdp on four": ("trainer=fsdp", 4),
    "ddp on eight": ("trainer=ddp", 8),
    "fsdp on eight": ("trainer=fsdp", 8),
    "dp on four": ("trainer=dp", 4),
    "model_parallel in micro-batches": ("trainer=model_parallel trainer.micro_batches=2", 2),
    "accumulated": ("trainer=ddp trainer.accumulate_grad_batches=2", 2),
    "accumulated shards": ("trainer=fsdp trainer.accumulate_grad_batches=2", 2),
    "shards in CPU memory": ("trainer=fsdp trainer.cpu_offload=true", 2),
    "activations computed again": ("trainer=fsdp trainer.activation_checkpointing=true", 2),
    "activations of copies computed again": ("trainer=dp trainer.activation_checkpointing=true", 2),
    "activations of stages computed again": ("trainer=model_parallel trainer.activation_checkpointing=true", 2),
    "weights kept": ("trainer=fsdp trainer.reshard_after_forward=false", 2),
    "channels_last": ("trainer=ddp trainer.channels_last=true", 2),
    "images from workers": ("trainer=ddp data.path=loader", 2),
    "segments of one size": ("trainer=gpu", 1, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
}
ROUGH = {"bf16-mixed": 0.02, "16-mixed": 0.01, "bf16-true": 0.05, "64-true": TOLERANCE}


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    done = run_door("train", *SMALL, FLOAT32, "trainer=cpu", logs=tmp_path_factory.mktemp("cpu"))
    assert done.code == 0, done.output
    return done.record["metrics"]


@pytest.mark.parametrize("name", TRAINERS)
def test_losses_are_those_of_one_cpu_process(name, cpu, tmp_path):
    words, devices = TRAINERS[name]
    assert agree(losses(f"{words} {FLOAT32}", devices, tmp_path), cpu)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_the_same_losses(name, cpu, tmp_path):
    words, devices, *environment = VARIANTS[name]
    assert agree(losses(f"{words} {FLOAT32}", devices, tmp_path, *environment), cpu)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ROUGH)
@pytest.mark.parametrize("name", ["gpu", "ddp", "fsdp", "allreduce", "dp", "model_parallel"])
def test_every_precision(name, precision, cpu, tmp_path):
    words, devices = {**TRAINERS, **VARIANTS}[name]
    assert agree(losses(f"{words} trainer.precision={precision}", devices, tmp_path), cpu, ROUGH[precision])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_synchronised_batch_norm_has_the_losses_of_one_device(name, tmp_path):
    own = [word for word in SMALL if not word.startswith("model")]
    own += [FLOAT32, "model=airbench", "trainer.sync_batchnorm=true"]
    one = run_on_null_gpus("train", *own, "trainer=gpu", logs=tmp_path / "one")
    two = run_on_null_gpus("train", *own, f"trainer={name}", logs=tmp_path / "two", devices=2)
    assert two.code == 0 and agree(two.record["metrics"], one.record["metrics"], 10 * TOLERANCE), two.output


@pytest.mark.slow
def test_averaged_weights_are_those_of_one_device(tmp_path):
    own = f"{FLOAT32} trainer.ema_decay=0.5"
    assert agree(losses(f"{own} trainer=ddp", 2, tmp_path / "two"), losses(f"{own} trainer=gpu", 1, tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["cpu", "ddp_sim"])
def test_a_run_on_the_cpu_of_a_machine_with_gpus(trainer, cpu, tmp_path):
    assert agree(losses(f"{FLOAT32} trainer={trainer}", 2, tmp_path), cpu)
