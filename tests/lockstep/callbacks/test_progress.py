"""Off a terminal: a line for each epoch, short ones summed up, the last always."""

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
        fit_loop=SimpleNamespace(epoch_loop=loop),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("epoch_s", "epochs", "shown"),
    [
        (6.0, 4, [1, 2, 3, 4]),  # long enough for a line each
        (1.0, 50, [21, 42, 50]),  # a quickstart on a slow machine
        (0.1, 10, [10]),
    ],
)
def test_which_epochs_have_a_line(monkeypatch, caplog, epoch_s, epochs, shown):
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO", logger=module.__name__)
    trainer = trainer_at(20, epochs)
    callback = Progress()
    for trainer.current_epoch in range(epochs):
        callback.on_train_epoch_start(trainer, None)
        clock[0] += epoch_s
        callback.on_train_epoch_end(trainer, None)
    assert caplog.messages == [f"epoch {number}/{epochs} · done · val acc 50.00%" for number in shown]


def test_a_validation_within_an_epoch_has_a_line_and_so_has_an_end_there(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO", logger=module.__name__)
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


def test_a_long_evaluation_has_lines_within_it(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO", logger=module.__name__)
    trainer, callback = trainer_at(8, 3), Progress(interval_s=30)
    trainer.num_val_batches, trainer.num_test_batches = [9], [7]
    for start, end in (
        (callback.on_validation_start, callback.on_validation_batch_end),
        (callback.on_test_start, callback.on_test_batch_end),
    ):
        clock[0] += 100.0
        start(trainer, None)
        for batch in range(7):
            clock[0] += 10.0
            end(trainer, None, None, None, batch, 0)
    assert caplog.messages == ["validating 4/9", "testing 4/7"]


def test_on_a_terminal_the_bar_says_how_far_an_evaluation_is(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 5.0))
    trainer, callback, shown = trainer_at(8, 3), Progress(), []
    trainer.num_val_batches = [9]
    callback.bar, callback.task = SimpleNamespace(update=lambda task, words: shown.append(words)), 0
    callback.on_validation_batch_end(trainer, None, None, None, 2, 0)
    assert shown == ["validating 3/9"]
