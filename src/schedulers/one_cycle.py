"""The OneCycleLR of torch: the learning rate rises to lr and falls far below where it began (arXiv 1708.07120).

python src/train.py scheduler=one_cycle scheduler.pct_start=0.3
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from lockstep.runs.errors import UserError


class OneCycle(OneCycleLR):
    """Its length is that of this run: a run that goes on for longer stretches the cycle, as other schedules do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key == "last_epoch"})

    def get_lr(self) -> list[float | Tensor]:
        """The last rate stays after the end."""
        self.last_epoch = min(self.last_epoch, self.total_steps - 1)
        return super().get_lr()


def one_cycle(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> OneCycleLR:
    """Stepped after each optimizer step: from lr / div_factor to lr, then to lr / div_factor / final_div_factor.

    Momentum stays as the optimizer has it.

    Raises:
        UserError: pct_start is 0, 1 or no share.
    """
    if not 0 < pct_start < 1:
        raise UserError(f"scheduler.pct_start={pct_start}: give a number above 0 and below 1.")
    if pct_start * total_steps == 1:
        pct_start *= 1 + 1e-6  # torch would divide by the zero between this and the first step
    return OneCycle(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=max(1, total_steps),
        pct_start=pct_start,
        div_factor=div_factor,
        final_div_factor=final_div_factor,
        cycle_momentum=False,
    )
