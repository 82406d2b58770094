"""The small network of PyTorch's MNIST example: two convolutions and two linear layers.

python src/train.py model=small_cnn data=mnist
"""

from torch import Tensor, nn

from lockstep.process.errors import UserError

# Two 3x3 convolutions without padding and one pooling leave one pixel of an image of this size.
SMALLEST_IMAGE_SIZE = 6


class SmallCNN(nn.Module):
    """Two 3x3 convolutions (32 and 64 channels), a pooling and two linear layers, with dropout.

    At 28 px the first linear layer has 9,216 inputs, as in the example. The number depends on the
    image size.

    Raises:
        UserError: image_size is below 6.
    """

    def __init__(
        self,
        num_classes: int,
        image_size: int,
        channels: int,
        dropout: float = 0.25,
        head_dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if image_size < SMALLEST_IMAGE_SIZE:
            raise UserError(
                f"model=small_cnn takes images of {SMALLEST_IMAGE_SIZE} px or more, "
                f"not data.image_size={image_size}."
            )

        # The second ReLU comes after the pooling: a quarter of the values has the same result.
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
        )
        side = (image_size - 4) // 2
        self.head = nn.Sequential(
            nn.Linear(64 * side * side, 128),
            nn.ReLU(),
            nn.Dropout(head_dropout),
            nn.Linear(128, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def shard_units(self) -> list[nn.Module]:
        """Return the first linear layer, which has nine tenths of the parameters."""
        return [self.head[0]]

    def stages(self) -> list[nn.Module]:
        return [self.features[:2], self.features[2:], self.head[:3], self.head[3:]]
