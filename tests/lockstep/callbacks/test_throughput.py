"""Throughput: timed steps against known sleeps, FLOPs against a hand count, its own cost."""

import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lockstep.callbacks.throughput import Throughput, devices_in_use, flops_per_image, peak_tflops
from torch import nn


class Net(nn.Sequential):
    """Per image of 1×4×4: 16·8 + 8·2 multiply-adds."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))


class Slow(pl.LightningModule):
    def __init__(self, step_s):
        super().__init__()
        self.net, self.step_s = Net(), step_s

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).sum()
        time.sleep(self.step_s)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowLoader:
    def __init__(self, wait_s, batches):
        self.wait_s, self.batches = wait_s, batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            time.sleep(self.wait_s)
            yield torch.ones(5, 1, 4, 4)


class Images(pl.LightningDataModule):
    image_size, channels = 4, 1

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader


def fit(callback, module, loader, **options):
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=Images(loader))
    return callback.record_fields()


def test_images_per_second_step_times_and_data_wait():
    fields = fit(Throughput(20), Slow(0.006), SlowLoader(0.004, 50), accumulate_grad_batches=2)
    throughput = fields["throughput"]
    # Two micro-batches of 6 ms compute and 4 ms data make a step of a little over 20 ms.
    assert 0.020 < throughput["step_seconds"]["p50"] < 0.100
    assert throughput["step_seconds"]["p95"] >= throughput["step_seconds"]["p50"]
    assert throughput["images_per_s"] == pytest.approx(20 / throughput["step_seconds"]["mean"], rel=1e-3)
    assert fields["images_per_s"] == throughput["images_per_s"] == throughput["images_per_s_per_device"]
    assert 0.15 < throughput["data_wait_share"] < 0.65


def test_the_batch_size_of_a_plain_script_comes_from_its_batches():
    throughput = fit(Throughput(), Slow(0.002), SlowLoader(0, 20), accumulate_grad_batches=2)["throughput"]
    assert throughput["images_per_s"] == pytest.approx(10 / throughput["step_seconds"]["mean"], rel=1e-3)


def test_mfu_against_a_given_peak():
    throughput = fit(Throughput(5, peak_tflops=1e-5), Slow(0.001), SlowLoader(0, 10))["throughput"]
    flops = 3 * 2 * (16 * 8 + 8 * 2)
    assert throughput["mfu"] == pytest.approx(flops * throughput["images_per_s"] / 1e7, rel=1e-2)


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16-mixed", 312),
        ("NVIDIA A100-SXM4-40GB", "32-true", 19.5),
        ("NVIDIA H100 PCIe", "16-mixed", 756),
        ("NVIDIA H100 80GB HBM3", "bf16-true", 989),
        ("Tesla T4", "bf16-mixed", None),
        ("NVIDIA L40S", "bf16-mixed", None),
    ],
)
def test_the_peak_of_known_gpus(gpu, precision, tflops):
    assert peak_tflops(gpu, precision) == tflops


CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.parametrize(
    ("strategy", "world_size", "devices"),
    [
        (SimpleNamespace(), 8, 8),
        (SimpleNamespace(process_devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"]), 1, 4),
        (SimpleNamespace(process_devices=[FIRST, SECOND, FIRST]), 1, 2),
        (SimpleNamespace(process_devices=[CPU, CPU]), 1, 1),
    ],
)
def test_devices_that_one_process_uses_count(strategy, world_size, devices):
    assert devices_in_use(strategy, world_size) == devices


def test_counting_operations_changes_neither_weights_nor_draws():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert flops_per_image(net, (3, 8, 8)) == 3 * 2 * (8 * 3 * 9 * 36 + 8 * 36 * 10)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


def test_a_net_that_cannot_be_counted_has_no_mfu(capsys):
    class Reads(nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    assert flops_per_image(Reads(), (1, 2, 2)) is None
    assert "no MFU" in capsys.readouterr().out


def test_its_hooks_cost_less_than_one_percent_of_a_four_millisecond_step():
    callback = Throughput(8)
    progress = SimpleNamespace(current=SimpleNamespace(ready=1))
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        accumulate_grad_batches=1, num_training_batches=10,
    )  # fmt: skip
    best = float("inf")
    for index in range(5000):
        started = time.perf_counter()
        callback.on_train_batch_start(trainer, None, None, index)
        callback.on_train_batch_end(trainer, None, None, None, index)
        best = min(best, time.perf_counter() - started)
    assert best < 0.01 * 0.004
