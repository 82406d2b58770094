"""A rank that hangs, dies or fails ends the run, is named in the last line, and leaves stacks if it hung."""

import time

import pytest

from lockstep.callbacks.hang_dump import HangDump
from plain_task import Small, fit
from runs import run_door

TIMEOUT_S = 6
SMALL = ("experiment=quickstart", f"trainer.timeout_s={TIMEOUT_S}", "trainer.num_threads=1", "~callbacks.hardware")


def harmed(tmp_path, how, trainer="ddp_sim", hook="on_train_batch_start"):
    flag = tmp_path / "flag"
    harm = f"+callbacks.harm={{_target_: faults.Harmed, how: {how}, flag: {flag}, hook: {hook}}}"
    done = run_door("train", *SMALL, f"trainer={trainer}", harm, logs=tmp_path)
    return done, time.monotonic() - float(flag.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "hook", "phase"),
    [
        ("fsdp_sim", "on_train_batch_start", "training"),
        ("ddp_sim", "on_validation_batch_start", "validation"),
    ],
)
def test_a_rank_that_sleeps_ends_the_run_and_is_named(trainer, hook, phase, tmp_path):
    done, seconds = harmed(tmp_path, "hangs", trainer, hook)
    error = done.record["error"]
    assert done.code == 1 and (error["rank"], error["phase"]) == (1, phase), done.output
    assert seconds < TIMEOUT_S + 30
    last = done.output.strip().splitlines()[-1]
    assert "rank 1 on" in last and "hangs" in last and "stack-rank1.txt" in last, done.output
    assert "faults.py" in (done.folder.path / "stack-rank1.txt").read_text()
    assert "torch" in (done.folder.path / "stack-rank0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "message"), [("dies", "killed by SIGKILL"), ("fails", "rank one is unhappy")])
def test_a_rank_that_dies_or_fails_is_named_at_once(how, message, tmp_path):
    done, seconds = harmed(tmp_path, how)
    error = done.record["error"]
    assert done.code == 1 and (error["rank"], error["phase"]) == (1, "training"), done.output
    assert message in done.output.strip().splitlines()[-1] and seconds < 25


def test_a_plain_trainer_writes_the_stack_of_a_slow_step(tmp_path):
    class Slow(Small):
        def training_step(self, batch, batch_idx):
            time.sleep(1.2 * (batch_idx == 1))
            return super().training_step(batch, batch_idx)

    fit(Slow(), HangDump(timeout_s=0.5), max_steps=2, default_root_dir=tmp_path)
    assert "in training_step" in (tmp_path / "stack-rank0.txt").read_text()
