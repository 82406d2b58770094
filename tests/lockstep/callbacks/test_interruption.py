"""Signals that stop a run at the same step on all ranks; stack dumps of ranks that hang."""

import signal
import time
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

import strategy_runs
from faults import signal_at_step
from local_ranks import run_ranks
from lockstep.callbacks import interruption as module
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.hang_dump import HangDump
from lockstep.callbacks.interruption import Interruption, Vote
from lockstep.checkpoints.files import complete_checkpoints, fault_of
from lockstep.checkpoints.load import read_checkpoint
from lockstep.process import signals
from lockstep.process.errors import Interrupted
from plain_task import Rows, Small, fit
from runs import run_script

TWO = ["experiment=quickstart", "trainer=ddp_sim", "trainer.max_epochs=2", "data.global_batch_size=128", "run_id=r",
       "trainer.num_threads=1"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_lockstep_takes_signals_in_place_of_lightning():
    """Fails where a release renames what Interruption.setup overrides: then find the new names."""
    seen, interruption = [], Interruption()

    class Silent(Small):
        def configure_model(self):
            connector, loop = self.trainer._signal_connector, self.trainer.fit_loop.epoch_loop
            for owner, name in (
                (connector, "register_signal_handlers"),
                (loop, "_broadcast_sigterm_tensor"),
            ):
                assert callable(getattr(type(owner), name)) and vars(owner)[name]() is None, name

        def on_train_start(self):
            seen.append(signal.getsignal(signal.SIGTERM) == interruption._on_signal)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    fit(Silent(), interruption)
    assert (
        seen == [True]
        and [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    )


def vote_many(place, speeds, ask_at, change_at):
    """Each rank steps at its own speed by its own clock.

    Returns (step it stopped at, number of votes).
    """
    torch.distributed.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
    now, votes = [0.0], [0]
    original = torch.distributed.all_reduce

    def counted(*arguments, **options):
        votes[0] += 1
        return original(*arguments, **options)

    torch.distributed.all_reduce = counted
    module.time = SimpleNamespace(monotonic=lambda: now[0])
    vote = Vote(place.world_size)
    for step in range(1, 2000):
        now[0] += speeds[place.rank][0 if step < change_at else 1]
        if vote(place.rank == 1 and step >= ask_at):
            return step, votes[0]
    return None


def test_ranks_of_different_speed_stop_at_the_same_step():
    """Speeds in seconds per step, before and after step `change_at`."""
    found = run_ranks(vote_many, 3, [(0.001, 0.05), (0.01, 0.01), (0.02, 0.001)], 300, 150)
    assert len({step for step, _ in found}) == 1 and found[0][0] >= 300
    assert len({votes for _, votes in found}) == 1
    assert found[0][1] < 30, "votes are rare where steps are quick"


class Evaluated(Small):
    """Asks rank 1 to stop at a batch of an evaluation, and counts its batches."""

    def __init__(self, interruption, ask_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.interruption = interruption
        self.ask_at = ask_at
        self.batches = 0

    def validation_step(self, batch, batch_idx):
        self.batches += 1
        if self.global_rank == 1 and self.batches == self.ask_at:
            self.interruption.request_stop("SIGTERM")

    test_step = validation_step


def evaluate(place, how, loaders, ask_at=None, **options):
    """Vote after every batch; return (batches that this rank has seen, whether it was stopped)."""
    module.MAX_STEPS_BETWEEN_VOTES = 1
    interruption = Interruption(timeout_s=5.0)
    evaluated = Evaluated(interruption, ask_at)
    trainer = strategy_runs.trainer_of(
        place, strategy_runs.strategy_of("ddp"), callbacks=[interruption], **options
    )
    try:
        getattr(trainer, how)(evaluated, loaders[place.rank], verbose=False)
    except Interrupted:
        return evaluated.batches, True
    return evaluated.batches, False


@pytest.mark.parametrize("how", ["validate", "test"])
def test_ranks_of_unequal_evaluations_never_wait_in_votes(how):
    loaders = [DataLoader(torch.zeros(rows, 4)) for rows in (5, 3)]
    assert run_ranks(evaluate, 2, how, loaders) == [(5, False), (3, False)]


def test_ranks_of_unequal_evaluations_stop_at_the_same_batch():
    loaders = [DataLoader(torch.zeros(rows, 4)) for rows in (5, 3)]
    assert run_ranks(evaluate, 2, "validate", loaders, 2) == [(2, True), (2, True)]


def streams(place, **options):
    """Evaluate a stream of twelve batches on rank 0, and of ten on rank 1."""
    return evaluate(place, "test", [DataLoader(Rows(), 4)] * 2, **options)


@pytest.mark.parametrize("options", [{}, {"limit_test_batches": 11}])
def test_streams_of_unknown_length_are_evaluated_without_votes(options):
    [(first, _), (second, is_stopped)] = run_ranks(partial(streams, **options), 2)
    assert (first, second, is_stopped) == (options.get("limit_test_batches", 12), 10, False)


@pytest.mark.filterwarnings("ignore")
def test_one_process_stops_in_a_stream_of_unknown_length():
    class Asking(Small):
        def validation_step(self, batch, batch_idx):
            assert batch_idx < 2
            if batch_idx == 1:
                stop.request_stop("SIGTERM")

    stop = Interruption()
    with pytest.raises(Interrupted):
        fit(Asking(), stop, val_loader=DataLoader(Rows(), 4), num_sanity_val_steps=0)


def stop_of_nodes(place, asked):
    """Whether this rank, one of two on its node, is told that only another node's was asked."""
    torch.distributed.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
    interruption = Interruption()
    interruption.votes = {name: Vote(place.world_size) for name in ("train", "test")}
    interruption.reason = "spot notice" if place.rank == asked else ""
    state = SimpleNamespace(fn="test")
    node = SimpleNamespace(
        node_rank=place.rank // 2, callbacks=[], state=state, sanity_checking=False
    )
    with pytest.raises(Interrupted) as stopped:
        if interruption._vote_on_stop(node, "test"):
            interruption._stop(node, "test")
    return stopped.value.is_of_other_nodes


def test_only_the_node_whose_rank_was_asked_was_asked():
    assert run_ranks(stop_of_nodes, 4, 3) == [True, True, False, False]


def test_a_second_ctrl_c_ends_a_run_at_once(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(signals, "received", [])
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    interruption = Interruption()
    interruption._on_signal(signal.SIGTERM, None)
    interruption._on_signal(signal.SIGINT, None)
    interruption.request_stop("spot notice")
    assert interruption.reason == "SIGTERM" and not ended
    interruption._on_signal(signal.SIGINT, None)
    assert ended == [130]


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_forgets_a_signal_of_the_last_step():
    class AsksInLastStep(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                signal.raise_signal(signal.SIGTERM)

    interruption = Interruption()
    assert fit(Small(), AsksInLastStep(), interruption, max_steps=4).global_step == 4
    assert not signals.received and not interruption.reason
    assert fit(Small(), interruption, max_steps=4).global_step == 4


def test_a_closed_terminal_interrupts_a_run_without_nohup(tmp_path):
    one = [*TWO, "trainer=cpu", "trainer.max_epochs=1"]
    fault = partial(signal_at_step, 2, number=signal.SIGHUP)
    stopped = run_script("train", *one, logs=tmp_path / "stopped", before=fault)
    assert stopped.code == 75 and stopped.record["status"] == "interrupted", stopped.output
    assert (
        stopped.record["steps"] == 2
        and len(list(stopped.folder.checkpoints.glob("last-*.ckpt"))) == 1
    )
    assert (
        run_script("train", *one, logs=tmp_path / "nohup", before=partial(ignored, fault)).code == 0
    )


@pytest.mark.filterwarnings("ignore")
def test_a_stop_saves_changes_of_the_modules_hook(tmp_path):
    """Lightning calls the hooks of callbacks first, and then the module's."""
    interruption = Interruption()
    checkpoints = Checkpoints(tmp_path, monitor="val/loss", mode="min")

    class Average(Small):
        def __init__(self):
            super().__init__()
            self.register_buffer("hooks", torch.tensor(0))

        def on_train_batch_end(self, *_):
            self.hooks += 1

        def training_step(self, batch, index):
            if self.trainer.global_step == 2:
                interruption.request_stop("spot notice")
            return super().training_step(batch, index)

    with pytest.raises(Interrupted):
        fit(Average(), interruption, checkpoints)
    [(path, sidecar)] = complete_checkpoints(tmp_path, "last")
    assert sidecar.step == 3 and read_checkpoint(path)["state_dict"]["hooks"] == 3


@pytest.mark.filterwarnings("ignore")
def test_a_fit_after_a_stop_trains_in_a_notebook():
    class Stopped(Small):
        def on_train_start(self):
            signal.raise_signal(signal.SIGINT)

    interruption, before = Interruption(), signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted):
        fit(Stopped(), interruption)
    assert signal.getsignal(signal.SIGINT) == before
    assert fit(Small(), interruption).global_step == 4


def ignored(fault):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    fault()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "at", "phase"),
    [
        ("on_train_batch_end", 4, "training"),
        ("on_validation_batch_end", 1, "validation"),
        ("on_test_start", 1, "test"),
        ("setup", 1, "start"),
    ],
)
def test_sigterm_to_one_rank_interrupts_all_and_resume_finishes(hook, at, phase, tmp_path):
    began = time.monotonic()
    fault = partial(signal_at_step, at, rank=1, hook=hook)
    stopped = run_script("train", *TWO, logs=tmp_path, before=fault)
    assert stopped.code == 75, stopped.output
    assert stopped.record["status"] == "interrupted" and stopped.record["error"] is None
    assert time.monotonic() - began < 90
    if phase in ("training", "validation"):
        [(path, sidecar)] = complete_checkpoints(stopped.folder.checkpoints, "last")
        assert fault_of(path) is None and sidecar.step == stopped.record["steps"]
        assert read_checkpoint(path)["lockstep"]["point"]["phase"] == phase
    done = run_script("train", *TWO, "resume=auto", logs=tmp_path)
    assert done.code == 0 and done.record["status"] == "finished" and done.record["epochs"] == 2, (
        done.output
    )
    assert [restart["lost_steps"] for restart in done.record["restarts"]] == (
        [] if phase == "start" else [0]
    )


# A rank that hangs, dies or fails ends the run, is named in the last line, and leaves stacks if it
# hung.

TIMEOUT_S = 6
SMALL = (
    "experiment=quickstart",
    f"trainer.timeout_s={TIMEOUT_S}",
    "trainer.num_threads=1",
    "~callbacks.hardware",
)


def harmed(tmp_path, how, trainer="ddp_sim", hook="on_train_batch_start"):
    flag = tmp_path / "flag"
    harm = f"+callbacks.harm={{_target_: faults.Harmed, how: {how}, flag: {flag}, hook: {hook}}}"
    done = run_script("train", *SMALL, f"trainer={trainer}", harm, logs=tmp_path)
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
@pytest.mark.parametrize(
    ("how", "message"), [("dies", "killed by SIGKILL"), ("fails", "rank one is unhappy")]
)
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


def test_a_refusal_of_lightning_keeps_its_message(tmp_path):
    class Manual(Small):
        automatic_optimization = False

    with pytest.raises(
        MisconfigurationException,
        match="gradient clipping is not supported for manual optimization",
    ):
        fit(Manual(), HangDump(), max_steps=1, gradient_clip_val=1.0, default_root_dir=tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_stop_is_heard_where_an_epoch_is_one_step(tmp_path):
    stop = Interruption()

    class Asking(Small):
        def on_train_batch_start(self, *_):
            if self.trainer.global_step == 3:
                stop.request_stop("SIGTERM")

    with pytest.raises(Interrupted):
        fit(Asking(), Checkpoints(tmp_path), stop, max_epochs=20, limit_train_batches=1,
            limit_val_batches=0)  # fmt: skip
    _, sidecar = next(complete_checkpoints(tmp_path, "last"))
    assert sidecar.step == 4
