"""The small network of PyTorch's MNIST example: two convolutions and two linear layers.

python src/train.py model=small_cnn data=mnist
"""

from torch import Tensor, nn

from lockstep.runs.errors import UserError

SMALLEST = 6  # two 3x3 convolutions without padding and one pooling leave a single pixel


class SmallCNN(nn.Module):
    """The layers conv 32·3, conv 64·3, max-pool 2, dropout, linear 128, dropout, linear num_classes.

    At 28 px the first linear layer has 9,216 inputs as in the example; other sizes give another count.

    Raises:
        UserError: image_size below 6.
    """

    def __init__(
        self, num_classes: int, image_size: int, channels: int, dropout: float = 0.25, head_dropout: float = 0.5
    ) -> None:
        super().__init__()
        if image_size < SMALLEST:
            raise UserError(f"model=small_cnn takes images of {SMALLEST} px or more, not data.image_size={image_size}.")
        side = (image_size - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),  # behind the pooling, where the values are the same and four times fewer
            nn.Dropout(dropout),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(64 * side * side, 128), nn.ReLU(), nn.Dropout(head_dropout), nn.Linear(128, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def shard_units(self) -> list[nn.Module]:
        return [self.head[0]]  # nine tenths of the parameters

    def stages(self) -> list[nn.Module]:
        return [self.features[:2], self.features[2:], self.head[:3], self.head[3:]]
