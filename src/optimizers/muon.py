"""Muon: momentum whose update is orthogonalised (github.com/KellerJordan/Muon), SGD with momentum for the rest.

python src/train.py optimizer=muon model=airbench
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's coefficients: steepest at zero for few iterations


def orthogonalise(matrix: Tensor, iterations: int = 3) -> Tensor:
    """Return the matrix (n, m) with all singular values changed to about 1 (0.5 to 1.5).

    Computed in bf16 on a GPU and in the given precision on a CPU.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for hidden weights (convolutions and matrices), SGD with Nesterov momentum for the head and all vectors.

    Sharded (DTensor) parameters work: each rank orthogonalises the whole gradient.

    Args:
        named_parameters: the last matrix among them is the head; parameters without requires_grad are skipped.
        lr: of the hidden weights, whose norm is kept at sqrt(outputs); 0.24 at batch 2000.
        head_lr, vector_lr: of the head and of biases, norms and embeddings.
        weight_decay: of head and vectors, decoupled, multiplied by their learning rate.
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
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        matrices = [name for name, parameter in trained if parameter.ndim in (2, 4)]
        hidden, head = set(matrices[:-1]), matrices[-1:]
        sgd = {"kind": "sgd", "momentum": sgd_momentum, "weight_decay": weight_decay}
        groups = [
            {"kind": "muon", "params": [p for n, p in trained if n in hidden], "lr": lr, "momentum": momentum},
            {**sgd, "params": [p for n, p in trained if n in head], "lr": head_lr},
            {**sgd, "params": [p for n, p in trained if n not in hidden and n not in head], "lr": vector_lr},
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
        """Return Nesterov's momentum: the gradient plus the decayed sum that already contains it."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        return gradient.add(buffer, alpha=group["momentum"])


def _sgd_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])


def _muon_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    parameter.mul_(parameter.shape[0] ** 0.5 / parameter.norm())
    sharded = hasattr(direction, "full_tensor")
    whole = direction.full_tensor() if sharded else direction
    update = orthogonalise(whole.flatten(1), group["iterations"]).view(whole.shape)
    if sharded:
        update = distribute_tensor(update, direction.device_mesh, direction.placements, src_data_rank=None)
    parameter.add_(update, alpha=-group["lr"])
