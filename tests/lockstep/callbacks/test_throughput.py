"""Throughput: timed steps against known sleeps, FLOPs against a hand count, its own cost."""

import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lockstep.callbacks.throughput import (
    Throughput,
    devices_in_use,
    flops_per_image,
    measured_flops,
    undisturbed_flops,
)
from ranks import run_ranks


class Net(nn.Sequential):
    """Per image of 1×4×4: 16·8 + 8·2 multiply-adds."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))


class Slow(pl.LightningModule):
    def __init__(self, step_s, straggle_s=0.0):
        super().__init__()
        self.net, self.step_s, self.straggle_s = Net(), step_s, straggle_s

    def training_step(self, batch, batch_idx):
        time.sleep(self.straggle_s * (self.global_rank == 1))
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
    fields = fit(Throughput(20, warmup_steps=3), Slow(0.006), SlowLoader(0.004, 40), accumulate_grad_batches=2)
    throughput = fields["throughput"]
    # Two micro-batches of 6 ms compute and 4 ms data make a step of a little over 20 ms.
    assert 0.020 < throughput["step_seconds"]["p50"] < 0.100
    assert throughput["step_seconds"]["p95"] >= throughput["step_seconds"]["p50"]
    assert throughput["images_per_s"] == pytest.approx(20 / throughput["step_seconds"]["mean"], rel=1e-3)
    assert fields["images_per_s"] == throughput["images_per_s"] == throughput["images_per_s_per_device"]
    assert 0.15 < throughput["data_wait_share"] < 0.65
    assert throughput["slowest_rank"]["rank"] == throughput["fastest_rank"]["rank"] == 0


def test_mfu_against_a_given_peak():
    callback = Throughput(5, peak_tflops={"float32": 1e-5}, warmup_steps=0)
    throughput = fit(callback, Slow(0.001), SlowLoader(0, 10))["throughput"]
    flops = 2 * (16 * 8 + 8 * 2) + 2 * (16 * 8 + 2 * 8 * 2)  # the first layer's input needs no gradient
    assert callback.flops_per_image == flops
    assert throughput["peak_tflops"] == 0.0 and callback.peak_flops == pytest.approx(1e7)
    assert throughput["mfu"] == pytest.approx(flops * throughput["images_per_s"] / 1e7, rel=1e-2)


def test_a_peak_below_what_was_reached_gives_no_mfu():
    throughput = fit(Throughput(5, peak_tflops={"float32": 1e-12}, warmup_steps=0), Slow(0.001), SlowLoader(0, 10))
    assert throughput["throughput"]["mfu"] is None


def _straggle():
    callback = Throughput(10, measure_peak=False, warmup_steps=1)
    fields = fit(callback, Slow(0.001, straggle_s=0.02), SlowLoader(0, 10), strategy="ddp", devices=2)
    return fields["throughput"]


def test_the_slowest_of_two_ranks_is_named():
    for throughput in run_ranks(_straggle, 2):
        assert (throughput["slowest_rank"]["rank"], throughput["fastest_rank"]["rank"]) == (1, 0)
        assert throughput["slowest_rank"]["own_seconds"] > 0.02 > throughput["fastest_rank"]["own_seconds"]
        assert throughput["images_per_s_per_device"] == pytest.approx(throughput["images_per_s"] / 2, rel=1e-3)


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


def test_a_rate_per_device_is_of_all_devices_of_the_process():
    strategy = pl.strategies.SingleDeviceStrategy("cpu")
    strategy.process_devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    callback = Throughput(20, peak_tflops={"float32": 1e-5}, warmup_steps=0)
    throughput = fit(callback, Slow(0.001), SlowLoader(0, 10), strategy=strategy)["throughput"]
    assert throughput["images_per_s_per_device"] == pytest.approx(throughput["images_per_s"] / 4, rel=1e-3)
    used = callback.flops_per_image * throughput["images_per_s"] / 4 / 1e7
    assert throughput["mfu"] == pytest.approx(used, rel=1e-2)


def test_counted_flops_equal_those_of_a_real_pass_and_change_nothing():
    from torch.utils.flop_counter import FlopCounterMode

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    counted = flops_per_image(net, (3, 8, 8))
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    with FlopCounterMode(display=False) as counter:
        net(torch.randn(4, 3, 8, 8)).sum().backward()
    assert counted == counter.get_total_flops() / 4


def test_a_net_that_cannot_be_counted_has_no_mfu(capsys):
    class Reads(nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    assert flops_per_image(Reads(), (1, 2, 2)) is None
    assert "no MFU" in capsys.readouterr().out


def test_the_measured_peak_is_a_rate(monkeypatch):
    monkeypatch.setattr(time, "thread_time", time.perf_counter)  # nobody else computes
    assert 1e8 < measured_flops(torch.device("cpu"), torch.float32, seconds=0.05) < 1e14


def test_a_peak_under_load_is_left_out(monkeypatch, caplog):
    caplog.set_level("DEBUG", logger="lockstep")
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # others have the core all the time
    assert undisturbed_flops(torch.device("cpu"), torch.float32) is None
    assert "no MFU: the cores are busy" in caplog.text
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 55)
    assert undisturbed_flops(torch.device("cuda"), torch.float32) is None
    assert "no MFU: cuda is 55 % busy" in caplog.text


def test_a_peak_that_does_not_fit_ends_no_run(monkeypatch, capsys):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("lockstep.callbacks.throughput.measured_flops", out_of_memory)
    assert undisturbed_flops(torch.device("cpu"), torch.float32) is None
    assert "no MFU: too little memory" in capsys.readouterr().out


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
        callback.on_before_backward(trainer, None, None)
        callback.on_train_batch_end(trainer, None, None, None, index)
        best = min(best, time.perf_counter() - started)
    assert best < 0.01 * 0.004


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_backward_through_groups_counts_as_the_forward(groups):
    layer = nn.Conv2d(8, 8, 3, padding=1, bias=False, groups=groups)
    both = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), layer)
    pointwise, grouped = 2 * 8 * 8 * 25, 2 * 8 * (8 // groups) * 9 * 25  # of 5 × 5 pixels
    assert flops_per_image(both, (8, 5, 5)) == 2 * pointwise + 3 * grouped  # images need no gradient
