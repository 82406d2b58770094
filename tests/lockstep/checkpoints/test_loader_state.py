"""A resumed run has the batches, losses and weights of a run without a stop, whatever its loader.

Lightning's own loop trains, in one process; a run that is killed raises where it would die.
"""

import random
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    OnExceptionCheckpoint,
)
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.files import newest_whole
from lockstep.checkpoints.load import read_checkpoint
from lockstep.checkpoints.resume_point import EPOCH_END, TRAINING, VALIDATION
from lockstep.process.errors import Interrupted, UserError
from lockstep.ranks import collectives
from lockstep.training.task import Task
from plain_task import fit

pytestmark = pytest.mark.filterwarnings("ignore")

ITEMS = 24
BATCHES = 6  # of 4 items


def noise() -> float:
    return torch.rand(()).item() + np.random.rand() + random.random()


class Items(Dataset):
    """Numbers with noise from each global generator, as random transforms have it."""

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        return torch.tensor([index + 0.01 * noise(), 1.0])


class ItemsWithGenerator(Items):
    """Noise from a generator of the dataset."""

    def __init__(self):
        self.rng = np.random.default_rng(5)
        self.legacy = np.random.RandomState(5)
        self.python = random.Random(5)

    def __getitem__(self, index):
        drawn = self.rng.random() + self.legacy.rand() + self.python.random()
        return torch.tensor([index + 0.01 * drawn, 1.0])


class Quiet(Items):
    def __getitem__(self, index):
        return torch.tensor([float(index), 1.0])


class Stream(IterableDataset):
    """Items without a length, shuffled by Python's generator."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        order = list(range(ITEMS))
        random.shuffle(order)
        return (self.items[index] for index in order)


class Resumable:
    """A loader with a state: where the next iteration begins in an epoch.

    Like torchdata's StatefulDataLoader, the state at an epoch's end is that all batches are done.
    """

    def __init__(self, batches=BATCHES):
        self.batches = batches
        self.first = self.done = 0

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.done = self.first
        self.first = 0
        order = torch.randperm(self.batches, generator=torch.Generator().manual_seed(3)).tolist()
        for index in order[self.done :]:
            self.done += 1
            yield torch.tensor([[float(index), 1.0]])

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.first = state["done"]


class Endless(Resumable):
    """A loader whose state is the position in a stream that goes on over epochs."""

    def __iter__(self):
        for _ in range(BATCHES):
            self.done += 1
            yield torch.tensor([[float(self.done), 1.0]])

    def load_state_dict(self, state):
        self.done = state["done"]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def replaced():
    return RandomSampler(Items(), replacement=True, num_samples=ITEMS, generator=seeded())


def weighted():
    return WeightedRandomSampler(torch.arange(1.0, ITEMS + 1), ITEMS)


LOADERS = {
    "shuffle": lambda: DataLoader(Items(), 4, shuffle=True),
    "generator": lambda: DataLoader(Items(), 4, shuffle=True, generator=seeded()),
    "dataset": lambda: DataLoader(ItemsWithGenerator(), 4, shuffle=True),
    "weighted": lambda: DataLoader(Items(), 4, sampler=weighted()),
    "replaced": lambda: DataLoader(Items(), 4, sampler=replaced()),
    "subset": lambda: DataLoader(Items(), 4, sampler=SubsetRandomSampler(range(ITEMS))),
    "batch_sampler": lambda: DataLoader(Items(), batch_sampler=BatchSampler(weighted(), 4, True)),
    "stream": lambda: DataLoader(Stream(Quiet()), 4),
    "two": lambda: [DataLoader(Items(), 4, shuffle=True), DataLoader(Items(), 6, shuffle=True)],
    "shorter": lambda: [
        DataLoader(Items(), 4, shuffle=True),
        DataLoader(Subset(Items(), range(16)), 4, shuffle=True),
    ],
    "resumable": Resumable,
    "resumable_shorter": lambda: [Resumable(), Resumable(4)],
    "endless": Endless,
}
WORKERS = {
    "workers": lambda: DataLoader(Items(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        Quiet(), 4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "workers_generator": lambda: DataLoader(Items(), 4, sampler=replaced(), num_workers=2),
    "workers_stream": lambda: DataLoader(Stream(Items()), 4, num_workers=1),
}
NOISY_STREAM = {"noisy_stream": lambda: DataLoader(Stream(Items()), 4)}
ALL = LOADERS | WORKERS | NOISY_STREAM


def with_slow(names):
    """Mark loaders with workers, which start them in each epoch, as slow but one."""
    slow = WORKERS.keys() - {"workers"}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


class Noisy(pl.LightningModule):
    """A module that draws in its steps and hooks, and keeps what it has trained on."""

    def __init__(self, on_batch=None, on_validation=None):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(()))
        self.on_batch = on_batch
        self.on_validation = on_validation
        self.seen = []

    def on_train_epoch_start(self):
        self.scale.fill_(1 + 0.01 * noise())

    def training_step(self, batch, batch_idx):
        x = torch.cat(batch) if isinstance(batch, list) else batch
        loss = (self.layer(torch.dropout(x, 0.5, True)) * self.scale - noise()).square().mean()
        self.seen.append((self.current_epoch, batch_idx, x.tolist(), loss.item()))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.on_batch:
            self.on_batch(self.current_epoch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).mean() + noise())
        if self.on_validation:
            self.on_validation(self.global_step, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def no_logger():
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return dict.fromkeys(names, False)


def start(folder, loader, *callbacks, resume=False, val=None, make=Noisy, asks=None, **options):
    """Train as a process does that has just begun.

    Args:
        make: the class of the module.
        asks: what the module calls after a batch and in a validation, by the names of `Noisy`.
    """
    pl.seed_everything(1, verbose=False)
    module = make(**(asks or {}))
    checkpoints = Checkpoints(folder, "val_loss", "min", every_minutes=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, checkpoints],
        log_every_n_steps=2,
        **{"max_epochs": 3, **no_logger(), **options},
    )
    val = val or DataLoader(Items(), 4, shuffle=True)
    path = newest_whole(folder) if resume else None
    trainer.fit(module, loader(), val, ckpt_path=path)
    return module


def assert_equal(resumed, whole, num_batches):
    """Compare the end of a run without a stop, from batches to weights."""
    assert len(resumed.seen) == num_batches
    assert resumed.seen == whole.seen[-num_batches:]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


class Killed(Exception):
    pass


def kill_at(epoch, batch):
    def kill(*now):
        if now == (epoch, batch):
            raise Killed

    return kill


def killed(folder, loader, epoch, batch, **options):
    with pytest.raises(Killed):
        start(folder, loader, asks={"on_batch": kill_at(epoch, batch)}, **options)


def phase(folder):
    return read_checkpoint(newest_whole(folder))["lockstep"]["point"]["phase"]


@pytest.mark.parametrize("name", with_slow(ALL))
def test_a_run_killed_after_an_epoch_resumes_bit_for_bit(name, tmp_path):
    loader = ALL[name]
    whole = start(tmp_path / "whole", loader)
    killed(tmp_path / "r", loader, epoch=1, batch=0)
    assert phase(tmp_path / "r") == EPOCH_END
    assert_equal(start(tmp_path / "r", loader, resume=True), whole, 2 * BATCHES)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("name", with_slow([*LOADERS, *WORKERS]))
def test_a_run_killed_in_mid_epoch_resumes_bit_for_bit(name, epoch, tmp_path):
    loader = ALL[name]
    whole = start(tmp_path / "whole", loader)
    killed(tmp_path / "r", loader, epoch, batch=4)
    assert phase(tmp_path / "r") == TRAINING
    resumed = start(tmp_path / "r", loader, resume=True)
    assert_equal(resumed, whole, (3 - epoch) * BATCHES - 4)


def stopped(folder, loader, hook, at, **options):
    """Stop a run as SIGTERM does, where the module's hook comes to `at`."""
    interruption = Interruption()

    def ask(*now):
        if now == at:
            interruption.request_stop("SIGTERM")

    with pytest.raises(Interrupted):
        start(folder, loader, interruption, asks={hook: ask}, **options)


WITHIN = {"val_check_interval": 4}


@pytest.mark.parametrize(
    ("hook", "at", "options", "point", "left"),
    [
        ("on_batch", (0, 2), {}, TRAINING, 3 * BATCHES - 4),
        ("on_batch", (1, 2), {}, TRAINING, 2 * BATCHES - 4),
        ("on_validation", (6, 1), {}, VALIDATION, 2 * BATCHES),
        ("on_validation", (12, 0), {}, VALIDATION, BATCHES),
        ("on_validation", (4, 1), WITHIN, VALIDATION, 3 * BATCHES - 4),
        ("on_validation", (10, 1), WITHIN, VALIDATION, 2 * BATCHES - 4),
        ("on_batch", (1, 4), WITHIN, EPOCH_END, BATCHES),
    ],
    ids=["epoch0", "epoch1", "end0", "end1", "within0", "within1", "unvalidated"],
)
@pytest.mark.parametrize("name", ["shuffle", pytest.param("workers", marks=pytest.mark.slow)])
def test_a_run_stopped_by_a_signal_resumes_bit_for_bit(
    name, hook, at, options, point, left, tmp_path
):
    loader = ALL[name]
    whole = start(tmp_path / "whole", loader, **options)
    stopped(tmp_path / "r", loader, hook, at, **options)
    assert phase(tmp_path / "r") == point
    assert_equal(start(tmp_path / "r", loader, resume=True, **options), whole, left)


@pytest.mark.parametrize("name", with_slow(ALL))
def test_a_run_with_more_epochs_equals_a_longer_one(name, tmp_path):
    loader = ALL[name]
    whole = start(tmp_path / "whole", loader, max_epochs=4)
    start(tmp_path / "r", loader, max_epochs=2)
    resumed = start(tmp_path / "r", loader, resume=True, max_epochs=4)
    assert_equal(resumed, whole, 2 * BATCHES)


def persistent_val():
    return DataLoader(Quiet(), 4, shuffle=True, num_workers=1, persistent_workers=True)


class Scheduled(Noisy):
    """Its schedule asks for the number of steps, for which Lightning makes the loader."""

    def configure_optimizers(self):
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("sanity", [0, 2])
def test_persistent_validation_workers_draw_no_seed_after_a_resume(sanity, tmp_path):
    options = {"num_sanity_val_steps": sanity, "max_epochs": 2}
    loader = LOADERS["shuffle"]
    whole = start(tmp_path / "whole", loader, val=persistent_val(), **options)
    killed(tmp_path / "r", loader, epoch=1, batch=0, val=persistent_val(), **options)
    resumed = start(tmp_path / "r", loader, resume=True, val=persistent_val(), **options)
    assert_equal(resumed, whole, BATCHES)


@pytest.mark.parametrize("batch", [0, 4])
def test_a_schedule_that_counts_the_steps_keeps_the_order(batch, tmp_path):
    loader = LOADERS["shuffle"]
    whole = start(tmp_path / "whole", loader, make=Scheduled, max_epochs=2)
    killed(tmp_path / "r", loader, epoch=1, batch=batch, make=Scheduled, max_epochs=2)
    resumed = start(tmp_path / "r", loader, resume=True, make=Scheduled, max_epochs=2)
    assert_equal(resumed, whole, BATCHES - batch)


@pytest.mark.parametrize("epochs", [1, 2])
def test_loaders_made_anew_resume_bit_for_bit(epochs, tmp_path):
    options = {"reload_dataloaders_every_n_epochs": epochs}
    loader = LOADERS["shuffle"]
    whole = start(tmp_path / "whole", loader, **options)
    killed(tmp_path / "r", loader, epoch=1, batch=0, **options)
    assert_equal(start(tmp_path / "r", loader, resume=True, **options), whole, 2 * BATCHES)


def test_a_second_kill_in_an_epoch_resumes_bit_for_bit(tmp_path):
    loader = LOADERS["shuffle"]
    whole = start(tmp_path / "whole", loader)
    killed(tmp_path / "r", loader, epoch=0, batch=2)
    killed(tmp_path / "r", loader, epoch=0, batch=4, resume=True)
    assert_equal(start(tmp_path / "r", loader, resume=True), whole, 3 * BATCHES - 4)


def test_a_run_with_more_steps_equals_a_longer_one(tmp_path):
    """The end in mid-epoch has a validation, which the longer run has not."""
    loader = LOADERS["shuffle"]
    whole = start(tmp_path / "whole", loader)
    start(tmp_path / "r", loader, max_steps=8)
    assert_equal(start(tmp_path / "r", loader, resume=True), whole, 3 * BATCHES - 8)


def test_fewer_data_than_a_checkpoint_has_trained_are_refused(tmp_path):
    killed(tmp_path, LOADERS["shuffle"], epoch=0, batch=4)
    with pytest.raises(UserError, match="end after 2 batches, and the checkpoint has trained 4"):
        start(tmp_path, lambda: DataLoader(Subset(Items(), range(8)), 4), resume=True)


def test_what_an_exact_resume_needs_is_said_at_the_start(tmp_path, caplog):
    caplog.set_level("INFO", logger="lockstep")

    def said(loader):
        caplog.clear()
        start(tmp_path, loader, max_epochs=1, limit_val_batches=0)
        return " ".join(caplog.messages)

    plain = DataLoader(Quiet(), 4, shuffle=True)
    workers = {"num_workers": 1, "persistent_workers": True}
    persistent = DataLoader(Quiet(), 4, shuffle=True, **workers)
    assert "Resume" not in said(Resumable)
    assert "a stream that goes on over epochs loses" in said(lambda: [Resumable(), Resumable(4)])
    assert "in mid-epoch reads the first batches of the epoch again" in said(lambda: plain)
    assert "persistent workers draw differ" in said(lambda: persistent)
    assert "at an epoch's end only" in said(lambda: [Resumable(), plain])


def refuse(*_, **__):
    raise AssertionError("a collective")


def test_a_rank_that_fails_saves_without_the_others(tmp_path, monkeypatch):
    """Lightning's OnExceptionCheckpoint on one rank: no collective may wait for the other ranks."""

    def fail(*now):
        monkeypatch.setattr(collectives, "gather_objects", refuse)
        raise Killed

    callbacks = TrainingLog(4), OnExceptionCheckpoint(tmp_path / "failed")
    options = {"asks": {"on_batch": fail}, "enable_checkpointing": True}
    with pytest.raises(Killed):
        start(tmp_path, LOADERS["shuffle"], *callbacks, **options)
    content = read_checkpoint(tmp_path / "failed" / "on_exception.ckpt")
    assert content["lockstep"]["point"]["batches_done"] == 1


class Counting(Task):
    """Its second batch fails, and the other ranks are in another collective."""

    def __init__(self):
        super().__init__(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1))

    def training_step(self, batch, batch_idx):
        self.count(hits=batch[:, 0])
        if batch_idx == 1:
            self.trainer.strategy.reduce = refuse
            raise Killed
        return self.net(batch).sum()


def test_a_rank_that_fails_saves_its_counts_alone(tmp_path):
    with pytest.raises(Killed):
        fit(Counting(), OnExceptionCheckpoint(tmp_path), enable_checkpointing=True)
    content = read_checkpoint(tmp_path / "on_exception.ckpt")
    assert content["train_sums"] == {"train/hits": [2, 2]}


def test_a_stop_within_a_step_repeats_its_batches(tmp_path):
    class Stopped(Noisy):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            # Of the second step, of two batches, one is done.
            if self.current_epoch == 0 and batch_idx == 2:
                self.trainer.should_stop = True

    def loader():
        return DataLoader(Quiet(), 4, shuffle=True)

    whole = start(tmp_path / "whole", loader, accumulate_grad_batches=2)
    start(tmp_path / "r", loader, make=Stopped, accumulate_grad_batches=2, max_epochs=2)
    resumed = start(tmp_path / "r", loader, resume=True, accumulate_grad_batches=2)
    assert len(resumed.seen) == len(whole.seen) - 2
    # The batch that is repeated draws noise anew, so that the next epoch has another order.
    rest = BATCHES - 2
    assert [seen[:3] for seen in resumed.seen[:rest]] == [
        seen[:3] for seen in whole.seen[2:BATCHES]
    ]


def test_scheduled_accumulation_goes_on_within_an_epoch(tmp_path):
    def accumulation():
        return GradientAccumulationScheduler({0: 2})

    loader = LOADERS["shuffle"]
    whole = start(tmp_path / "whole", loader, accumulation())
    with pytest.raises(Killed):
        # The newest checkpoint is that of step 4, after two batches of the second epoch.
        asks = {"on_batch": kill_at(1, 3)}
        start(tmp_path / "killed", loader, accumulation(), asks=asks)
    resumed = start(tmp_path / "killed", loader, accumulation(), resume=True)
    assert_equal(resumed, whole, 2 * BATCHES - 2)


def test_a_stop_waits_for_a_validation_of_lightnings_average(tmp_path):
    """Lightning has exchanged the weights and their average until then."""
    loader = LOADERS["shuffle"]
    whole = start(tmp_path / "whole", loader, EMAWeightAveraging(decay=0.9))
    interruption = Interruption()

    def ask(*now):
        if now == (BATCHES, 1):
            interruption.request_stop("SIGTERM")

    with pytest.raises(Interrupted):
        callbacks = (EMAWeightAveraging(decay=0.9), interruption)
        start(tmp_path / "stopped", loader, *callbacks, asks={"on_validation": ask})
    assert phase(tmp_path / "stopped") == TRAINING
    average = EMAWeightAveraging(decay=0.9)
    resumed = start(tmp_path / "stopped", loader, average, resume=True)
    assert_equal(resumed, whole, 2 * BATCHES - 1)
