"""TrivialAugment: one operation of any strength on each image, nothing to tune (https://arxiv.org/abs/2103.10158)."""

from torchvision.transforms import v2

from augmentations.resized_crop import ResizedCrop
from lockstep.data.augmentation import Operation
from lockstep.data.framing import Framing


class TrivialAugment(ResizedCrop):
    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.TrivialAugmentWide(fill=framing.fill)]
