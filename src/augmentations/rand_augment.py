"""RandAugment: some operations of one strength, drawn from fourteen (https://arxiv.org/abs/1909.13719)."""

from typing import Any

from torchvision.transforms import v2

from augmentations.resized_crop import ResizedCrop
from lockstep.data.augmentation import Operation
from lockstep.data.framing import Framing
from lockstep.runs.errors import UserError

BINS = 31


class RandAugment(ResizedCrop):
    """
    Args:
        num_ops: operations on each image.
        magnitude: their strength, from 0 to 30.
    """

    def __init__(self, *, num_ops: int = 2, magnitude: int = 9, **options: Any) -> None:
        super().__init__(**options)
        if num_ops < 1 or not 0 <= magnitude < BINS:
            raise UserError(
                f"augmentation.num_ops={num_ops} must be at least 1 and augmentation.magnitude={magnitude} from 0 to "
                f"{BINS - 1}."
            )
        self.num_ops, self.magnitude = num_ops, magnitude

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.RandAugment(self.num_ops, self.magnitude, BINS, fill=framing.fill)]
