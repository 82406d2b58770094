"""Dropout by bytes: shares, scale, gradients, memory order, and where nn.Dropout's own is taken."""

import pytest
import torch
from torch import nn

from models.dropout import Dropout


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_scale_and_gradient(p, layout, dtype):
    torch.manual_seed(1)
    values = torch.ones(64, 16, 9, 9, dtype=dtype).to(memory_format=layout).requires_grad_()
    out = Dropout(p)(values)
    assert out.is_contiguous(memory_format=layout) and out.dtype == dtype
    scale = torch.tensor(1 / (1 - p), dtype=dtype)
    assert set(out.unique().tolist()) == {0.0, scale.item()}
    count = values.numel()
    assert abs((out == 0).sum().item() / count - p) < 5 * (p * (1 - p) / count) ** 0.5
    out.sum().backward()
    assert torch.equal(values.grad, out.detach())


def test_each_byte_of_a_draw_is_fair():
    torch.manual_seed(2)
    zero = (Dropout(0.5)(torch.ones(1_000_000)) == 0).view(-1, 8).double().mean(0)
    assert (zero - 0.5).abs().max() < 5 * 0.5 / 125_000**0.5


def test_neighbours_are_independent_and_seeds_repeat():
    torch.manual_seed(3)
    kept = (Dropout(0.5)(torch.ones(1_000_000)) != 0).double() - 0.5
    assert ((kept[1:] * kept[:-1]).mean() * 4).abs() < 5e-3
    torch.manual_seed(3)
    again = (Dropout(0.5)(torch.ones(1_000_000)) != 0).double() - 0.5
    assert torch.equal(kept, again)


def test_other_probabilities_and_evaluation_are_torchs_own():
    values = torch.randn(3, 5)
    for p in (0, 0.0, 0.1, 1.0, 1):
        torch.manual_seed(4)
        ours = Dropout(p)(values)
        torch.manual_seed(4)
        assert torch.equal(ours, nn.Dropout(p)(values))
    assert torch.equal(Dropout(0.5).eval()(values), values)


def test_a_transposed_tensor_and_an_empty_one():
    values = torch.ones(40, 50).T
    out = Dropout(0.5)(values)
    assert out.shape == (50, 40) and set(out.unique().tolist()) == {0.0, 2.0}
    assert Dropout(0.5)(torch.ones(0, 3)).shape == (0, 3)
