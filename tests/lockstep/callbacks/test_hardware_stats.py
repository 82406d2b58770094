"""The sampler and its callback: CSV, percentiles, nvidia-smi files, TensorBoard, and no reading ends a run."""

import csv
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lockstep.callbacks.hardware_stats import HardwareStats, Sampler, gpus_in_use, pause_s
from one_card import OneCard


class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(tmp_path, callback, steps=40, **trainer):
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {
        "enable_model_summary": False,
        "max_epochs": 1,
        "limit_train_batches": steps,
        "default_root_dir": tmp_path,
        "callbacks": [callback],
    }
    loader = torch.utils.data.DataLoader(torch.ones(400, 4), batch_size=4)
    pl.Trainer(**(options | trainer)).fit(Tiny(), loader)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_run_on_the_cpu_leaves_samples_and_percentiles(tmp_path):
    callback = HardwareStats(interval_s=0.05)
    fit(tmp_path, callback)
    written = rows(tmp_path / "hardware-node0.csv")
    assert len(written) >= 5 and float(written[-1]["rank0/memory_gib"]) > 0.05
    [node] = callback.record_fields()["hardware"]["nodes"]
    memory = node["stats"]["rank0/memory_gib"]
    assert set(memory) == {"p10", "p50", "p90", "max"}
    assert memory["max"] == pytest.approx(max(float(row["rank0/memory_gib"]) for row in written), abs=1e-3)
    assert node["gpus"] == [] and node["cores"] >= 1 and node["node_rank"] == 0 and node["memory_gib"] > 0.5
    assert not callback.sampler.is_alive() and not list(tmp_path.glob("nvidia-smi*"))


def test_nvidia_smi_is_kept_at_start_peak_and_end(tmp_path):
    asked = []

    def nvidia_smi():
        asked.append(1)
        return f"text {len(asked)}"

    OneCard.used = 0
    callback = HardwareStats(interval_s=0.05, nvml=OneCard(), nvidia_smi=nvidia_smi)
    fit(tmp_path, callback)
    texts = {moment: (tmp_path / f"nvidia-smi-node0-{moment}.txt").read_text() for moment in ("start", "peak", "end")}
    assert texts == {"start": "text 1", "peak": "text 2", "end": f"text {len(asked)}"}
    [node] = callback.record_fields()["hardware"]["nodes"]
    assert node["gpus"] == [{"name": "NVIDIA T4", "memory_gib": 16.0}]
    assert node["stats"]["gpu0/memory_gib"]["max"] > node["stats"]["gpu0/memory_gib"]["p50"]


def test_tensorboard_gets_scalars_at_its_own_rate(tmp_path):
    written = []
    logger = TensorBoardLogger(tmp_path, "tensorboard", "")
    logger.log_metrics = lambda metrics, step: written.append((step, metrics))
    fit(tmp_path, HardwareStats(interval_s=0.02, tensorboard_interval_s=0.15), logger=logger, log_every_n_steps=1000)
    hardware = [(step, metrics) for step, metrics in written if any(name.startswith("hardware/") for name in metrics)]
    assert 2 <= len(hardware) <= 10
    assert all("hardware/cpu/percent" in metrics and "hardware/cpu0/percent" not in metrics for _, metrics in hardware)


def test_a_reading_that_fails_is_named_once_and_sampling_goes_on(tmp_path, capsys):
    answers = iter([{"a": 1.0}, None, None, {"a": 3.0}])

    def read():
        answer = next(answers, {"a": 5.0})
        if answer is None:
            raise RuntimeError("lost")
        return answer

    sampler = Sampler(read, tmp_path / "samples.csv", interval_s=0.01)
    sampler.start()
    time.sleep(0.3)
    sampler.stop()
    assert [row["a"] for row in rows(tmp_path / "samples.csv")][:3] == ["1.0", "3.0", "5.0"]
    assert capsys.readouterr().out.count("RuntimeError: lost") == 1


def test_what_the_sampler_keeps_does_not_grow_with_the_run(tmp_path):
    sampler = Sampler(dict, tmp_path / "samples.csv", interval_s=1)
    for second in range(20_000):
        sampler._keep({"a": float(second), "b": None, "gpu0/throttle": "power-cap"})
    assert list(sampler.values) == ["a"] and len(sampler.values["a"].values) < 2048
    assert sampler.summary()["a"]["max"] == 19_999 and sampler.throttled == {"gpu0:power-cap"}
    assert sampler.summary()["a"]["p50"] == pytest.approx(10_000, rel=0.05)


def test_a_resumed_run_keeps_the_earlier_samples(tmp_path):
    for value in (1.0, 2.0):
        sampler = Sampler(lambda value=value: {"a": value}, tmp_path / "hardware-node0.csv", interval_s=10)
        sampler.start()
        time.sleep(0.05)
        sampler.stop()
    assert rows(tmp_path / "hardware-node0.0.csv")[0]["a"] == "1.0"
    assert rows(tmp_path / "hardware-node0.csv")[0]["a"] == "2.0"


def test_the_thread_ends_when_the_run_fails(tmp_path):
    class Failing(Tiny):
        def training_step(self, batch, batch_idx):
            raise ValueError("bad batch")

    callback = HardwareStats(interval_s=0.05)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback], max_epochs=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="bad batch"):
        trainer.fit(Failing(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
    assert not callback.sampler.is_alive()


def strategy(device, **own):
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device), **own), num_devices=2)


@pytest.mark.parametrize(
    ("trainer", "used"),
    [
        (strategy("cpu"), set()),
        (strategy("cuda:1"), {0, 1}),
        (strategy("cuda:0", process_devices=[torch.device("cuda", index) for index in range(3)]), {0, 1, 2}),
        (strategy("cuda:2", process_devices=[torch.device("cuda:2"), torch.device("cpu")]), {2}),
        (strategy("cpu", process_devices=[torch.device("cpu")] * 2), set()),
    ],
)
def test_only_gpus_that_the_run_computes_on_are_read(trainer, used):
    assert gpus_in_use(trainer) == used


def test_samples_come_further_apart_in_long_runs():
    assert [pause_s(1.0, age) for age in (0, 7200, 14_400, 72_000)] == [1.0, 1.0, 2.0, 10.0]
    age, samples = 0.0, 0
    while age < 3 * 86_400:
        age, samples = age + pause_s(1.0, age), samples + 1
    assert samples < 34_000
