"""On one GPU: gpu, ddp and fsdp give the CPU's losses in bf16 and fp16, and an overflow skips the
step everywhere.
"""

from functools import partial

import numpy as np
import pytest
import torch

from runs import succeed
from strategy_runs import mean_losses, one, ranks, scale, worst

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOLERANCE = {"32-true": 1e-3, "bf16-mixed": 2e-2, "16-mixed": 5e-3}


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", ["one", "ddp", "fsdp"])
def test_losses_are_those_of_the_cpu(name, precision):
    expected = one(precision="32-true")
    found = ranks(name, 1, precision=precision, device=GPU)
    np.testing.assert_allclose(mean_losses(found), expected["losses"], rtol=TOLERANCE[precision])


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_forced_overflow_skips_the_step(name):
    run = partial(ranks, name, 1, precision="16-mixed", device=GPU, inspect=scale)
    skipped, without = run(steps=6, overflow_at=5), run(steps=5)
    assert worst(skipped[0]["weights"], without[0]["weights"]) == 0
    assert skipped[0]["inspect"] == without[0]["inspect"] / 2


def test_shards_and_checkpointed_activations_fit_together():
    found = ranks("fsdp", 1, device=GPU, precision="bf16-mixed", recompute=True)
    np.testing.assert_allclose(mean_losses(found), one(precision="32-true")["losses"], rtol=2e-2)


RUNS = {
    "clipped, averaged": "trainer=gpu trainer.gradient_clip_val=1.0 trainer.ema_decay=0.9",
    "looks at images first": "trainer=gpu model=airbench optimizer=airbench data=synthetic data.num_images=600",
    "one GPU twice": "trainer=model_parallel trainer.stage_devices=[cuda:0,cuda:0]",
    "its end on the CPU": "trainer=model_parallel trainer.stage_devices=[cuda:0,cpu]",
    "float32": "trainer=model_parallel trainer.stage_devices=[cuda:0,cpu] trainer.precision=32-true",
    "its start on the CPU": "trainer=model_parallel trainer.stage_devices=[cpu,cuda:0]",
}


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_a_whole_run_trains_validates_and_tests(words, tmp_path):
    done = succeed(
        "train", "experiment=quickstart", *words.split(), "trainer.max_epochs=2", logs=tmp_path
    )
    assert done.record["metrics"]["test/acc"] > 0.3, "drawing lots gives 0.1"
