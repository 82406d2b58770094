"""A LightningDataModule of small pictures with every kind of target, as another project has it."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

SIZE = 16


def pictures(number: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return grey squares of 6 px on noise, and what is asked of them."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.1 * torch.randn(number, 1, SIZE, SIZE, generator=generator)
    corner = torch.randint(0, SIZE - 6, (number, 2), generator=generator)
    bright = 1 + torch.rand(number, generator=generator)
    mask = torch.zeros(number, SIZE, SIZE, dtype=torch.int64)
    for image, label, (y, x), level in zip(images, mask, corner.tolist(), bright.tolist(), strict=True):
        image[0, y : y + 6, x : x + 6] += level
        label[y : y + 6, x : x + 6] = 1
    halves = corner >= (SIZE - 6) // 2
    targets = {"labels": halves.float(), "number": 10 * bright, "mask": mask, "class": halves[:, 0].long()}
    return {"images": images, **targets}


class Shapes(pl.LightningDataModule):
    """
    Args:
        kind: class, labels, number, mask or views (two of each image, with other noise).
    """

    image_size, channels = SIZE, 1

    def __init__(self, kind: str = "class", batch_size: int = 32) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size
        self.class_names = ["top", "left"] if kind == "labels" else ["none", "square"]
        self.num_classes = 2

    def setup(self, stage: str) -> None:
        self.parts = [self._part(512, 0), self._part(64, 1)]

    def _part(self, number: int, seed: int) -> TensorDataset:
        made = pictures(number, seed)
        images, targets = made["images"], made["class" if self.kind == "views" else self.kind]
        if self.kind == "views" and seed == 0:
            images = torch.stack([images, images + 0.1 * torch.randn(images.shape)], 1)
        return TensorDataset(images, targets)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[1], self.batch_size)

    test_dataloader = val_dataloader
