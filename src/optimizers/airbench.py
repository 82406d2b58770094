"""Airbench's optimizer: Muon for hidden weights, SGD with momentum for the rest.

Muon orthogonalises the momentum (github.com/KellerJordan/Muon). As in
github.com/KellerJordan/cifar10-airbench, the norm of each hidden weight is reset at every step.

python src/train.py optimizer=airbench model=airbench
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

# Keller Jordan's coefficients: steepest at zero for few iterations.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-12


def orthogonalise(matrix: Tensor, iterations: int = 3) -> Tensor:
    """Return the matrix (n, m) with all singular values changed to about 1 (0.5 to 1.5).

    Computed in bf16 on a GPU and in the given precision on a CPU.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]

    x = matrix
    if matrix.is_cuda:
        x = x.bfloat16()
    if is_tall:
        x = x.T

    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)

    if is_tall:
        x = x.T
    return x.to(matrix.dtype)


class AirbenchMuon(torch.optim.Optimizer):
    """Muon for convolutions and matrices, SGD with Nesterov momentum for the head and all vectors.

    The norm of each hidden weight is set to sqrt(outputs) before every step, also where its rate is
    zero: weights that were trained otherwise are rescaled. A weight of zeros trains from zero.
    Sharded (DTensor) parameters work: each rank orthogonalises the whole gradient.

    Args:
        named_parameters: the last matrix among them is the head; parameters without requires_grad
            are skipped.
        lr: rate of the hidden weights, relative to their norm; 0.24 at batch 2000.
        momentum: of the hidden weights.
        head_lr: rate of the head.
        vector_lr: rate of biases, norms and embeddings.
        sgd_momentum: of head and vectors.
        weight_decay: of head and vectors, decoupled, multiplied by their learning rate.
        iterations: of Newton and Schulz's method.
    """

    takes_named_parameters = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float = 0.24,
        momentum: float = 0.6,
        head_lr: float = 0.02,
        vector_lr: float = 0.1,
        sgd_momentum: float = 0.85,
        weight_decay: float = 0.04,
        iterations: int = 3,
    ) -> None:
        trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim in (2, 4)]
        vectors = [parameter for parameter in trained if parameter.ndim not in (2, 4)]

        muon = {"kind": "muon", "momentum": momentum}
        sgd = {"kind": "sgd", "momentum": sgd_momentum, "weight_decay": weight_decay}
        groups = [
            {**muon, "params": matrices[:-1], "lr": lr},
            {**sgd, "params": matrices[-1:], "lr": head_lr},
            {**sgd, "params": vectors, "lr": vector_lr},
        ]
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "iterations": iterations}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for group in self.param_groups:
            update = _muon_step if group["kind"] == "muon" else _sgd_step
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, self._momentum(parameter, group), group)
        return loss

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return Nesterov's momentum, the gradient plus the decayed sum that contains it."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        return gradient.add(buffer, alpha=group["momentum"])


def _sgd_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(direction, alpha=-group["lr"])


def _muon_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    # A weight of zeros stays zero. Comparing its norm in an `if` would wait for the device.
    norm = parameter.norm().clamp(min=SMALLEST_NORM)
    parameter.mul_(parameter.shape[0] ** 0.5 / norm)

    is_sharded = hasattr(direction, "full_tensor")
    whole = direction.full_tensor() if is_sharded else direction
    update = orthogonalise(whole.flatten(1), group["iterations"]).view(whole.shape)
    if is_sharded:
        update = distribute_tensor(
            update, direction.device_mesh, direction.placements, src_data_rank=None
        )
    parameter.add_(update, alpha=-group["lr"])
