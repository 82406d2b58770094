"""The moving average is what is validated and saved, and a stop in a validation leaves each weight in its place."""

import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from callbacks.weight_average import WeightAverage
from checkpoint_files import newest_whole
from classifier import ImageClassifier
from kill_hooks import Plan, plant
from kills import differences
from runs import run_door
from strategies.sharded_checkpoint import load_checkpoint

WORDS = ["experiment=quickstart", "trainer.ema_decay=0.9", "trainer.max_epochs=3", "data.global_batch_size=128",
         "trainer.num_threads=1", "data.eval_batch_size=16", "test=false", "~callbacks.hardware",
         "run_id=r"]  # fmt: skip
STATE = ("state_dict", "current_model_state", "averaging_state", "optimizer_states", "global_step")


def last_of(done):
    content = load_checkpoint(newest_whole(done.folder.checkpoints, kind="last"))
    return {key: content[key] for key in STATE}


def test_the_average_lies_where_training_will(tmp_path):
    """The module itself gets to its device only after callbacks are set up."""
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta")))
    callback = WeightAverage(0.9)
    callback.setup(trainer, ImageClassifier(torch.nn.Linear(2, 2), num_classes=2), "fit")
    assert {p.device.type for p in callback._average_model.parameters()} == {"meta"}
    assert callback._average_model.n_averaged.device.type == "cpu"  # read in every step


@pytest.mark.parametrize("trainer", [pytest.param("cpu", marks=pytest.mark.soak), "ddp_sim"])
def test_a_run_stopped_in_a_validation_goes_on_with_the_same_weights(tmp_path, trainer):
    words = [*WORDS, f"trainer={trainer}"]
    whole = run_door("train", *words, logs=tmp_path / "whole")
    assert whole.code == 0, whole.output
    plan = Plan(str(tmp_path / "marks"), 1, "validation", 1, 0, "rank 0" if trainer == "ddp_sim" else "self")
    plan.number = int(signal.SIGTERM)
    stopped = run_door("train", *words, logs=tmp_path / "stopped", before=partial(plant, plan))
    assert stopped.code == 75 and stopped.record["phase"] == "validation", stopped.output
    again = run_door("train", *words, "resume=auto", logs=tmp_path / "stopped")
    assert again.code == 0, again.output
    assert differences(last_of(again), last_of(whole)) == []
    assert not list(again.folder.checkpoints.glob("*-before-*")), "its step was saved twice"
    assert again.record["metrics"]["val/acc"] == whole.record["metrics"]["val/acc"]


def test_what_is_saved_is_the_average_and_beside_it_what_is_trained(tmp_path):
    done = run_door("train", *WORDS, "trainer=cpu", logs=tmp_path)
    state = last_of(done)
    trained, averaged = state["current_model_state"], state["state_dict"]
    apart = [name for name in averaged if not torch.equal(averaged[name], trained[name])]
    assert apart and averaged.keys() == trained.keys()
    # After many steps an average of decay 0.9 lies within some steps of what is trained.
    for name in apart:
        if averaged[name].is_floating_point():
            assert (averaged[name] - trained[name]).abs().max() < 0.5
