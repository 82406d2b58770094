"""The norm that is logged is that of the global batch's gradient, under every strategy, and nothing
waits for it.
"""

import lightning.pytorch as pl
import pytest
import torch

from callbacks.gradient_norm import GradientNorm
from strategy_runs import Batches, Classifier, TinyNet, one, ranks_all, sgd

STEPS = 4


class Kept(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > len(self.values):
            self.values.append(trainer.callback_metrics["train/gradient_norm"].item())

    def __init__(self):
        self.values = []


def norms(trainer):
    return next(callback.values for callback in trainer.callbacks if isinstance(callback, Kept))


def settings(**more):
    return {"steps": STEPS, "callbacks": [GradientNorm(), Kept()], "inspect": norms, **more}


def by_hand():
    """Plain PyTorch on the global batches."""
    torch.manual_seed(3)
    module = Classifier(TinyNet(), sgd).double()
    optimizer, found = module.configure_optimizers(), []
    for index, (images, labels) in enumerate(Batches(STEPS, 0, 1, 1)):
        optimizer.zero_grad()
        module.training_step((images.double(), labels), index).backward()
        found.append(sum(float(p.grad.square().sum()) for p in module.parameters()) ** 0.5)
        optimizer.step()
    return found


def test_one_process_logs_what_plain_pytorch_has_before_clipping():
    assert one(**settings())["inspect"] == pytest.approx(by_hand(), rel=1e-12)
    clipped = one(**settings(clip=1e-3))["inspect"]
    assert clipped[0] == pytest.approx(by_hand()[0], rel=1e-12) and clipped[1] > 1e-3


@pytest.mark.slow
def test_every_strategy_logs_the_same_norm():
    exact = [
        (name, settings(accumulate=k)) for name in ("ddp", "fsdp", "allreduce") for k in (1, 2)
    ]
    *found, scaled = ranks_all(2, [*exact, ("fsdp", settings(precision="16-mixed"))])
    for (name, _), ranks in zip(exact, found, strict=True):
        assert all(rank["inspect"] == pytest.approx(by_hand(), rel=1e-12) for rank in ranks), name
    assert scaled[0]["inspect"] == pytest.approx(by_hand(), rel=2e-2)
