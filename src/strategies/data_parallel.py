"""torch.nn.DataParallel: one process, every GPU of this machine (trainer=dp).

The batch is cut over the GPUs in each forward, the weights are copied to all of them every time: simple, and slower
than trainer=ddp, which is why DDP exists. The batch statistics of BatchNorm are those of each GPU's part.
"""

import copy

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from errors import UserError


class DataParallel(SingleDeviceStrategy):
    """Weights, optimizer and checkpoints are those of the plain net on the first GPU.

    Args:
        num_gpus: how many to use; None for all.
    Raises:
        UserError: fewer than two GPUs: torch's DataParallel would then do nothing, silently.
    """

    def __init__(self, num_gpus: int | None = None) -> None:
        found = torch.cuda.device_count()
        wanted = found if num_gpus is None else num_gpus
        if wanted < 2 or wanted > found:
            works = {0: "trainer=ddp_sim", 1: "trainer=gpu"}.get(found, f"trainer.num_gpus={found}")
            raise UserError(
                f"trainer=dp spreads a batch over two or more GPUs of one machine, and {found} of "
                f"{max(wanted, 2)} is here: {works} works."
            )
        super().__init__(device=torch.device("cuda", 0))
        self.num_gpus = wanted

    def _setup_model(self, model: nn.Module) -> nn.Module:
        spread_forward(model.net, list(range(self.num_gpus)))
        return model

    def teardown(self) -> None:
        self.lightning_module.net.__dict__.pop("forward", None)
        super().teardown()


def spread_forward(net: nn.Module, device_ids: list[int]) -> None:
    """Route net's forward through nn.DataParallel, keeping the net and its parameter names.

    The replicas are made of a shallow copy, which shares every parameter but has the forward of the class.
    """
    net.__dict__.pop("forward", None)
    parallel = nn.DataParallel(copy.copy(net), device_ids=device_ids)
    net.__dict__["forward"] = parallel.forward
