"""DataParallel spreads the forward and keeps the net."""

import threading

import pytest
import torch
from torch import nn

from strategies import data_parallel
from strategy_runs import TinyNet


class Recorder(nn.DataParallel):
    """Two replicas on the CPU, as nn.DataParallel makes them on GPUs."""

    def forward(self, images):
        replicas = [self.module, self.module]
        return torch.cat(
            [replica(part) for replica, part in zip(replicas, images.chunk(2), strict=True)]
        )


class Dropping(TinyNet):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), 0.99, training=self.training)


def test_replicas_follow_the_net_which_keeps_its_names(monkeypatch):
    monkeypatch.setattr(data_parallel, "_AutocastDataParallel", Recorder)
    net = Dropping().eval()
    names, images = list(net.state_dict()), torch.randn(64, 1, 3, 4)
    expected = net(images)
    data_parallel.spread_forward(net, [0, 1])
    torch.testing.assert_close(net(images), expected)
    net(images).sum().backward()
    assert list(net.state_dict()) == names and all(
        parameter.grad is not None for parameter in net.parameters()
    )
    assert (net.train()(images) == 0).any()


def dtype_in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call(torch.randn(2, 4)).dtype))
    thread.start()
    thread.join()
    return found[0]


def test_threads_compute_in_the_dtype_of_autocast_here():
    """torch's own threads know that autocast is on and forget in which dtype."""
    linear = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        assert dtype_in_a_thread(data_parallel.keep_autocast(linear, "cpu")) == torch.float16
    assert dtype_in_a_thread(data_parallel.keep_autocast(linear, "cpu")) == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_logits_of_one():
    net, images = TinyNet().cuda(), torch.randn(8, 1, 3, 4).cuda()
    expected = net(images)
    data_parallel.spread_forward(net, [0, 1])
    torch.testing.assert_close(net(images), expected)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert net(images).dtype == torch.bfloat16
