"""What callbacks write into a run's record: its status, its hardware."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

import strategy_runs
from local_ranks import run_ranks
from lockstep.callbacks.distribution import Distribution
from lockstep.callbacks.hardware_stats import HardwareStats, Samples
from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.files import Sidecar
from lockstep.loggers.metrics_csv import MetricsCsv
from lockstep.process.errors import Interrupted
from lockstep.records.record import (
    RunRecord,
    merge_restart,
    read_record,
    update_record,
    write_record,
)
from plain_task import Small, fit


def trainer_at(step, fn="fit"):
    epochs = SimpleNamespace(current=SimpleNamespace(ready=0))
    return SimpleNamespace(
        is_global_zero=True, global_step=step, current_epoch=0, callback_metrics={}, callbacks=[], strategy=None,
        sanity_checking=False, should_stop=False, fit_loop=SimpleNamespace(epoch_progress=epochs),
        state=SimpleNamespace(fn=fn, stage=RunningStage.TRAINING if fn == "fit" else RunningStage.TESTING),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    record = RunRecord(started_at="2026-01-01T00:00:00Z", steps=0, num_parameters=1)
    write_record(tmp_path / "run.json", record)
    return tmp_path / "run.json"


def restart(path, resumed_step):
    """What a start of the same run makes of the record."""
    started_at = "2026-01-01T01:00:00Z"
    fresh = RunRecord(started_at=started_at, steps=0, command="again", num_parameters=1)
    write_record(path, merge_restart(read_record(path), fresh, step=resumed_step))
    return RunRecorder(path, owns_run=False)


def test_steps_that_a_crash_undid_count_once(path):
    recorder = RunRecorder(path, owns_run=False)
    recorder.on_fit_start(trainer_at(0), None)
    recorder.on_train_batch_start(trainer_at(0), None)
    recorder.write(trainer_at(900), phase="training")  # killed here, with a checkpoint of step 800
    for last in (805, 803):
        recorder = restart(path, 800)
        recorder.on_fit_start(
            trainer_at(0), None
        )  # Lightning has not read the step of the checkpoint yet
        recorder.on_exception(trainer_at(0), None, ValueError("before the first step"))
        assert read_record(path).steps == 800
        recorder.on_train_batch_start(trainer_at(800), None)
        recorder.write(trainer_at(last), phase="training")
        assert read_record(path).steps == last
    recorder = restart(path, 800)
    assert [entry.lost_steps for entry in read_record(path).restarts] == [100, 5, 3]
    recorder.on_fit_start(trainer_at(0), None)
    recorder.on_train_batch_start(trainer_at(800), None)
    recorder.on_fit_end(trainer_at(1000), None)
    recorder.on_test_batch_start(trainer_at(0, fn="test"), None)
    assert read_record(path).steps == 1000


def test_the_best_is_that_of_the_best_checkpoint(path):
    with update_record(path) as record:
        record.monitor = "val/loss"
    recorder = RunRecorder(path, owns_run=False)
    recorder.on_fit_start(trainer_at(0), None)
    metric = {"val/loss": 0.4, "val/acc": 0.7, "val/f1": 0.5, "val/auroc": float("nan")}
    recorder.on_checkpoint_complete(
        path.parent / "checkpoints/best.ckpt", Sidecar(7, metric=metric), "best"
    )
    recorder.write(trainer_at(9))
    record = read_record(path)
    assert record.metrics == {"val/loss_best": 0.4, "val/acc_best": 0.7}
    assert record.best_checkpoint.metric == {"val/loss": 0.4, "val/acc": 0.7, "val/f1": 0.5}


# HardwareStats: samples in a CSV file, medians and maxima in the record, nvidia-smi dumps; no
# reading ends a run.


class Tiny(Small):
    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_run_on_the_cpu_leaves_samples_medians_and_maxima(tmp_path):
    logger, callback = MetricsCsv(tmp_path / "metrics.csv"), HardwareStats(interval_s=0.05)
    options = {"batches": 40, "default_root_dir": tmp_path}
    fit(Tiny(), TrainingLog(), callback, logger=logger, log_every_n_steps=20, **options)
    written = rows(tmp_path / "hardware-node0.csv")
    assert len(written) >= 5 and float(written[-1]["rank0/memory_gib"]) > 0.05
    [node] = callback.record_fields()["hardware"]["nodes"]
    memory = node["stats"]["rank0/memory_gib"]
    assert memory["max"] == pytest.approx(
        max(float(row["rank0/memory_gib"]) for row in written), abs=1e-3
    )
    assert 0 < memory["p50"] <= memory["max"] < callback.record_fields()["peak_memory_gib"] + 0.01
    assert (
        node["gpus"] == []
        and node["cores"] >= 1
        and node["node_rank"] == 0
        and node["memory_gib"] > 0.5
    )
    assert "nvidia_smi" not in node
    logged = rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in logged] == ["20", "40"] and 0 < float(
        logged[1]["hardware/cpu_percent"]
    ) <= 100
    fit(
        Tiny(), HardwareStats(interval_s=0.05), **options
    )  # a second start of the run keeps the first one's samples
    assert rows(tmp_path / "hardware-node0.0.csv") == written


def test_a_gpu_reading_that_fails_is_named_once(tmp_path, monkeypatch, capsys):
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho NVIDIA-SMI\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def unsupported(gpu):
        raise RuntimeError("not supported")

    readings = iter(range(1000))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: next(readings) * 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", lambda gpu: 90)
    monkeypatch.setattr(torch.cuda, "power_draw", unsupported)
    monkeypatch.setattr(torch.cuda, "temperature", lambda gpu: 60)
    card = SimpleNamespace(name="NVIDIA T4", total_memory=16 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (15 * 2**30, 16 * 2**30))
    strategy = SingleDeviceStrategy("cpu")
    strategy.process_devices = [torch.device("cuda:1")]
    callback = HardwareStats(interval_s=0.05)
    fit(Tiny(), callback, strategy=strategy, batches=40, default_root_dir=tmp_path)
    [node] = callback.record_fields()["hardware"]["nodes"]
    assert callback.record_fields()["usable_memory_gib"] == 15
    assert (
        node["gpus"] == [{"name": "NVIDIA T4", "memory_gib": 16.0}]
        and node["nvidia_smi"] == "NVIDIA-SMI\n"
    )
    memory = node["stats"]["gpu1/memory_gib"]
    assert memory["max"] == next(readings) - 1 and memory["p50"] == memory["max"] / 2
    assert node["stats"]["gpu1/utilisation_percent"] == {"p50": 90, "max": 90}
    assert (
        capsys.readouterr().out.count(
            "gpu1/power_w is no longer sampled (RuntimeError: not supported)"
        )
        == 1
    )


def test_sampling_ends_when_the_run_fails(tmp_path):
    class Failing(Tiny):
        def training_step(self, batch, batch_idx):
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        fit(Failing(), HardwareStats(interval_s=0.05), default_root_dir=tmp_path)
    written = rows(tmp_path / "hardware-node0.csv")
    time.sleep(0.2)
    assert rows(tmp_path / "hardware-node0.csv") == written


def train_until_asked(place, folder):
    """Ask rank 1 to stop at its first step."""
    interruption = Interruption()

    class Asking(Small):
        def on_train_start(self):
            if self.global_rank == 1:
                interruption.request_stop("SIGTERM")

    recorder = RunRecorder(folder / "run.json")
    callbacks = [HardwareStats(folder), interruption, recorder]
    trainer = strategy_runs.trainer_of(place, strategy_runs.strategy_of("ddp"), callbacks=callbacks)
    with pytest.raises(Interrupted):
        trainer.fit(Asking(), DataLoader(torch.ones(8, 2)))


def test_a_stop_records_hardware_and_memory_of_all_nodes(tmp_path):
    run_ranks(train_until_asked, 2, tmp_path, num_nodes=2)
    record = read_record(tmp_path / "run.json")
    assert [node["node_rank"] for node in record.hardware["nodes"]] == [0, 1]
    assert record.status == "interrupted" and record.peak_memory_gib > 0.05


@pytest.mark.parametrize(("percent", "samples", "lines"), [(35, 40, 1), (90, 40, 0), (35, 20, 0)])
def test_gpus_that_wait_for_the_host_are_named_once(percent, samples, lines, caplog):
    caplog.set_level("INFO", logger="lockstep")
    callback, trainer = HardwareStats(), SimpleNamespace(is_global_zero=True)
    for _ in range(samples):
        callback.samples.add("gpu0/utilisation_percent", percent)
    for _ in range(2):
        callback.on_train_epoch_end(trainer, None)
    assert [f"busy {percent} %" in line for line in caplog.messages] == [True] * lines


WEEK_S = 7 * 24 * 3600


def test_a_heartbeat_costs_the_same_after_a_week_of_samples():
    samples = Samples()
    for second in range(WEEK_S):
        samples.add("gpu0/memory_gib", 20 + second % 1000 / 125)
    began_at = time.perf_counter()
    for _ in range(42):  # readings of eight GPUs
        found = samples.statistics()["gpu0/memory_gib"]
    assert time.perf_counter() - began_at < 0.5  # seconds
    assert found == {"p50": pytest.approx(23.996, rel=3e-3), "max": 27.992}
    assert len(samples.distributions["gpu0/memory_gib"].bins) < 300
    assert samples.pop_means() == {"gpu_memory_gib": 23.995} and samples.pop_means() == {}


def test_quantiles_equal_those_of_numpy():
    values = np.random.default_rng(0).lognormal(size=5000)
    distribution = Distribution()
    for value in [*values, 0.0]:
        distribution.add(value)
    for share in (0.05, 0.5, 0.95, 1.0):
        expected = np.quantile([*values, 0.0], share)
        assert distribution.quantile(share) == pytest.approx(expected, rel=4e-3)
    assert distribution.quantile(0.0) == 0.0 and distribution.maximum == values.max()


# A plain script, which has no launch to begin and end its record.


class Ends(Small):
    """Raise an exception in the third step."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.error:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (KeyboardInterrupt(), SystemExit, "interrupted"),
        (SIGTERMException(), SystemExit, "interrupted"),
        (ValueError("bad batch"), ValueError, "failed"),
    ],
)
def test_a_plain_script_records_how_it_ended(tmp_path, error, raised, status):
    path = tmp_path / "run.json"
    with pytest.raises(raised):
        fit(Ends(error), RunRecorder(path))
    record = read_record(path)
    assert (record.status, record.steps) == (status, 2) and record.finished_at
    assert (record.error.message == "ValueError: bad batch") == (status == "failed")
    fit(Ends(), RunRecorder(path))
    record = read_record(path)
    assert (record.status, record.exit_code, record.steps) == ("finished", 0, 4)
    assert not record.error and record.restarts[0].lost_steps == 2


STOPPED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.checkpoints import Checkpoints
from plain_task import Small, fit
folder = Path(sys.argv[1])
parts = [Checkpoints(folder, "val/x")] if sys.argv[3] == "lockstep" else []
parts += [Interruption()] if parts else []
fit(Small(), *parts, RunRecorder(folder / "run.json"), batches=1000, max_epochs=1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["lockstep", "lightning"])
def test_a_plain_script_that_gets_sigterm_is_interrupted(tmp_path, parts):
    harness = Path(__file__).parents[2] / "harness"
    command = [sys.executable, "-c", STOPPED, str(tmp_path), str(harness), parts]
    script = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = tmp_path / "run.json"
    deadline = time.monotonic() + 60
    while not (path.exists() and read_record(path).steps) and time.monotonic() < deadline:
        time.sleep(0.05)
    script.terminate()
    script.wait(timeout=60)
    assert read_record(path).status == "interrupted"


class WithSteps(Small):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).sum())

    validation_step = test_step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["test", "validate"])
def test_an_evaluation_alone_has_a_record(tmp_path, name):
    path = tmp_path / "run" / "run.json"
    path.parent.mkdir()
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[RunRecorder(path)])
    getattr(trainer, name)(WithSteps(), DataLoader(torch.ones(4, 2)), verbose=False)
    record = read_record(path)
    assert (record.status, record.task_name, record.model) == ("finished", "eval", "WithSteps")
    assert "test_loss" in record.metrics and record.steps is None


@pytest.mark.filterwarnings("ignore")
def test_a_plain_script_records_the_number_of_parameters(tmp_path):
    fit(Small(), RunRecorder(tmp_path / "run.json"))
    record = read_record(tmp_path / "run.json")
    assert (record.num_parameters, record.num_trained_parameters) == (3, 3)
