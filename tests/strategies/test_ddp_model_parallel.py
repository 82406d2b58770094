"""DDP over ranks that have the net in stages trains as one process does."""

from functools import partial

import pytest
import torch

from faults import signal_at_step
from kills import TINY, differences, final_state
from lockstep.process.errors import UserError
from runs import run_script
from strategies.ddp_model_parallel import DDPModelParallel, choose_stage_devices
from strategy_runs import difference, one, ranks_all

SIMULATED = "trainer=ddp_model_parallel_sim"
SETTINGS = (
    {},
    {"accumulate": 2},
    {"clip": 0.5},
    {"batch_norm": True, "sync_batchnorm": True},
    {"own": {"micro_batches": 3, "stages": 3}},
    {"own": {"gradient_dtype": "float32", "cut": [5]}},
)


def test_equals_one_process_in_float64():
    runs = [("ddp_model_parallel", settings) for settings in SETTINGS]
    for settings, of_ranks in zip(SETTINGS, ranks_all(2, runs), strict=True):
        shared = {key: settings[key] for key in ("clip", "batch_norm") if key in settings}
        expected = one(**shared)
        assert difference(of_ranks, expected, settings.get("accumulate", 1)) < 1e-12, settings


def placement(trainer):
    strategy = trainer.strategy
    return strategy.process_devices, strategy.distributed_sampler_kwargs


def test_a_sampler_of_lightning_gives_each_rank_its_share():
    runs = [("ddp_model_parallel", {"steps": 1, "inspect": placement})]
    [of_ranks] = ranks_all(2, runs)
    for rank, result in enumerate(of_ranks):
        devices, sampler = result["inspect"]
        assert devices == [torch.device("cpu")] * 2
        assert sampler == {"num_replicas": 2, "rank": rank}


def test_the_ranks_of_a_node_have_gpus_of_their_own():
    numbers = [
        [device.index for device in choose_stage_devices("cuda", 2, local_rank)]
        for local_rank in range(3)
    ]
    assert numbers == [[0, 1], [2, 3], [4, 5]]


def test_one_stage_a_rank_is_refused():
    with pytest.raises(UserError, match="trainer.stages=1: give 2 or more"):
        DDPModelParallel(stages=1)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 10], ids=["mid-epoch", "epoch's end"])
def test_a_resumed_run_ends_with_the_same_state(step, tmp_path):
    words = [SIMULATED, *TINY, "trainer.max_epochs=2", "run_id=r"]
    whole = run_script("train", *words, logs=tmp_path / "whole")
    assert whole.code == 0, whole.output

    logs = tmp_path / "stopped"
    stopped = run_script("train", *words, logs=logs, before=partial(signal_at_step, step))
    assert stopped.code == 75, stopped.output
    resumed = run_script("train", *words, "resume=r", logs=logs)
    assert resumed.code == 0, resumed.output
    assert resumed.record["restarts"][0]["lost_steps"] == 0
    assert differences(final_state(whole.folder), final_state(resumed.folder)) == []


@pytest.mark.slow
def test_one_process_evaluates_its_checkpoint(tmp_path):
    trained = run_script("train", SIMULATED, *TINY, "test=true", "run_id=r", logs=tmp_path)
    assert trained.code == 0, trained.output
    evaluated = run_script("eval", "ckpt_path=r", logs=tmp_path)
    assert evaluated.code == 0, evaluated.output
    for name in ("test/acc", "test/loss"):
        value = trained.record["metrics"][name]
        assert evaluated.record["metrics"][name] == pytest.approx(value, rel=1e-5)
