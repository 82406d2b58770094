"""Whole runs on null GPUs, under every trainer."""

import pytest

from null_gpus import needs_null_gpus, run_on_null_gpus

pytestmark = needs_null_gpus
SHORT = ("experiment=quickstart", "trainer.max_epochs=1", "trainer.limit_train_batches=4")


@pytest.mark.parametrize(("name", "devices"), [("gpu", 1), ("ddp", 2), ("fsdp", 2)])
def test_trains_validates_and_tests(name, devices, tmp_path):
    done = run_on_null_gpus("train", *SHORT, f"trainer={name}", logs=tmp_path, devices=devices)
    print(done.output)
    assert done.code == 0, done.output
    assert done.record["status"] == "finished"
