"""A line for each epoch, short ones summed up, the last always."""

from types import SimpleNamespace

import pytest

from lockstep.callbacks import progress as module
from lockstep.callbacks.progress import Progress


def trainer_at(batch: int, epochs: int) -> SimpleNamespace:
    """A trainer that has done so many of an epoch's 20 batches."""
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(ready=batch)))
    return SimpleNamespace(
        is_global_zero=True, max_epochs=epochs, current_epoch=1, callbacks=[], callback_metrics={"val/acc": 0.5},
        should_stop=False, sanity_checking=False, num_training_batches=20, state=SimpleNamespace(fn="fit"),
        fit_loop=SimpleNamespace(epoch_loop=loop), num_val_batches=[9], num_test_batches=[7],
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch, caplog):
    """A list with the time in seconds."""
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO", logger=module.__name__)
    return clock


@pytest.mark.parametrize(
    ("epoch_s", "epochs", "shown"),
    [
        (6.0, 4, [1, 2, 3, 4]),  # long enough for a line each
        (1.0, 50, [20, 40, 50]),  # a quickstart on a slow machine
        (0.1, 10, [10]),
    ],
)
def test_which_epochs_have_a_line(clock, caplog, epoch_s, epochs, shown):
    trainer = trainer_at(20, epochs)
    callback = Progress()
    for trainer.current_epoch in range(epochs):
        callback.on_train_epoch_start(trainer, None)
        clock[0] += epoch_s
        callback.on_train_epoch_end(trainer, None)
    assert caplog.messages == [f"epoch {number}/{epochs} · done · val acc 50.00%" for number in shown]


def test_a_validation_within_an_epoch_has_a_line_and_so_has_an_end_there(clock, caplog):
    trainer, callback = trainer_at(8, 3), Progress()
    for passed in (4.0, 4.0):  # the first is too soon after the start
        clock[0] += passed
        callback.on_validation_end(trainer, None)
    trainer.should_stop = True
    callback.on_train_epoch_end(trainer, None)
    assert caplog.messages == [
        "epoch 2/3 · batch 8/20 · validated · val acc 50.00%",
        "epoch 2/3 · batch 8/20 · val acc 50.00%",
    ]
