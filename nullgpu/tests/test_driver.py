"""The null GPU itself: right results, and faults that are errors with a name."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nullgpu
from null_gpus import call_on_null_gpus, needs_null_gpus, null_gpus, ranks_on_null_gpus

pytestmark = needs_null_gpus


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 16)


NETS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 8)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 8, 8)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.GELU()), (4, 8)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), (2, 3, 8, 8)),
    "attention": (Attention, (2, 6, 16)),
}


def outputs_and_gradients(name: str, device: str) -> list[np.ndarray]:
    make, shape = NETS[name]
    torch.manual_seed(0)
    net, images = make().to(device), torch.randn(shape).to(device).requires_grad_()
    output = net(images)
    (output * torch.linspace(-1, 1, output.numel(), device=device).view_as(output)).sum().backward()
    found = [output, images.grad, *(p.grad for p in net.parameters()), *net.buffers()]
    return [value.detach().float().cpu().numpy() for value in found]


def of_all_nets(device: str) -> dict[str, list[np.ndarray]]:
    return {name: outputs_and_gradients(name, device) for name in NETS}


def test_outputs_and_gradients_are_those_of_the_cpu():
    found, expected = call_on_null_gpus(of_all_nets, "cuda"), of_all_nets("cpu")
    for name in NETS:
        for mine, theirs in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=name)


def words_of_error(expression: str) -> str:
    try:
        eval(expression, {"torch": torch, "F": F})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_operator_without_code_is_an_error_that_names_it():
    x = "torch.ones(2, 2, device='cuda')"
    words = call_on_null_gpus(words_of_error, f"torch.ops.aten._fused_dropout({x}, 0.5)")
    assert words == "NotImplementedError: the null GPU has no code for aten::_fused_dropout"


def test_more_than_the_memory_is_out_of_memory():
    words = call_on_null_gpus(
        words_of_error, "torch.empty(3 * 2**30, dtype=torch.uint8, device='cuda')", memory_gib=2
    )
    assert words.startswith("OutOfMemoryError: CUDA out of memory") and "2.00 GiB" in words


def sums_of_ranks() -> list[float]:
    rank = torch.distributed.get_rank()
    x = torch.tensor([1.0, 2.0], device="cuda") * (rank + 1)
    torch.distributed.all_reduce(x)
    parts = [torch.empty(1, device="cuda") for _ in range(4)]
    torch.distributed.all_gather(parts, torch.tensor([float(rank)], device="cuda"))
    return [*x.tolist(), *(part.item() for part in parts)]


def test_collectives_of_four_ranks():
    assert ranks_on_null_gpus(sums_of_ranks, 4) == [[10.0, 20.0, 0.0, 1.0, 2.0, 3.0]] * 4


def different_collectives() -> str:
    x = torch.ones(3, device="cuda")
    try:
        if torch.distributed.get_rank() == 0:
            torch.distributed.all_reduce(x)
        else:
            torch.distributed.broadcast(x, src=0)
        torch.cuda.synchronize()
    except Exception as error:
        return str(error)
    return "no error"


def test_collectives_that_differ_are_an_error_that_names_both():
    first, second = ranks_on_null_gpus(different_collectives, 2)
    mine, theirs = "all_reduce sum of 3 float32", "broadcast of 3 float32 (root 0)"
    assert f"collectives differ: rank 0 does {mine}, rank 1 {theirs}" in first
    assert f"collectives differ: rank 1 does {theirs}, rank 0 {mine}" in second


def run(code: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", f"import ctypes, torch\n{code}"]
    return subprocess.run(
        command, env=null_gpus(**options), capture_output=True, text=True, timeout=100
    )


def test_a_function_without_code_is_an_error_that_names_it():
    done = run("print(ctypes.CDLL('libnullgpu.so').cuMemImportFromShareableHandle())")
    assert (
        done.stdout == "801\n"
        and "nullgpu: there is no code for cuMemImportFromShareableHandle" in done.stderr
    )


def test_the_host_cannot_read_device_memory():
    assert (
        run("ctypes.string_at(torch.ones(4, device='cuda').data_ptr(), 4)").returncode
        == -signal.SIGSEGV
    )


def test_another_torch_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(nullgpu, "torch_version", lambda: "2.15.0+cu131")
    assert nullgpu.missing() == "nullgpu is made for torch 2.14.1+cu130, and this is 2.15.0+cu131"


def test_it_is_built_once(tmp_path):
    first = nullgpu.build_if_missing(tmp_path)
    made = os.stat(first / "libnullgpu.so").st_mtime_ns
    assert (
        nullgpu.build_if_missing(tmp_path) == first
        and os.stat(first / "libnullgpu.so").st_mtime_ns == made
    )
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def order_of_copies():
    """Return what happened to three batches: copies with their stream, waits, and steps, in
    order.
    """
    from lockstep.data.loading import prefetch

    device, events, copy, wait = (
        torch.device("cuda", 0),
        [],
        torch.Tensor.to,
        torch.cuda.Stream.wait_stream,
    )
    main = torch.cuda.current_stream(device)

    def copied(tensor, *args, **kwargs):
        events.append(
            "copied beside"
            if torch.cuda.current_stream(device) != main
            else "copied in the step's stream"
        )
        return copy(tensor, *args, **kwargs)

    def waited(stream, other):
        events.append("waited")
        return wait(stream, other)

    torch.Tensor.to, torch.cuda.Stream.wait_stream = copied, waited
    seen = []
    for batch in prefetch(({"x": torch.full((2,), n), "by_name": {}} for n in range(3)), device):
        events.append("step")
        seen.append((batch["x"].device.type, batch["x"].tolist()))
    return events, seen


def test_a_batch_is_copied_beside_the_step_before_it():
    events, seen = call_on_null_gpus(order_of_copies)
    assert seen == [("cuda", [n, n]) for n in range(3)]
    assert [event for event in events if event != "copied beside"] == ["waited", "step"] * 3
    assert events.count("copied beside") == 3


def taken(side):
    from lockstep.data.framing import index_rows

    array = (
        torch.arange(5 * side * side * 3, dtype=torch.int64).to(torch.uint8).view(5, side, side, 3)
    )
    index = torch.tensor([4, 0, 0])
    return torch.equal(index_rows(array.cuda(), index.cuda()).cpu(), array[index])


@pytest.mark.parametrize("side", [8, 7])
def test_images_are_taken_by_their_bytes(side):
    assert call_on_null_gpus(taken, side)


def pinned(available):
    import psutil

    from lockstep.checkpoints.io import copy_to_host

    psutil.virtual_memory = lambda: SimpleNamespace(available=available)
    found = copy_to_host(
        {"a": torch.ones(256, device="cuda"), "b": torch.ones(256, device="cuda")},
        copy_cpu_tensors=True,
    )
    return [(tensor.is_pinned(), tensor.sum().item()) for tensor in found.values()]


@pytest.mark.parametrize(
    ("available", "wanted"), [(2**30, [True, True]), (6000, [True, False]), (0, [False, False])]
)
def test_a_checkpoint_pins_a_quarter_of_free_memory(available, wanted):
    assert call_on_null_gpus(pinned, available) == [(is_pinned, 256) for is_pinned in wanted]
