"""Off a terminal: a line for each epoch, short ones summed up, the last always."""

from types import SimpleNamespace

import pytest

from lockstep.callbacks import progress as module
from lockstep.callbacks.progress import Progress


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
    trainer = SimpleNamespace(is_global_zero=True, max_epochs=epochs, callbacks=[], callback_metrics={"val/acc": 0.5})
    callback = Progress()
    for trainer.current_epoch in range(epochs):
        callback.on_train_epoch_start(trainer, None)
        clock[0] += epoch_s
        callback.on_train_epoch_end(trainer, None)
    assert caplog.messages == [f"epoch {number}/{epochs} · done · val acc 50.00%" for number in shown]
