"""What DistributedDataParallel holds beside the weights, for steps on fake tensors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Buckets(nn.Module):
    """Holds what DistributedDataParallel holds, whose C++ takes no fake tensors: all gradients as views of buckets.

    One bucket lives from the start. Before the second forward buckets of `bucket_cap_mb` are laid out in the order in
    which gradients arrived, and take over the gradients from it.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0) -> None:
        super().__init__()
        self.module, self.bucket_cap_mb = module, bucket_cap_mb
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.views: dict[nn.Parameter, torch.Tensor] = {}
        self.arrived: list[nn.Parameter] = []
        self.synchronises, self.laid_out_again = True, False
        self._lay_out([trainable])
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(self._into_bucket)

    def _lay_out(self, buckets: Iterable[list[nn.Parameter]]) -> None:
        for parameters in buckets:
            bucket = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
            for parameter, flat in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
                self.views[parameter] = flat.view(parameter.shape)
                if parameter.grad is not None:
                    parameter.grad = self.views[parameter]

    def _into_bucket(self, parameter: nn.Parameter) -> None:
        if self.synchronises:
            parameter.grad = self.views[parameter]
            if not self.laid_out_again:
                self.arrived.append(parameter)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.synchronises = False
        yield
        self.synchronises = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.arrived and not self.laid_out_again and self.training:
            self._lay_out(in_buckets(self.arrived, self.bucket_cap_mb))
            self.laid_out_again, self.arrived = True, []
        return self.module(*args, **kwargs)


def in_buckets(parameters: list[nn.Parameter], cap_mb: float) -> Iterator[list[nn.Parameter]]:
    """As DDP groups them: the first bucket is full from 1 MiB on, the others from `cap_mb` MiB on."""
    bucket: list[nn.Parameter] = []
    cap = 1.0
    for parameter in parameters:
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= cap * 2**20:
            yield bucket
            bucket, cap = [], cap_mb
    if bucket:
        yield bucket
