"""SyncBatchNorm on the CPU equals BatchNorm over the whole batch, values, gradients and running
statistics.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from local_ranks import meet, run_ranks
from lockstep.process.errors import UserError
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, check_batch_norm, synchronise

PARTS = (5, 3)  # images of each rank: unequal on purpose


def layer_and_batch(dtype, momentum, offset, affine):
    generator = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(4, momentum=momentum, affine=affine).to(dtype)
    if affine:
        with torch.no_grad():
            layer.weight.copy_(torch.rand(4, generator=generator, dtype=dtype) + 0.5)
            layer.bias.copy_(torch.randn(4, generator=generator, dtype=dtype))
    batch = torch.randn(sum(PARTS), 4, 3, 2, generator=generator, dtype=dtype) * 2 + offset
    weights = torch.randn(
        batch.shape, generator=generator, dtype=dtype
    )  # of the outputs in the loss
    return layer, batch, weights


def run(layer, batch, weights):
    """Return what concerns each image after two steps, and what concerns the layer."""
    batch = batch.clone().requires_grad_(True)
    for _ in range(2):
        layer.zero_grad()
        batch.grad = None
        output = layer(batch)
        (output * weights).sum().backward()
    of_layer = [
        layer.running_mean,
        layer.running_var,
        layer.num_batches_tracked,
        *(p.grad for p in layer.parameters()),
    ]
    return [output.detach(), batch.grad, layer.eval()(batch).detach()], of_layer


def in_rank(cluster, *options):
    meet(cluster)
    layer, batch, weights = layer_and_batch(*options)
    synchronise(layer, "cpu")
    start = sum(PARTS[: cluster.rank])
    own = slice(start, start + PARTS[cluster.rank])
    of_images, of_layer = run(layer, batch[own], weights[own])
    for gradient in of_layer[3:]:
        dist.all_reduce(gradient)
    return of_images, of_layer


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ((torch.float64, 0.1, 0.0, True), 1e-12),
        ((torch.float64, None, 0.0, False), 1e-12),
        (
            (torch.float32, 0.1, 1000.0, True),
            2e-3,
        ),  # a large mean: sums of squares would cancel in float32
    ],
)
def test_equals_batchnorm_over_the_whole_batch(options, tolerance):
    of_images, of_layer = run(*layer_and_batch(*options))
    found = run_ranks(in_rank, 2, *options)
    for parts, whole in zip(
        zip(*(images for images, _ in found), strict=True), of_images, strict=True
    ):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=tolerance, atol=tolerance)
    for _, each in found:
        torch.testing.assert_close(each, of_layer, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_names_and_timms_activation_within_the_layer_stay(device):
    from timm.layers import BatchNormAct2d

    net = nn.Sequential(nn.BatchNorm2d(2), BatchNormAct2d(2, act_layer=nn.ReLU)).eval()
    x, layer, names = torch.randn(4, 2, 3, 3), net[0], list(net.state_dict())
    expected = net(x)
    assert expected.min() == 0
    synchronise(net, device)
    assert all(
        isinstance(each, SyncBatchNorm if device == "cpu" else nn.SyncBatchNorm) for each in net
    )
    assert list(net.state_dict()) == names and net[0] is layer and layer.process_group is None
    assert torch.equal(net(x), expected)
    if device == "cpu":  # torch's own refuses to train on one
        assert net.train()(x).min() == 0


def test_a_layer_that_does_more_is_refused():
    class Scaled(nn.BatchNorm2d):
        def forward(self, input):
            return 2 * super().forward(input)

    with pytest.raises(UserError, match="cannot convert Scaled, which has a forward of its own"):
        synchronise(nn.Sequential(Scaled(2)), "cpu")


def test_batchnorm_that_depends_on_ranks_or_single_images_is_named():
    norm, batch = nn.BatchNorm1d(1), {"images": 1, "world_size": 4, "micro_batches": 1}
    for net in (nn.Linear(1, 1), nn.BatchNorm1d(1).eval()):  # frozen
        assert not check_batch_norm(net, **batch, synchronised=False)
    assert not check_batch_norm(norm, **batch, synchronised=True)
    assert "trainer.sync_batchnorm=true" in check_batch_norm(
        norm, **{**batch, "images": 8}, synchronised=False
    )
    with pytest.raises(
        UserError, match="data.global_batch_size=8 or more, trainer.sync_batchnorm=true, or a net"
    ):
        check_batch_norm(norm, **batch, synchronised=False)
    with pytest.raises(UserError, match="data.global_batch_size=16 or more, or a net"):
        check_batch_norm(norm, images=1, world_size=1, micro_batches=8, synchronised=False)
