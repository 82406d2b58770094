"""Right results from the null GPU: after each CUDA kernel that did nothing, its CPU kernel runs on
the same bytes.

The CUDA operator itself runs first: its checks, allocations and synchronisations stay what they are
on a GPU.
"""

import ctypes
import math
import os
import threading

import torch

DRIVER = ctypes.CDLL("libnullgpu.so")
DRIVER.nullgpu_arena.restype = ctypes.c_int
ARENAS = {}  # device index -> (first device address, {dtype: a CPU tensor over the whole memory})
THREAD = threading.local()
TOO_LARGE = float(os.environ.get("NULLGPU_MAX_GFLOP", 100)) * 1e9

# These libraries answer "not supported", and the CPU alone computes.
UNSUPPORTED = ("cusolver", "cufft", "cusparse")
# These operators have no arithmetic, or do it right with copies and memsets alone.
UNTOUCHED = (
    "empty", "new_empty", "as_strided", "view", "_reshape", "set_", "resize_", "record_stream", "is_pinned",
    "_pin_memory", "_local_scalar_dense", "unfold", "is_set_to", "_cudnn_init_dropout_state", "_record",
    "_efficientzerotensor", "_cudnn_rnn_flatten", "_use_cudnn_ctc_loss", "_use_miopen_ctc_loss",
)  # fmt: skip
# The shape of these results depends on values, or the host reads values on the way. The result of
# the CPU is copied over.
READS_VALUES = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "histc", "repeat_interleave", "segment_reduce", "equal", "multinomial", "nonzero_static", "linalg_qr",
    "linalg_eigh",
}  # fmt: skip


def arena(device):
    if device not in ARENAS:
        first, host, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        DRIVER.nullgpu_arena(device, ctypes.byref(first), ctypes.byref(host), ctypes.byref(size))
        whole = torch.frombuffer(
            (ctypes.c_uint8 * size.value).from_address(host.value), dtype=torch.uint8
        )
        ARENAS[device] = (first.value, {torch.uint8: whole})
    return ARENAS[device]


def shadow(tensor):
    """Return the CPU tensor over the same bytes."""
    if tensor.layout != torch.strided or not tensor.is_cuda:
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    first, views = arena(tensor.device.index)
    offset, item = tensor.data_ptr() - first, tensor.element_size()
    if offset % item:
        raise RuntimeError("the null GPU has no tensors at odd addresses")
    if tensor.dtype not in views:
        views[tensor.dtype] = views[torch.uint8].view(tensor.dtype)
    view = torch.as_strided(views[tensor.dtype], tensor.size(), tensor.stride(), offset // item)
    view = view._neg_view() if tensor.is_neg() else view
    return view.conj() if tensor.is_conj() else view


def map_tensors(thing, change):
    if isinstance(thing, torch.Tensor):
        return change(thing)
    if isinstance(thing, (list, tuple)):
        return type(thing)(map_tensors(part, change) for part in thing)
    if isinstance(thing, torch.device) and thing.type == "cuda":
        return torch.device("cpu")
    return thing


def widen(thing, back):
    """Convert half precision to float32, for operators that the CPU lacks in half precision.

    Args:
        back: gets each tensor with its float32 copy.
    """

    def change(tensor):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.float()
            back.append((tensor, wide))
            return wide
        return tensor

    return map_tensors(thing, change)


def store(result, cpu_result):
    """Write the CPU's result into the memory of the CUDA operator's result."""
    if isinstance(result, torch.Tensor) and isinstance(cpu_result, torch.Tensor):
        if not result.is_cuda:
            if result.shape == cpu_result.shape:
                result.copy_(cpu_result)
            return result
        if result.shape != cpu_result.shape:
            result = torch.empty_strided(
                cpu_result.size(), cpu_result.stride(), dtype=result.dtype, device=result.device
            )
        if cpu_result.numel():
            shadow(result).copy_(cpu_result)
        return result
    if isinstance(result, (list, tuple)):
        return type(result)(store(a, b) for a, b in zip(result, cpu_result, strict=True))
    return cpu_result if isinstance(cpu_result, (bool, int, float)) else result


def copy_to_cuda(cpu_result, device):
    """Return a CUDA copy of the CPU's result."""

    def change(tensor):
        made = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        if tensor.numel():
            shadow(made).copy_(tensor)
        return made

    return map_tensors(cpu_result, change)


def find_device(things):
    for thing in things:
        if isinstance(thing, torch.Tensor) and thing.is_cuda:
            return thing.device
        if isinstance(thing, (list, tuple)):
            device = find_device(thing)
            if device is not None:
                return device
    return None


GENERATORS = {}


def cpu_generator_for(generator, device):
    """Return a CPU generator that follows the CUDA generator's seed and offset, so that seeds,
    forks and replays have the same effect.
    """
    index = (device or torch.device("cuda", torch.cuda.current_device())).index or 0
    cuda = generator if generator is not None else torch.cuda.default_generators[index]
    on_cpu = GENERATORS.setdefault(index, torch.Generator())
    on_cpu.manual_seed((cuda.initial_seed() * 1000003 + cuda.get_offset() * 7919 + index) % 2**63)
    return on_cpu


def wrap_numbers(args, tensors):
    """Replace Python numbers where the operator takes tensors by 0-dim tensors, which promote as
    the numbers do.
    """
    if not any(type(args[i]) in (int, float, bool, complex) for i in tensors if i < len(args)):
        return args
    flat = all(not a.dim() for a in args if isinstance(a, torch.Tensor))
    peer = next((a for a in args if isinstance(a, torch.Tensor)), None)

    def change(number):
        if flat and peer is not None:
            return torch.tensor(number, dtype=torch.result_type(peer, number))
        return torch.tensor(number, dtype=torch.float64 if type(number) is float else None)

    return [
        change(a) if i in tensors and type(a) in (int, float, bool, complex) else a
        for i, a in enumerate(args)
    ]


def wrap(name, other=None):
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base)
    op = getattr(packet, overload or "default")
    schema = op._schema
    original = torch.library.get_kernel(op, "CUDA")
    mutates = schema.is_mutable
    random = next((i for i, a in enumerate(schema.arguments) if a.name == "generator"), None)
    draws = random is not None or base in ("native_dropout", "_fused_dropout", "rrelu_with_noise")
    aliased = [r.alias_info is not None for r in schema.returns]
    tensors = {i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"}
    reads = base in READS_VALUES
    compute = other or op

    def on_cpu(args, kwargs, device):
        generator = None
        if draws:
            cuda_generator = kwargs.get(
                "generator", args[random] if random is not None and random < len(args) else None
            )
            generator = cpu_generator_for(cuda_generator, device)
        cpu_args = [map_tensors(a, shadow) for a in args]
        cpu_kwargs = {k: map_tensors(v, shadow) for k, v in kwargs.items() if k != "pin_memory"}
        if random is not None:
            if random < len(cpu_args):
                cpu_args[random] = generator
            else:
                cpu_kwargs["generator"] = generator
        elif draws:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.set_state(generator.get_state())
                return compute(*cpu_args, **cpu_kwargs)
        try:
            if base in ("mm", "addmm", "bmm", "baddbmm") and cpu_args[0].dtype == torch.float16:
                # The CPU's kernel in half precision is slow.
                raise NotImplementedError("not implemented for")
            return compute(*cpu_args, **cpu_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if (
                "not implemented for" not in str(error)
                and "expected scalar type" not in str(error)
                and "mixed dtype" not in str(error)
            ):
                raise
            back = []
            wide_args = [widen(a, back) for a in cpu_args]
            wide_kwargs = {k: widen(v, back) for k, v in cpu_kwargs.items()}
            wide_result = compute(*wide_args, **wide_kwargs)
            if mutates:
                for narrow, wide in back:
                    narrow.copy_(wide)
            return wide_result

    def kernel(keys, *args, **kwargs):
        if base == "mm" and 2 * args[0].numel() * args[1].shape[1] > TOO_LARGE:
            # The result is zeros: this measures speed, and is no model.
            return original.call_boxed(keys, *args, **kwargs)
        if getattr(THREAD, "inside", False) and not reads:
            return original.call_boxed(keys, *wrap_numbers(args, tensors), **kwargs)
        before = getattr(THREAD, "inside", False)
        device = find_device(args) or find_device(tuple(kwargs.values()))
        THREAD.inside = True
        try:
            if reads and device is not None:
                with torch.cuda.device(device):
                    torch.cuda.current_stream(device).synchronize()
                result = None
            else:
                try:
                    result = original.call_boxed(keys, *wrap_numbers(args, tensors), **kwargs)
                except RuntimeError as error:
                    if not any(word in str(error).lower() for word in UNSUPPORTED):
                        raise
                    result = None
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch():
                cpu_result = on_cpu(args, kwargs, device)
                if result is None:
                    return copy_to_cuda(cpu_result, device)
                if all(aliased) and aliased:
                    return result
                return store(result, cpu_result)
        finally:
            THREAD.inside = before

    kernel.__name__ = f"null_{name}"
    return kernel


# --- operators that only CUDA has

A = torch.ops.aten


def cudnn_convolution(
    x, w, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32, *, out=None
):
    return wide(
        A.convolution.default,
        x,
        w,
        None,
        stride,
        padding,
        dilation,
        False,
        [0] * len(stride),
        groups,
    )


def cudnn_convolution_transpose(
    x, w, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32
):
    return wide(
        A.convolution.default, x, w, None, stride, padding, dilation, True, output_padding, groups
    )


def conv_depthwise(x, w, kernel_size, bias, stride, padding, dilation):
    return wide(
        A.convolution.default,
        x,
        w,
        bias,
        stride,
        padding,
        dilation,
        False,
        [0] * len(stride),
        x.shape[1],
    )


def wide(op, x, *rest):
    if x.dtype != torch.float16:
        return op(x, *rest)
    return op(x.float(), *[r.float() if isinstance(r, torch.Tensor) else r for r in rest]).half()


def in_full(x):
    """Return float32 for half types, as cuDNN's BatchNorm computes them; float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps, **_):
    out, m, v = A.native_batch_norm.default(
        in_full(x), weight, bias, mean, var, training, momentum, eps
    )
    return out.to(x.dtype), m, v, torch.empty(0, dtype=torch.uint8)


def cudnn_batch_norm_backward(x, grad, weight, mean, var, saved_mean, saved_var, eps, reserve):
    dx, dw, db = A.native_batch_norm_backward.default(
        in_full(grad), in_full(x), weight, mean, var, saved_mean, saved_var, True, eps, [True] * 3
    )
    return dx.to(x.dtype), dw, db


def scores(q, k, bias, causal, scale):
    s = (
        q.float()
        @ k.float().transpose(-2, -1)
        * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    )
    if bias is not None:
        s = s + bias.float()
    if causal:
        s = s.masked_fill(
            torch.ones(s.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf
        )
    return s


def attention(q, k, v, bias=None, dropout=0.0, causal=False, scale=None):
    s = scores(q, k, bias, causal, scale)
    return (s.softmax(-1) @ v.float()).to(q.dtype), s.logsumexp(-1)


def attention_backward(grad, q, k, v, bias, causal, scale):
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    p, g = scores(q, k, bias, causal, scale).softmax(-1), grad.float()
    dp = g @ v.float().transpose(-2, -1)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    return (
        ((ds @ k.float()) * factor).to(q.dtype),
        (ds.transpose(-2, -1) @ q.float() * factor).to(k.dtype),
        (p.transpose(-2, -1) @ g).to(v.dtype),
        ds,
    )


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return attention(q, k, v, None, dropout_p, is_causal, scale)


def efficient(
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    return attention(q, k, v, attn_bias, dropout_p, is_causal, scale)[:1]


def cudnn_attention(
    q,
    k,
    v,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    return attention(q, k, v, attn_bias, dropout_p, is_causal, scale)[:1]


def flash_backward(
    grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None
):
    return attention_backward(grad, q, k, v, None, is_causal, scale)[:3]


def efficient_backward(
    grad,
    q,
    k,
    v,
    attn_bias,
    out,
    lse,
    seed,
    offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    dq, dk, dv, ds = attention_backward(grad, q, k, v, attn_bias, is_causal, scale)
    return dq, dk, dv, (ds if attn_bias is not None and grad_input_mask[3] else None)


def cudnn_attention_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    seed,
    offset,
    attn_bias,
    cq,
    ck,
    mq,
    mk,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    return attention_backward(grad, q, k, v, attn_bias, is_causal, scale)[:3]


def other_axes(x):
    return [0, *range(2, x.dim())]


def per_channel(t, x):
    return t.view(1, -1, *[1] * (x.dim() - 2))


def to_accumulation_type(x):
    """Return the type in which the kernels accumulate: float64 as it is, others as float32."""
    return x if x.dtype == torch.float64 else x.float()


def batch_norm_stats(x, eps):
    var, mean = torch.var_mean(to_accumulation_type(x), other_axes(x), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    counts = to_accumulation_type(counts).view(-1, 1)
    total = counts.sum()
    m = (mean * counts).sum(0) / total
    var = ((invstd.pow(-2) - eps + (mean - m) ** 2) * counts).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(m.to(running_mean.dtype), alpha=momentum)
        running_var.mul_(1 - momentum).add_(
            (var * total / (total - 1)).to(running_var.dtype), alpha=momentum
        )
    return m, (var + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    y = (to_accumulation_type(x) - per_channel(mean, x)) * per_channel(invstd, x)
    return (y * per_channel(weight, x) + per_channel(bias, x) if weight is not None else y).to(
        x.dtype
    )


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    g = to_accumulation_type(grad)
    dy = g.sum(other_axes(x))
    dyx = (g * (to_accumulation_type(x) - per_channel(mean, x))).sum(other_axes(x))
    return dy, dyx, dyx * invstd, dy


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, dy, dyx, count):
    n = count.sum()
    y = (
        to_accumulation_type(grad)
        - per_channel(dy / n, x)
        - (to_accumulation_type(x) - per_channel(mean, x)) * per_channel(invstd**2 * dyx / n, x)
    ) * per_channel(invstd, x)
    return (y * per_channel(weight, x) if weight is not None else y).to(x.dtype)


CUDA_ONLY = {
    "cudnn_convolution": cudnn_convolution,
    "cudnn_convolution_transpose": cudnn_convolution_transpose,
    "_conv_depthwise2d": conv_depthwise,
    "conv_depthwise3d": conv_depthwise,
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_attention,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_attention_backward,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
}


def wrap_cuda_only(name, compute):
    op = getattr(torch.ops.aten, name).default
    original = torch.library.get_kernel(op, "CUDA")

    def kernel(keys, *args, **kwargs):
        before = getattr(THREAD, "inside", False)
        THREAD.inside = True
        try:
            result = original.call_boxed(keys, *args, **kwargs)
            if before:
                return result
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch():
                cpu_result = compute(
                    *[map_tensors(a, shadow) for a in args],
                    **{k: map_tensors(v, shadow) for k, v in kwargs.items()},
                )
                if isinstance(result, torch.Tensor):
                    return store(result, cpu_result)
                # Parts that are not computed stay as they are.
                for part, value in zip(result, cpu_result, strict=False):
                    if (
                        isinstance(part, torch.Tensor)
                        and value is not None
                        and part.shape == value.shape
                    ):
                        store(part, value)
                return result
        finally:
            THREAD.inside = before

    return kernel


LIBRARY = None


def wrap_missing(name):
    """Return a kernel that raises an error, because nobody computes the result of its operator."""
    original = torch.library.get_kernel(f"aten::{name}", "CUDA")

    def kernel(keys, *args, **kwargs):
        # This is a part of an operator whose result is computed.
        if getattr(THREAD, "inside", False):
            return original.call_boxed(keys, *args, **kwargs)
        raise NotImplementedError(f"the null GPU has no code for aten::{name}")

    return kernel


def install():
    """Override each operator that has a CUDA kernel: its CPU kernel computes after it."""
    global LIBRARY
    LIBRARY = torch.library.Library("aten", "IMPL")
    on_cuda = list_operators("CUDA")
    on_cpu = set().union(*map(list_operators, ("CPU", *COMPOSITES)))
    # These are composite in torch's table, but have their own kernels behind it.
    extra = {"convolution_backward", "repeat_interleave.Tensor", "copy_"} - on_cuda
    for name in sorted((on_cuda | extra) - CUDA_ONLY.keys()):
        if not name.partition(".")[0].startswith(UNTOUCHED):
            override(name, wrap(name) if name in on_cpu | extra else wrap_missing(name))
    for name, compute in CUDA_ONLY.items():
        override(name, wrap_cuda_only(name, compute))


COMPOSITES = (
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def list_operators(key):
    """Return the operators that have a kernel for a dispatch key, without their namespace."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def override(name, kernel):
    LIBRARY.impl(name, kernel, "CUDA", with_keyset=True, allow_override=True)
