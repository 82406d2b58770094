import pytest
import torch

from lockstep.process.errors import UserError
from schedulers.cosine import cosine, linear
from schedulers.step import step
from schedulers.wsd import wsd


def rates(scheduler, steps, *, lr=2.0, **own):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = scheduler(optimizer, **own)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


COSINE = 0.5**0.5


@pytest.mark.parametrize(
    ("scheduler", "own", "seen"),
    [
        (cosine, {"total_steps": 4, "steps_per_epoch": 2}, [2.0, 1 + COSINE, 1.0, 1 - COSINE, 0.0]),
        (cosine, {"total_steps": 7, "steps_per_epoch": 3, "warmup_epochs": 1.0, "final_share": 0.1},
         [0.5, 1.0, 1.5, 2.0, 1.1 + 0.9 * COSINE, 1.1, 1.1 - 0.9 * COSINE, 0.2, 0.2]),
        (linear, {"total_steps": 6, "steps_per_epoch": 2, "warmup_epochs": 0.5}, [1.0, 2.0, 1.6, 1.2, 0.8, 0.4, 0, 0]),
        (linear, {"total_steps": 4, "steps_per_epoch": 4, "final_share": 0.5}, [2, 1.75, 1.5, 1.25, 1]),
        (wsd, {"total_steps": 10, "steps_per_epoch": 2, "warmup_epochs": 0.5, "decay_share": 0.4, "final_share": 0.1},
         [1.0, *[2.0] * 6, 1.55, 1.1, 0.65, 0.2, 0.2]),
        (wsd, {"total_steps": 2, "steps_per_epoch": 2, "decay_share": 0}, [2.0, 2.0, 2.0]),
        (step, {"total_steps": 6, "steps_per_epoch": 2}, [2, 2, 1.4, 1.4, 0.98, 0.98]),
        (step, {"total_steps": 6, "steps_per_epoch": 2, "gamma": 0.1, "every_n_epochs": 2}, [2, 2, 2, 2, 0.2]),
    ],
)  # fmt: skip
def test_the_learning_rate_of_each_step(scheduler, own, seen):
    assert rates(scheduler, len(seen), **own) == pytest.approx(seen)


def test_a_share_above_one_is_refused():
    with pytest.raises(UserError, match="scheduler.decay_share=2"):
        rates(wsd, 1, total_steps=2, steps_per_epoch=2, decay_share=2)


@pytest.mark.parametrize("scheduler", [cosine, linear, wsd])
def test_a_warmup_that_never_ends_is_said(scheduler, caplog):
    rates(scheduler, 1, total_steps=9, steps_per_epoch=3, warmup_epochs=2.0)
    assert not caplog.text
    rates(scheduler, 1, total_steps=9, steps_per_epoch=3, warmup_epochs=3.0)
    assert (
        "takes 9 steps and training 9: the learning rate never reaches optimizer.lr" in caplog.text
    )
