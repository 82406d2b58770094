"""AutoAugment: pairs of operations as a search found them (https://arxiv.org/abs/1805.09501)."""

from typing import Any

from torchvision.transforms import AutoAugmentPolicy, v2

from augmentations.resized_crop import ResizedCrop
from lockstep.data.augmentation import Operation
from lockstep.data.framing import Framing
from lockstep.runs.errors import UserError

FOUND_ON = tuple(policy.value for policy in AutoAugmentPolicy)


class AutoAugment(ResizedCrop):
    """
    Args:
        found_on: the data set of the search: imagenet, cifar10 or svhn.
    """

    def __init__(self, *, found_on: str = "imagenet", **options: Any) -> None:
        super().__init__(**options)
        if found_on not in FOUND_ON:
            raise UserError(f"augmentation.found_on={found_on} must be one of {', '.join(FOUND_ON)}.")
        self.found_on = AutoAugmentPolicy(found_on)

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.AutoAugment(self.found_on, fill=framing.fill)]
