"""Where a training resumes in mid-epoch, and where it ends."""

import csv
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset

from faults import signal_at_step
from kills import differences, weights
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.interruption import Interruption, MaxTime
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.files import complete_checkpoints, newest_whole
from lockstep.checkpoints.load import read_checkpoint
from lockstep.checkpoints.resume_point import (
    EPOCH_END,
    ResumePoint,
    ends_step,
    is_validation_epoch,
)
from lockstep.process.errors import Interrupted
from lockstep.records.record import read_record
from plain_task import Small, fit
from runs import run_script


class Net(Small):
    def validation_step(self, batch, batch_idx):
        pass


class Places(pl.Callback):
    def __init__(self):
        self.steps, self.epochs = [], []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append((ends_step(trainer), trainer.global_step))

    def on_validation_end(self, trainer, module):
        self.validated = True

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append((is_validation_epoch(trainer), self.__dict__.pop("validated", False)))


def test_checkpoints_keep_the_keys_of_version_2():
    point = ResumePoint(
        epoch=3,
        steps_done=5,
        phase=EPOCH_END,
        is_last=True,
        missing_micro_batches=1,
        limits_when_ended=[9, -1],
        max_time_when_ended_s=60.0,
    )
    stored = {
        "epoch": 3,
        "batches_done": 5,
        "phase": EPOCH_END,
        "is_last": True,
        "lacking": 1,
        "ended": [9, -1],
        "over_at": 60.0,
    }
    assert point.to_checkpoint() == stored
    assert ResumePoint.from_checkpoint({**stored, "of_a_later_version": 1}) == point


@pytest.mark.filterwarnings("ignore")
def test_steps_and_validations_end_where_lightning_counts_them():
    places = Places()
    fit(Net(), places, batches=5, val_loader=DataLoader(torch.ones(1, 1)), max_epochs=4, num_sanity_val_steps=0,
        accumulate_grad_batches=2, check_val_every_n_epoch=2)  # fmt: skip
    steps = [0, *(step for _, step in places.steps)]
    assert [ends for ends, _ in places.steps] == [
        after > before for before, after in zip(steps, steps[1:])
    ]
    assert [ends for ends, _ in places.steps[:5]] == [False, True, False, True, True]
    assert places.epochs == [(False, False), (True, True)] * 2


@pytest.mark.filterwarnings("ignore")
def test_a_stop_after_a_remainder_trains_no_batch_twice(tmp_path):
    seen, interruption = [], Interruption()

    class Stopped(Net):
        def training_step(self, batch, batch_idx):
            seen.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            interruption.request_stop("test") if len(seen) == 5 else None

    options = {
        "batches": 5,
        "val_loader": DataLoader(torch.ones(1, 1)),
        "accumulate_grad_batches": 2,
        "max_epochs": 2,
    }
    with pytest.raises(Interrupted):
        fit(Stopped(), interruption, Checkpoints(tmp_path), num_sanity_val_steps=0, **options)
    [(path, _)] = complete_checkpoints(tmp_path, "last")
    seen.clear()
    interruption.reason = ""
    trainer = fit(
        Stopped(), Checkpoints(tmp_path), ckpt_path=path, num_sanity_val_steps=0, **options
    )
    assert (seen, trainer.global_step) == ([0, 1, 2, 3, 4], 6)


class Watched(Net):
    def validation_step(self, batch, batch_idx):
        self.log("own", 1.0)


@pytest.mark.filterwarnings("ignore")
def test_a_run_ended_by_early_stopping_trains_only_on_request(tmp_path):
    def steps(**options):
        stop, val = EarlyStopping("own", patience=1), DataLoader(torch.ones(1, 1))
        return fit(Watched(), stop, Checkpoints(tmp_path), val_loader=val, **options).global_step

    assert steps(max_epochs=9) == 8
    [(path, _)] = complete_checkpoints(tmp_path, "last")
    assert steps(max_epochs=9, ckpt_path=path) == 8
    assert steps(max_epochs=10, ckpt_path=path) == 12


def ended_by_a_callback():
    return EarlyStopping("own", patience=1)


def out_of_time(seconds=2.0):
    """A limit of two steps, of a second each."""
    clock = iter(range(1, 99))
    return MaxTime(seconds, lambda: next(clock), Interruption())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", [ended_by_a_callback, out_of_time])
def test_a_training_ended_within_an_epoch_stays_ended(end, tmp_path):
    record = tmp_path / "run.json"

    def train(end, **options):
        parts = [end, RunRecorder(record), Checkpoints(tmp_path / "checkpoints")]
        if isinstance(end, MaxTime):
            parts.append(end.interruption)
        options = {"max_epochs": 3, "val_check_interval": 0.25, **options}
        val_loader = DataLoader(torch.ones(1, 1))
        trainer = fit(Watched(), *parts, val_loader=val_loader, **options)
        fields = read_record(record)
        return trainer.global_step, fields.epochs, fields.ended_by

    stopped = train(end())
    reason = "early_stopping" if end is ended_by_a_callback else "max_time"
    assert stopped == (2, 1, reason)
    for _ in range(2):
        path = newest_whole(tmp_path / "checkpoints")
        assert train(end(), ckpt_path=path) == stopped


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [{"max_epochs": 2}, {"max_epochs": 4}])
def test_other_limits_go_on_within_the_epoch(more, tmp_path):
    def steps(*parts, **options):
        val_loader = DataLoader(torch.ones(1, 1))
        trainer = fit(Watched(), *parts, Checkpoints(tmp_path), val_loader=val_loader, **options)
        return trainer.global_step

    within = {"val_check_interval": 0.25}
    assert steps(ended_by_a_callback(), max_epochs=3, **within) == 2
    assert steps(ckpt_path=newest_whole(tmp_path), **more, **within) == 4 * more["max_epochs"]


@pytest.mark.filterwarnings("ignore")
def test_more_time_goes_on_within_the_epoch(tmp_path):
    def steps(clock, **options):
        parts = clock, clock.interruption, Checkpoints(tmp_path)
        return fit(Small(), *parts, **options).global_step

    assert steps(out_of_time()) == 2
    assert steps(out_of_time(3.0), ckpt_path=newest_whole(tmp_path)) == 4


class Lowered(Watched):
    """Its rate halves after every second epoch that is no better."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_epoch_start(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own"}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "stop", [{"max_epochs": 3}, {"max_epochs": 8, "max_steps": 14}], ids=["epoch", "mid-epoch"]
)
def test_a_schedule_of_plateaus_goes_on_as_without_a_stop(stop, tmp_path):
    def rates(folder, **options):
        module = Lowered()
        fit(
            module,
            Checkpoints(tmp_path / folder),
            val_loader=DataLoader(torch.ones(1, 1)),
            **options,
        )
        return module.rates

    whole = rates("whole", max_epochs=8)
    before = rates("r", **stop)
    [(path, _)] = complete_checkpoints(tmp_path / "r", "last")
    assert before + rates("r", max_epochs=8, ckpt_path=path) == whole
    assert whole == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


@pytest.mark.filterwarnings("ignore")
def test_validations_counted_over_epochs_count_over_starts(tmp_path):
    class Counted(Net):
        def on_validation_start(self):
            seen.append(self.global_step)

    seen: list[int] = []
    words = {"check_val_every_n_epoch": None, "val_check_interval": 6, "num_sanity_val_steps": 0}
    path = None
    for epochs in range(1, 6):
        fit(Counted(), Checkpoints(tmp_path), val_loader=DataLoader(torch.ones(1, 1)), max_epochs=epochs,
            ckpt_path=path, **words)  # fmt: skip
        [(path, _)] = complete_checkpoints(tmp_path, "last")
    assert seen == [6, 12, 18]


class Stream(IterableDataset):
    """Five items without a length, as of a tar file."""

    def __iter__(self):
        return iter(torch.ones(5, 2))


@pytest.mark.filterwarnings("ignore")
def test_data_without_a_length_train_save_and_go_on(tmp_path, caplog):
    def train(epochs, **options):
        caplog.clear()
        parts = TrainingLog(1), Checkpoints(tmp_path), Progress(0.0, 0.0)
        options = {
            "max_epochs": epochs,
            "accumulate_grad_batches": 2,
            "log_every_n_steps": 1,
            **options,
        }
        trainer = fit(
            Net(), *parts, data=Stream(), val_loader=DataLoader(torch.ones(1, 1)), **options
        )
        return trainer.global_step, [
            message for message in caplog.messages if message.startswith("epoch")
        ]

    caplog.set_level("INFO", logger="lockstep")
    steps, said = train(1)
    assert (
        steps == 3 and any("epoch 1/1 · batch 4 " in line for line in said) and "done" in said[-1]
    )
    [(path, sidecar)] = complete_checkpoints(tmp_path, "last")
    assert sidecar.step == 3 and read_checkpoint(path)["lockstep"]["point"]["phase"] == EPOCH_END
    steps, said = train(-1, max_steps=6, ckpt_path=path)
    assert steps == 6 and said[-1].startswith("epoch 2 · ")


# Validation within an epoch, and a training that its time ends; resumed runs equal uninterrupted
# ones.

WORDS = ["experiment=quickstart", "trainer.max_epochs=2", "trainer.log_every_n_steps=4", "trainer.num_threads=1",
         "~callbacks.hardware", "run_id=r"]  # fmt: skip
WITHIN = [
    "trainer.val_check_interval=8",
    "trainer.accumulate_grad_batches=2",
]  # of the 20 steps of an epoch
AT = ["8", "16", "20", "28", "36", "40"]


def validated(done):
    with done.folder.metrics.open(newline="") as file:
        return [
            (row["step"], row["val/loss"], row["val/acc"])
            for row in csv.DictReader(file)
            if row["val/acc"]
        ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    done = run_script("train", *WORDS, *WITHIN, logs=tmp_path_factory.mktemp("whole"))
    assert done.code == 0, done.output
    return done


def test_validations_come_every_few_steps_and_at_the_end(whole):
    found = validated(whole)
    assert [step for step, *_ in found] == AT
    best = max(found, key=lambda row: float(row[2]))
    record = whole.record
    assert record["best_checkpoint"]["step"] == int(best[0]) and record["metrics"][
        "val/acc_best"
    ] == float(best[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "hook", "phase"),
    [
        (8, "on_train_batch_end", "validation"),  # before the validation at step 8
        (2, "on_validation_batch_end", "validation"),  # in the one at step 16
    ],
)
def test_a_run_interrupted_within_an_epoch_resumes_bit_for_bit(whole, tmp_path, stop, hook, phase):
    small = "data.eval_batch_size=100"  # several batches in a validation
    stopped = run_script(
        "train",
        *WORDS,
        *WITHIN,
        small,
        logs=tmp_path,
        before=partial(signal_at_step, stop, hook=hook),
    )
    assert stopped.code == 75, stopped.output
    [(path, _)] = complete_checkpoints(stopped.folder.checkpoints, "last")
    assert read_checkpoint(path)["lockstep"]["point"]["phase"] == phase
    done = run_script("train", "resume=r", logs=tmp_path)
    assert done.code == 0, done.output
    assert [step for step, *_ in validated(done)] == AT
    assert [row[2] for row in validated(done)] == [row[2] for row in validated(whole)]
    for kind in ("last", "best"):
        assert differences(weights(done.folder, kind), weights(whole.folder, kind)) == []
    assert done.record["metrics"]["test/correct"] == whole.record["metrics"]["test/correct"]


def a_second_a_step(stop_at: int | None = None):
    """A clock of training that every optimizer step moves on by a second, over all starts."""
    from lockstep.callbacks import interruption, run_recorder
    from lockstep.checkpoints.resume_point import ends_step

    if stop_at:
        signal_at_step(stop_at)
    interruption.VOTE_INTERVAL_S = 0.02
    clock, original = [0.0], interruption.MaxTime.on_train_batch_end

    def tick(self, trainer, *given):
        clock[0] += ends_step(trainer)
        original(self, trainer, *given)

    interruption.MaxTime.on_train_batch_end = tick
    run_recorder.time = SimpleNamespace(monotonic=lambda: clock[0])


def test_time_ends_a_training_which_is_validated_tested_and_finished(tmp_path):
    words = [*WORDS, "trainer.check_val_every_n_epoch=5", "trainer.max_time=13s"]
    done = run_script("train", *words, logs=tmp_path, before=a_second_a_step)
    assert done.code == 0, done.output
    record, steps = done.record, done.record["steps"]
    assert steps == 13 and record["status"] == "finished" and record["ended_by"] == "max_time"
    assert record["best_checkpoint"]["step"] == steps and record["metrics"]["test/images"] == 360
    assert [step for step, *_ in validated(done)] == [str(steps)]
    assert (
        "trainer.max_time: the limit of 13 s is reached at step 13, in epoch 1/2: training ends"
        in done.output
    )


def stopped_in_its_test():
    a_second_a_step()
    signal_at_step(1, hook="on_test_batch_end")


@pytest.mark.slow
def test_a_requeue_after_max_time_goes_on_with_the_test(tmp_path):
    words = [*WORDS, "trainer.max_time=13s"]
    stopped = run_script("train", *words, logs=tmp_path, before=stopped_in_its_test)
    assert stopped.code == 75 and stopped.record["steps"] == 13, stopped.output
    done = run_script("train", *words, "resume=auto", logs=tmp_path, before=a_second_a_step)
    record = done.record
    assert done.code == 0 and record["status"] == "finished", done.output
    assert (record["steps"], record["epochs"], record["ended_by"]) == (13, 1, "max_time")
    assert record["metrics"]["test/images"] == 360


@pytest.mark.slow
def test_the_time_limit_counts_over_restarts(whole, tmp_path):
    words = [*WORDS, "trainer.accumulate_grad_batches=2", "trainer.max_time=13s"]

    assert (
        run_script("train", *words, logs=tmp_path, before=partial(a_second_a_step, stop_at=5)).code
        == 75
    )
    done = run_script("train", "resume=r", logs=tmp_path, before=a_second_a_step)
    assert done.code == 0 and done.record["steps"] == 13 and len(done.record["restarts"]) == 1, (
        done.output
    )
    over = run_script("train", "resume=r", logs=tmp_path)
    assert (
        over.code == 2
        and "is finished" in over.output
        and "give more trainer.max_time" in over.output
    )
    again = run_script("train", "resume=auto", "run_id=r", logs=tmp_path)
    assert again.code == 0 and "has finished" in again.output
    longer = run_script("train", "resume=r", "trainer.max_time=null", logs=tmp_path)
    assert (
        longer.code == 0 and longer.record["steps"] == 40 and longer.record["ended_by"] is None
    ), longer.output
    assert differences(weights(longer.folder), weights(whole.folder)) == []
