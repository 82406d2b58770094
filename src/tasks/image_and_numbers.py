"""One class for each image and numbers beside it (task=image_and_numbers).

python src/train.py task=image_and_numbers data=csv data.root=FILE.csv 'data.inputs=[age,dose]'
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.process.errors import UserError
from tasks.classifier import ImageClassifier, check_logits, probabilities_of

# Images (B, C, H, W), and numbers (B,) by name.
Inputs = tuple[Tensor, dict[str, Tensor]]


class ImageAndNumbers(ImageClassifier):
    """Join the features of an image with the numbers beside it, in a head of two layers.

    Args:
        net: a net from images (B, C, H, W) float to features (B, outputs).
        outputs: the number of features.
        inputs: the names of the standardised numbers, in the order in which the head takes them.
        hidden: the width of the head's hidden layer.
        num_classes, parts: see ImageClassifier.

    Raises:
        UserError: there are no numbers.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        num_classes: int,
        outputs: int,
        inputs: Iterable[str] = (),
        hidden: int = 64,
        **parts: Any,
    ) -> None:
        super().__init__(net, num_classes=num_classes, **parts)
        self.inputs = list(inputs)
        if not self.inputs:
            raise UserError(
                "task=image_and_numbers needs numbers beside the images: give data.inputs=[a,b], "
                "columns of numbers in the table."
            )
        self.head = nn.Sequential(
            nn.Linear(outputs + len(self.inputs), hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )

    def joint_logits(self, images: Tensor, numbers: dict[str, Tensor]) -> Tensor:
        """Return (B, num_classes) logits of the images and their numbers together."""
        features = self.net(images).relu()
        number_features = torch.stack([numbers[name] for name in self.inputs], dim=1)
        logits = self.head(torch.cat([features, number_features.to(features.dtype)], dim=1))
        check_logits(logits, self.num_classes)
        return logits

    def training_step(self, batch: tuple[Any, Tensor], batch_idx: int) -> Tensor:
        (images, numbers), targets = batch
        logits = self.joint_logits(images, numbers)
        self.count_hits(logits, targets)
        return self.loss(logits, targets).mean()

    def predict_logits(self, inputs: Any) -> Tensor:
        """Return logits (B, num_classes), with test_time_flip the mean with the mirror image."""
        images, numbers = inputs
        logits = self.joint_logits(images, numbers)
        if self.test_time_flip:
            logits = (logits + self.joint_logits(images.flip(-1), numbers)) / 2
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return probabilities (B, num_classes).

        Args:
            batch: (images, numbers), or ((images, numbers), classes).
        """
        inputs: Inputs = batch if isinstance(batch[1], dict) else batch[0]
        return probabilities_of(self.loss, self.predict_logits(inputs))
