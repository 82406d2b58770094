"""Event files are rank zero's, and made when there is something to write."""

import pytest
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.callbacks.tensorboard import TensorBoard


@pytest.fixture
def rank(monkeypatch):
    return lambda value: monkeypatch.setattr(rank_zero_only, "rank", value, raising=False)


def test_asking_for_the_experiment_writes_nothing_and_using_it_does(tmp_path, rank):
    rank(0)
    board = TensorBoard(tmp_path / "tensorboard")
    assert board.experiment is not None and board.writer is None  # what Lightning does at the start
    assert not (tmp_path / "tensorboard").exists()
    board.experiment.add_scalar("own", 2.5, 7)
    board.log_metrics({"loss": 1.5, "epoch": 0.0}, step=8)
    board.finalize("success")
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == {"own", "loss"}
    assert [(event.step, event.value) for event in found.Scalars("own")] == [(7, 2.5)]


def test_other_ranks_write_no_file(tmp_path, rank):
    rank(1)
    board = TensorBoard(tmp_path / "tensorboard")
    board.experiment.add_scalar("own", 2.5, 7)
    board.log_metrics({"loss": 1.5}, step=8)
    board.finalize("success")
    assert board.writer is None and not (tmp_path / "tensorboard").exists()
