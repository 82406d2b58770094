"""The checkpoints that a run writes, and how they are written and read."""

import enum
import logging
import math
from collections import Counter
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from local_ranks import meet, run_ranks
from lockstep.callbacks import checkpoints
from lockstep.callbacks.checkpoints import Checkpoints, refuse_non_finite
from lockstep.callbacks.interruption import Interruption
from lockstep.checkpoints.files import Sidecar, complete_checkpoints, newest_whole, write_sidecar
from lockstep.checkpoints.io import CheckpointFiles, copy_to_host, write_checkpoint
from lockstep.checkpoints.load import load_on_all_ranks, read_checkpoint
from lockstep.checkpoints.random_state import random_state, set_random_state
from lockstep.process.errors import Diverged, UserError
from plain_task import Numbers, Regression, Small, TwoOptimizers, fit
from runs import run_script


@pytest.mark.parametrize(("saved", "here", "wanted"), [([7], 1, [7]), ([5, 6, 7], 2, [5, 6])])
def test_the_generators_of_all_gpus_of_a_process_come_back(monkeypatch, saved, here, wanted):
    """Through torch.cuda's own calls, for GPUs that are not here."""
    found = [None] * here
    for name, value in {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: here,
        "get_rng_state": lambda: torch.tensor(saved[0]), "get_rng_state_all": lambda: list(torch.tensor(saved)),
        "set_rng_state": lambda state, device: found.__setitem__(device if device != "cuda" else 0, state.item()),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    set_random_state(random_state())
    assert found == wanted
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert random_state()["cuda"].item() == saved[0], "a rank of several keeps its own alone"


def test_a_rank_with_several_gpus_keeps_their_generators(monkeypatch):
    states = dict(enumerate([5, 6, 7, 8]))
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 4,
        "get_rng_state": lambda gpu: torch.tensor(states[gpu]),
        "set_rng_state": lambda state, gpu: states.__setitem__(gpu, state.item()),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    of_rank_one = [torch.device("cuda", 2), torch.device("cuda", 3)]
    saved = random_state(devices=of_rank_one)
    states.update({2: 0, 3: 0})
    set_random_state(saved, devices=of_rank_one)
    assert states == {0: 5, 1: 6, 2: 7, 3: 8}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("interval", "is_said"), [("step", True), ("epoch", False)])
def test_a_plateau_of_steps_is_not_exact_over_a_resume(interval, is_said, tmp_path, caplog):
    class Plateau(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            options = {"scheduler": schedule, "monitor": "loss", "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": options}

    caplog.set_level(logging.INFO, "lockstep")
    fit(Plateau(), Checkpoints(tmp_path))
    assert ("with interval=step may miss one value" in caplog.text) is is_said


@pytest.mark.parametrize(
    ("options", "value", "is_best"),
    [
        ({}, 0.9, False),
        ({}, 0.96, True),
        ({"monitor": "val/loss", "mode": "min"}, 2.5, True),
        ({}, math.nan, False),
    ],
)
def test_a_resumed_run_knows_the_best_of_its_monitor(tmp_path, options, value, is_best):
    here, told = tmp_path / "best-step00000040.ckpt", []
    here.write_bytes(b"weights")
    write_sidecar(here, Sidecar(40, metric={"val/acc": 0.95}))
    callback = Checkpoints(tmp_path, **options)
    recorder = SimpleNamespace(
        on_checkpoint_complete=lambda path, sidecar, kind: told.append((path, kind))
    )
    trainer = SimpleNamespace(
        is_global_zero=True, ckpt_path="last.ckpt", callbacks=[recorder], lr_scheduler_configs=[],
        strategy=SimpleNamespace(broadcast=lambda value, src: value), sanity_checking=False,
        callback_metrics={callback.monitor: torch.tensor(value)},
    )  # fmt: skip
    callback.on_fit_start(trainer, None)
    assert callback.best_path == here and told == [(here, "best")] and here.exists()
    assert callback._update_best(trainer) is is_best


@pytest.mark.filterwarnings("ignore")
def test_a_run_stopped_in_its_test_tests_the_best_later(tmp_path):
    """Lightning then trains nothing and does not call on_train_start."""
    trainer = fit(Small(), Checkpoints(tmp_path))
    best, last = (next(complete_checkpoints(tmp_path, kind))[0] for kind in ("best", "last"))
    again = Checkpoints(tmp_path)
    trainer.callbacks = [again]
    trainer.fit(Small(), trainer.train_dataloader, ckpt_path=last)
    assert again.best_path == best


def test_a_monitor_that_nothing_logs_is_named(tmp_path, caplog):
    metrics = {"accuracy": torch.tensor(0.5)}
    trainer = SimpleNamespace(
        is_global_zero=True, enable_validation=True, sanity_checking=True, callback_metrics=metrics,
        num_sanity_val_batches=[2],
    )  # fmt: skip
    callback = Checkpoints(tmp_path)
    callback.on_validation_end(trainer, None)
    callback.on_train_end(trainer, None)
    assert (
        caplog.messages
        == ["No best checkpoint: task.monitor=val/acc is not logged; there is accuracy."] * 2
    )


@pytest.mark.filterwarnings("ignore")
def test_a_value_loss_does_not_refuse_the_monitor(tmp_path, caplog):
    class Actor(Small):
        def training_step(self, batch, batch_idx):
            self.log("value_loss", 1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            pass

    fit(Actor(), Checkpoints(tmp_path), val_loader=DataLoader(torch.ones(1, 2)))
    assert "No best checkpoint: task.monitor=val/acc is not logged" in caplog.text


def test_an_error_of_the_writing_thread_ends_training(tmp_path):
    callback = Checkpoints(tmp_path, asynchronous=True)
    callback.writer.job = Future()
    callback.writer.job.set_exception(FileNotFoundError())
    with pytest.raises(FileNotFoundError):
        callback.finish_writing(None)
    callback.finish_writing(None)


@pytest.mark.parametrize(
    ("device", "option", "writes_beside"),
    [("cuda", "auto", True), ("cpu", "auto", False), ("cuda", False, False)],
)
def test_checkpoints_are_written_beside_the_training_on_gpus(device, option, writes_beside):
    callback = Checkpoints("checkpoints", asynchronous=option)
    strategy = SimpleNamespace(root_device=torch.device(device), checkpoint_io=CheckpointFiles())
    callback.setup(SimpleNamespace(strategy=strategy), None, "test")
    assert callback.asynchronous is writes_beside


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("writes_beside", "epochs"), [(True, [2]), (False, [0, 1, 2])])
def test_an_epochs_last_waits_for_no_checkpoint_but_the_last(writes_beside, epochs, tmp_path):
    class Busy(Checkpoints):
        """It is always writing."""

        def save(self, trainer, *kinds):
            saved.append((self.ended_epoch.epoch, *kinds))

        def finish_writing(self, trainer):
            pass

    saved = []
    callback = Busy(tmp_path, asynchronous=writes_beside)
    callback.writer.job = Future()
    fit(Small(), callback, max_epochs=3)
    assert [epoch for epoch, *kinds in saved if "last" in kinds] == epochs


class Exact(torch.optim.SGD):
    """An optimizer whose state has a value that is not loaded from files."""

    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["share"] = Fraction(1, 2)
        return super().step(closure)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights_only", [False, True])
def test_an_optimizer_state_that_cannot_be_loaded_is_refused(weights_only, tmp_path):
    class Adds(Small):
        def configure_optimizers(self):
            return Exact(self.parameters(), 0.1)

    with pytest.raises(UserError, match="fractions.Fraction, which is not loaded from files"):
        fit(Adds(), Checkpoints(tmp_path, weights_only=weights_only), max_epochs=9)
    assert list(tmp_path.glob("*.ckpt")) == []


@pytest.mark.filterwarnings("ignore")
def test_contents_that_could_not_be_loaded_are_refused_early(tmp_path):
    class Adds(Small):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["place"] = tmp_path

    with pytest.raises(
        UserError, match="on_save_checkpoint adds pathlib.PosixPath, which is not loaded from files"
    ):
        fit(Adds(), Checkpoints(tmp_path), max_epochs=9)
    assert list(tmp_path.glob("*.ckpt")) == []


def test_options_that_make_no_sense_are_refused(tmp_path):
    for options in ({"every_n_epochs": 0}, {"mode": "best"}, {"monitor": "val/loss"}):
        with pytest.raises(UserError, match=f"callbacks.checkpoints.{next(iter(options))}="):
            Checkpoints(tmp_path, **options)


@pytest.mark.parametrize(
    ("monitor", "mode", "right"),
    [("val_rmse", "max", "min"), ("val/image_error", "max", "min"), ("val/acc", "min", "max")],
)
def test_a_mode_that_keeps_the_worst_is_refused(monitor, mode, right, tmp_path):
    with pytest.raises(UserError, match=f"give task.mode={right}"):
        Checkpoints(tmp_path, monitor=monitor, mode=mode)
    Checkpoints(tmp_path, monitor=monitor, mode=right)
    Checkpoints(tmp_path, monitor="val/error_recall_of_mine", mode=mode)


@pytest.mark.slow
def test_a_best_without_optimizer_leaves_the_last_to_resume(tmp_path):
    words = [
        "experiment=quickstart",
        "run_id=r",
        "trainer.num_threads=1",
        "~callbacks.hardware",
        "seed=1",
    ]
    small = ["callbacks.checkpoints.weights_only=true", "callbacks.checkpoints.every_n_epochs=5"]
    done = run_script("train", *words, *small, "trainer.max_epochs=2", logs=tmp_path / "small")
    assert done.code == 0 and done.record["metrics"]["test/acc"] > 0.3, done.output
    [(best, sidecar)], [(last, _)] = (
        complete_checkpoints(done.folder.checkpoints, kind) for kind in ("best", "last")
    )
    assert sidecar.weights_only and best.stat().st_size < 0.4 * last.stat().st_size
    assert (
        read_checkpoint(best)["optimizer_states"] == []
        and read_checkpoint(last)["optimizer_states"]
    )
    assert (
        newest_whole(done.folder.checkpoints) == last
        and newest_whole(done.folder.checkpoints, kind="best") == best
    )
    last.unlink()
    assert newest_whole(done.folder.checkpoints) is None, "weights alone are not enough to go on"
    tested = run_script("eval", f"ckpt_path={best}", logs=tmp_path / "eval")
    assert tested.code == 0 and "test/acc" in tested.output, tested.output


@pytest.mark.parametrize("value", [-60000.0, float("nan"), -float("inf")])
def test_weights_that_are_not_finite_are_not_saved(value):
    module = torch.nn.Module()
    module.weights = torch.nn.ParameterList(
        [torch.full((3,), 60000.0), torch.tensor([1.0, value]), torch.zeros(0)]
    )
    strategy = SimpleNamespace(reduce_boolean_decision=lambda finite, all: finite)
    trainer = SimpleNamespace(lightning_module=module.half(), strategy=strategy, global_step=7)
    if math.isfinite(value):
        return refuse_non_finite(trainer)
    with pytest.raises(Diverged, match="nan or inf by step 7: nothing was saved"):
        refuse_non_finite(trainer)


# Checkpoints are read once for all ranks, and copied before training changes them.


def loaded(cluster, folder):
    """Each rank has a folder of its own; only rank 0's holds the file."""
    meet(cluster)
    found, refused = load_on_all_ranks(Path(folder) / f"{cluster.rank}" / "x.ckpt"), []
    for name in ("torn.ckpt", "none.ckpt", "unreadable.ckpt"):
        try:
            load_on_all_ranks(Path(folder) / f"{cluster.rank}" / name)
        except UserError as error:
            refused.append(str(error))
    return found["state_dict"]["w"].sum().item(), refused


def test_rank_zero_reads_a_checkpoint_for_all_ranks(tmp_path):
    state = {"w": torch.ones(20_000_000)}  # more than one message
    write_checkpoint({"state_dict": state}, tmp_path / "0" / "x.ckpt")
    (tmp_path / "0" / "torn.ckpt").write_bytes((tmp_path / "0" / "x.ckpt").read_bytes()[:-1000])
    (tmp_path / "0" / "unreadable.ckpt").symlink_to("/proc/self/mem")
    results = run_ranks(loaded, 2, str(tmp_path))
    assert [total for total, _ in results] == [2e7, 2e7]
    for _, (torn, none, unreadable) in results:
        assert "torn.ckpt is not a checkpoint that can be loaded" in torn
        assert none.startswith("There is no checkp")
        assert "unreadable.ckpt cannot be read: " in unreadable


def test_the_copy_does_not_change_with_the_weights():
    weights = torch.arange(4.0)
    state = {"w": weights, "tied": weights[:], "plain": [1, {"a": 2}]}
    copied = copy_to_host(state, copy_cpu_tensors=True)
    weights.zero_()
    state["plain"][1]["a"] = 3
    assert copied["w"].tolist() == [0, 1, 2, 3] and copied["plain"] == [1, {"a": 2}]
    assert copied["tied"] is copied["w"]


def test_a_copy_of_a_counter_has_its_numbers():
    # MultiStepLR counts its milestones in one.
    milestones = Counter({3: 1, 8: 2})
    copied = copy_to_host({"milestones": milestones}, copy_cpu_tensors=True)["milestones"]
    assert copied == milestones and isinstance(copied, Counter) and copied is not milestones


@pytest.mark.filterwarnings("ignore")
def test_two_optimizers_are_validated_where_max_steps_end(tmp_path):
    class Two(TwoOptimizers):
        def validation_step(self, batch, batch_idx):
            self.log("val/acc", 0.5)

    trainer = fit(
        Two(), Checkpoints(tmp_path), max_steps=3, val_loader=DataLoader(torch.ones(2, 2))
    )
    assert trainer.global_step == 4, "two at once"
    assert [sidecar.step for _, sidecar in complete_checkpoints(tmp_path, "best")] == [4]


class WithNet(Small):
    """A module with an object among its hyperparameters."""

    def __init__(self, net, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.net = net


@pytest.mark.filterwarnings("ignore")
def test_the_log_names_hyperparameters_that_a_checkpoint_leaves_out(tmp_path, caplog):
    caplog.set_level("INFO")
    fit(WithNet(torch.nn.Linear(2, 1), 5), Checkpoints(tmp_path, asynchronous=False), max_epochs=2)
    told = [line for line in caplog.messages if "objects" in line]
    assert len(told) == 1 and "WithNet.load_from_checkpoint(PATH, net=…)" in told[0]

    path = newest_whole(tmp_path, "last")
    loaded = WithNet.load_from_checkpoint(path, net=torch.nn.Linear(2, 1), weights_only=True)
    saved = read_checkpoint(path)["state_dict"]["net.weight"]
    assert loaded.hparams["width"] == 5 and torch.equal(loaded.net.weight.cpu(), saved)


@pytest.mark.parametrize(
    ("values", "chosen", "is_warned"),
    [
        ([0.5, 0.5], 0.5, False),
        ([0.5, 0.5 + 1e-9], 0.5, False),
        ([0.5, 0.7], 0.6, True),
        ([0.5, None], 0.5, False),
        ([math.nan, float("nan")], math.nan, False),
        ([0.5, math.nan], math.nan, False),
        ([None, None], math.nan, False),
    ],
)
def test_ranks_of_different_values_have_their_mean_and_are_named(
    values, chosen, is_warned, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("lockstep.callbacks.checkpoints.gather_objects", lambda value: values)
    trainer = SimpleNamespace(callback_metrics={}, is_global_zero=True)
    value = Checkpoints(tmp_path)._mean_over_ranks(trainer)
    assert value == pytest.approx(chosen, nan_ok=True)
    assert ("without sync_dist=True" in caplog.text) is is_warned


class Mode(enum.StrEnum):
    FAST = "fast"


@pytest.mark.filterwarnings("ignore")
def test_hyperparameters_of_other_libraries_spoil_no_checkpoint(tmp_path):
    class Configured(Small):
        def __init__(self, rate, mode, config):
            super().__init__()
            self.save_hyperparameters()

    config = OmegaConf.create({"width": 5})
    fit(Configured(np.float64(0.5), Mode.FAST, config), Checkpoints(tmp_path), max_epochs=1)
    kept = read_checkpoint(newest_whole(tmp_path, "last"))["hyper_parameters"]
    assert kept == {"rate": 0.5, "config": {"width": 5}}


@pytest.mark.filterwarnings("ignore")
def test_a_config_as_hyperparameters_spoils_no_checkpoint(tmp_path):
    class Configured(Small):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    fit(Configured(OmegaConf.create({"width": 5})), Checkpoints(tmp_path), max_epochs=1)
    checkpoint = read_checkpoint(newest_whole(tmp_path, "last"))
    assert checkpoint["hyper_parameters"] == {"width": 5}
    assert pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE not in checkpoint


@pytest.mark.filterwarnings("ignore")
def test_a_metric_of_whole_validations_alone_is_taken(tmp_path):
    class Late(Regression):
        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                self.log("val_fid", torch.tensor(1.0))

    callback = Checkpoints(tmp_path, "val_fid", "min")
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], **dict.fromkeys(off, False)
    )
    trainer.fit(Late(), datamodule=Numbers())
    assert callback.best_value == 1.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("minutes", "steps"), [(0.4, []), (0.0, [3])])
def test_a_save_that_is_late_waits_for_no_log_point(minutes, steps, tmp_path, monkeypatch):
    """Every step takes 20 s here, and the first log point would be the step 50."""
    clock = iter(range(0, 10**6, 20))
    saved = []

    class Slow(Small):
        def on_train_batch_start(self, *_):
            self.now = next(clock)

    module = Slow()
    callback = Checkpoints(tmp_path, every_minutes=minutes)
    clock_of_module = SimpleNamespace(monotonic=lambda: getattr(module, "now", 0))
    monkeypatch.setattr(checkpoints, "time", clock_of_module)
    monkeypatch.setattr(
        callback, "save", lambda trainer, *kinds: saved.append((trainer.global_step, kinds))
    )
    fit(module, Interruption(), callback, batches=4, max_epochs=1, log_every_n_steps=50)
    assert [step for step, kinds in saved if step < 4] == steps


@pytest.mark.filterwarnings("ignore")
def test_a_monitor_that_is_nan_is_named(tmp_path, caplog):
    class Correlation(Small):
        def validation_step(self, batch, batch_idx):
            self.log("val/r2", float("nan"))

    callback = Checkpoints(tmp_path, monitor="val/r2", mode="max")
    fit(Correlation(), callback, val_loader=DataLoader(torch.ones(1, 2)), max_epochs=1)
    assert "No best checkpoint yet: task.monitor=val/r2 is nan." in caplog.text
