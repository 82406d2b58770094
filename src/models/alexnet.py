"""AlexNet of torchvision ("One weird trick", arXiv 1404.5997), and a variant with BatchNorm.

python src/train.py model=alexnet data=cifar10 data.image_size=64
"""

from torch import Tensor, nn

from lockstep.process.errors import UserError

# The width, kernel, stride and padding of each convolution.
CONVOLUTIONS = (
    (64, 11, 4, 2),
    (192, 5, 1, 2),
    (384, 3, 1, 1),
    (256, 3, 1, 1),
    (256, 3, 1, 1),
)
POOLED_SIDE = 6  # pixels
HEAD_WIDTH = 4096


class AlexNet(nn.Module):
    """A net from images (B, channels, image_size, image_size) to logits (B, num_classes).

    The state dict has the keys and shapes of torchvision (features.0 … classifier.6), so weights of
    torchvision can be loaded.

    Raises:
        UserError: the image is too small for the poolings.
    """

    # A 3/2 max-pooling follows the convolutions of these numbers.
    pooled_convolutions = (1, 2, 5)
    has_batch_norm = False
    # The last pooling would leave no pixel of a smaller image.
    smallest_image_size = 63  # pixels

    def __init__(
        self, num_classes: int, image_size: int, channels: int, dropout: float = 0.5
    ) -> None:
        super().__init__()
        if image_size < self.smallest_image_size:
            raise UserError(
                f"{type(self).__name__} takes images of {self.smallest_image_size} px or more, "
                f"not data.image_size={image_size}."
            )

        self.block_ends: list[int] = []
        layers: list[nn.Module] = []
        for number, (width, kernel, stride, padding) in enumerate(CONVOLUTIONS, start=1):
            layers.append(nn.Conv2d(channels, width, kernel, stride, padding))
            layers.append(nn.ReLU(inplace=True))
            if number in self.pooled_convolutions:
                layers.append(nn.MaxPool2d(3, 2))
            if self.has_batch_norm:
                layers.append(nn.BatchNorm2d(width))
            channels = width
            self.block_ends.append(len(layers))

        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED_SIDE)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels * POOLED_SIDE**2, HEAD_WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(HEAD_WIDTH, HEAD_WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(HEAD_WIDTH, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        features = self.avgpool(self.features(images))
        return self.classifier(features.flatten(1))

    def shard_units(self) -> list[nn.Module]:
        """Return each convolution and each linear layer.

        The three linear layers hold 94 % of the parameters.
        """
        layers = (*self.features, *self.classifier)
        return [layer for layer in layers if isinstance(layer, nn.Conv2d | nn.Linear)]

    def stages(self) -> list[nn.Module]:
        """Return the five convolution blocks, then the head's three linear layers."""
        starts = [0, *self.block_ends[:-1]]
        blocks = [
            self.features[start:end] for start, end in zip(starts, self.block_ends, strict=True)
        ]
        first_linear = nn.Sequential(self.avgpool, nn.Flatten(), *self.classifier[:3])
        return [*blocks, first_linear, self.classifier[3:6], self.classifier[6:]]


class AlexNetBN(AlexNet):
    """AlexNet with a pooling after the third convolution too, and BatchNorm at each block's end."""

    pooled_convolutions = (1, 2, 3, 5)
    has_batch_norm = True
    smallest_image_size = 127  # pixels
