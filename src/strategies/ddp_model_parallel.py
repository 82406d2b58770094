"""DDP over ranks that each cut the net into stages on devices of their own.

trainer=ddp_model_parallel on GPUs, trainer=ddp_model_parallel_sim in CPU processes. The stages of a
rank work one after the other, as under trainer=model_parallel, and backward averages the gradients
of each stage over the ranks. PyTorch's DDP tutorial names it "Combine DDP with Model Parallelism".
"""

from typing import Any

import torch

from lockstep.process.errors import UserError
from lockstep.strategies.ddp import DDP
from strategies.model_parallel import NetInStages, check_micro_batches


class DDPModelParallel(NetInStages, DDP):
    """The ranks of a node share its devices in order: rank 0 has the first `stages` of them.

    Args:
        stages: the devices of each rank, from two on.
        micro_batches, cut: the same as in ModelParallel.
        options: further options of DDP.
    Raises:
        UserError: a rank would have one device.
    """

    def __init__(
        self,
        stages: int = 2,
        micro_batches: int = 1,
        cut: list[int] | None = None,
        **options: Any,
    ) -> None:
        if stages < 2:
            raise UserError(
                f"trainer.stages={stages}: give 2 or more, or choose trainer=ddp (on CPUs ddp_sim)."
            )
        super().__init__(**options)
        self.stages = stages
        self.micro_batches = check_micro_batches(micro_batches)
        self.group_starts = cut

    @property
    def root_device(self) -> torch.device:
        """The device of this rank's first stage, which gets the images and computes the loss."""
        return choose_stage_devices(self.parallel_devices[0].type, self.stages, self.local_rank)[0]

    def setup_environment(self) -> None:
        self.process_devices = choose_stage_devices(
            self.root_device.type, self.stages, self.local_rank
        )
        super().setup_environment()


def choose_stage_devices(device_type: str, stages: int, local_rank: int) -> list[torch.device]:
    """Return one device for each stage.

    >>> choose_stage_devices("cuda", 2, 1)
    [device(type='cuda', index=2), device(type='cuda', index=3)]
    """
    if device_type == "cpu":
        return [torch.device("cpu")] * stages
    first = local_rank * stages
    return [torch.device(device_type, index) for index in range(first, first + stages)]
