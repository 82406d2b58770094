"""Options that a resume changes, from the command line: what is refused, and what takes effect."""

import csv
import shutil
import time
from functools import partial

import pytest
import timm
import torch

from faults import signal_at_step
from kills import weights
from lockstep.records.folder import RunFolder
from runs import run_script, succeed

# Four steps an epoch; plain SGD, so that a rate or a clipped gradient shows in the weights.
WORDS = [
    "experiment=quickstart",
    "optimizer=sgd",
    "optimizer.momentum=0",
    "optimizer.nesterov=false",
    "optimizer.weight_decay=0",
    "trainer.limit_train_batches=4",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=1",
    "test=false",
    "run_id=r",
]
STOPPED_AT = 6


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the logs of a run that was stopped in its second epoch."""
    logs = tmp_path_factory.mktemp("stopped")
    done = run_script("train", *WORDS, logs=logs, before=partial(signal_at_step, STOPPED_AT))
    assert done.code == 75, done.output
    return logs


@pytest.fixture
def logs(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "logs")
    return tmp_path / "logs"


def rates(done):
    """Return the learning rate that metrics.csv has for each step."""
    with done.folder.metrics.open(newline="") as file:
        return {int(row["step"]): float(row["lr"]) for row in csv.DictReader(file) if row["lr"]}


REFUSED = {
    "scheduler=none": "started with another scheduler",
    "+optimizer.eps=1e-4": "another optimizer (eps was not set, now 0.0001)",
    "trainer.max_epochs=1": "is in epoch 2 already: give trainer.max_epochs=2 or more",
    "trainer.max_steps=5": "is in step 6 already: give trainer.max_steps=6 or more",
    "scheduler=linear": "started with another scheduler",
    "scheduler.warmup_epochs=1": "another scheduler (warmup_epochs was 0.0, now 1)",
    "trainer.ema_decay=0.9": "another trainer (ema_decay was None, now 0.9)",
    "ckpt_path=r": "goes on from its own checkpoints, and ckpt_path=r would have no effect",
    "~optimizer.momentum": "another optimizer (momentum was 0, now not set)",
}
QUICK = ("scheduler=none", "+optimizer.eps=1e-4", "trainer.max_epochs=1", "ckpt_path=r")


@pytest.mark.parametrize(
    "word",
    [
        *QUICK,
        *(pytest.param(word, marks=pytest.mark.slow) for word in REFUSED if word not in QUICK),
    ],
)
def test_a_changed_option_is_refused_in_one_sentence(word, logs):
    done = run_script("train", "resume=r", word, logs=logs)
    assert done.code == 2, done.output
    assert REFUSED[word] in done.output.strip().splitlines()[-1]
    assert "Traceback" not in done.output
    assert done.record["status"] == "interrupted"


@pytest.mark.slow
def test_a_length_that_is_over_ends_both_ranks(logs):
    began = time.monotonic()
    done = run_script("train", "resume=r", "trainer=ddp_sim", "trainer.max_epochs=1", logs=logs)
    assert done.code == 2, done.output
    assert (
        "is in epoch 2 already: give trainer.max_epochs=2" in done.output.strip().splitlines()[-1]
    )
    assert "Traceback" not in done.output
    assert time.monotonic() - began < 45


@pytest.mark.slow
def test_more_epochs_follow_the_curve_of_the_new_length(logs, tmp_path):
    whole = succeed("train", *WORDS, "trainer.max_epochs=5", logs=tmp_path / "whole")
    done = succeed("train", "resume=r", "trainer.max_epochs=5", logs=logs)
    late = [step for step in rates(done) if step > STOPPED_AT + 1]
    assert len(late) > 10
    assert {step: rates(done)[step] for step in late} == {step: rates(whole)[step] for step in late}


@pytest.mark.slow
def test_a_schedule_that_keeps_its_length_refuses_another_one(tmp_path):
    cycle = ["scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "+scheduler.max_lr=0.1"]
    cycle += ["optimizer.momentum=0.9"]
    stopped = run_script(
        "train", *WORDS, *cycle, logs=tmp_path, before=partial(signal_at_step, STOPPED_AT)
    )
    assert stopped.code == 75, stopped.output
    longer = run_script("train", "resume=r", "trainer.max_epochs=5", logs=tmp_path)
    assert longer.code == 2, longer.output
    assert "OneCycleLR total_steps=12" in longer.output.strip().splitlines()[-1]
    assert succeed("train", "resume=r", "trainer.max_epochs=3", logs=tmp_path).record["steps"] == 12


@pytest.mark.slow
def test_a_new_gradient_limit_holds_from_the_resume_on(logs):
    before = weights(RunFolder(logs / "train" / "runs" / "r"))
    done = succeed("train", "resume=r", "trainer.gradient_clip_val=1e-12", logs=logs)
    assert "Changed from here on: trainer.gradient_clip_val was None, now 1e-12" in done.output
    assert done.record["steps"] == 12
    after = weights(done.folder)
    assert max(float((after[name] - value).abs().max()) for name, value in before.items()) < 1e-7


@pytest.mark.slow
def test_other_weights_of_the_net_are_said_to_be_unread(tmp_path):
    weights_of_net = tmp_path / "net.pth"
    torch.save(timm.create_model("test_resnet").state_dict(), weights_of_net)
    words = [*WORDS, "model=timm", "model.name=test_resnet", f"model.weights={weights_of_net}"]
    words += ["data.image_size=32", "trainer.limit_train_batches=1", "trainer.limit_val_batches=1"]
    stopped = run_script("train", *words, logs=tmp_path, before=partial(signal_at_step, 2))
    assert stopped.code == 75, stopped.output
    without = run_script("train", "resume=r", "model.weights=null", logs=tmp_path)
    assert without.code == 2, without.output
    assert f"another model (weights was '{weights_of_net}', now None)" in without.output
    done = succeed("train", "resume=r", "model.weights=nosuch.pth", logs=tmp_path)
    assert done.output.count("model.weights=nosuch.pth is not read") == 1


@pytest.mark.slow
def test_a_job_script_with_a_plus_goes_on_and_ends(stopped, tmp_path):
    words = [*WORDS, "+optimizer.maximize=false", "~callbacks.progress", "resume=auto"]
    words.append(f"ckpt_path={stopped / 'train/runs/r'}")
    stopped = run_script("train", *words, logs=tmp_path, before=partial(signal_at_step, STOPPED_AT))
    assert stopped.code == 75, stopped.output
    assert succeed("train", *words, logs=tmp_path).record["steps"] == 12
    assert "has finished" in succeed("train", *words, logs=tmp_path).output
