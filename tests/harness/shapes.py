"""A LightningDataModule of small pictures with every kind of target, as another project has it."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, StackDataset, TensorDataset

from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.training.task import Task

SIZE = 16


def pictures(number: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return grey squares of 6 px on noise, and what is asked of them."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.1 * torch.randn(number, 1, SIZE, SIZE, generator=generator)
    corner = torch.randint(0, SIZE - 6, (number, 2), generator=generator)
    bright = 1 + torch.rand(number, generator=generator)
    mask = torch.zeros(number, SIZE, SIZE, dtype=torch.int64)
    for image, label, (y, x), level in zip(
        images, mask, corner.tolist(), bright.tolist(), strict=True
    ):
        image[0, y : y + 6, x : x + 6] += level
        label[y : y + 6, x : x + 6] = 1
    halves = corner >= (SIZE - 6) // 2
    # The class of kind=inputs needs both: the place of the square and the number beside it.
    age = 50 + 10 * torch.randn(number, generator=generator)
    targets = {
        "labels": halves.float(),
        "number": 10 * bright,
        "mask": mask,
        "class": halves[:, 0].long(),
        "age": age,
        "inputs": (halves[:, 0] & (age > 50)).long(),
    }
    return {"images": images, **targets}


class Shapes(pl.LightningDataModule):
    """
    Args:
        kind: class, labels, number, mask, views (two of each image, with other noise) or inputs
            (a number beside each image).
    """

    image_size, channels = SIZE, 1

    def __init__(self, kind: str = "class", batch_size: int = 32) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size
        self.class_names = ["top", "left"] if kind == "labels" else ["none", "square"]
        self.num_classes = 2
        if kind == "inputs":
            self.inputs = ["age"]

    def setup(self, stage: str) -> None:
        self.parts = [self._part(512, 0), self._part(64, 1)]

    def _part(self, number: int, seed: int) -> Dataset:
        made = pictures(number, seed)
        images, targets = made["images"], made["class" if self.kind == "views" else self.kind]
        if self.kind == "views" and seed == 0:
            images = torch.stack([images, images + 0.1 * torch.randn(images.shape)], 1)
        if self.kind == "inputs":
            numbers = StackDataset(age=(made["age"] - 50) / 10)
            return StackDataset(StackDataset(images, numbers), targets)
        return TensorDataset(images, targets)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[1], self.batch_size)

    test_dataloader = val_dataloader


class ShapeImages(ImageDataModule):
    """The same pictures by Lockstep's data module, whose order does not depend on the ranks.

    Args:
        kind: class, labels, number, mask, inputs, or dict: a class and a number.
    """

    channels = 1

    def __init__(self, *, kind: str = "class", **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def read(self) -> ImageSet:
        made = {name: each.numpy() for name, each in pictures(160).items()}
        images = (60 * made.pop("images").transpose(0, 2, 3, 1) + 60).clip(0, 255).astype(np.uint8)
        names = ["top", "left"] if self.kind == "labels" else ["none", "square"]
        targets = (
            {"class": made["class"], "number": made["number"]}
            if self.kind == "dict"
            else made[self.kind]
        )
        columns = {"age": made["age"]} if self.kind == "inputs" else {}
        return ImageSet(images, targets, names, num_test=32, columns=columns)


class ClassAndNumber(Task):
    """Learns the two targets of kind=dict with one net."""

    def training_step(self, batch, batch_idx):
        images, targets = batch
        outputs = self.net(images)
        loss = F.cross_entropy(outputs[:, :2], targets["class"])
        return loss + F.mse_loss(outputs[:, 2], targets["number"] / 10)

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        outputs = self.net(images)
        self.count(acc=outputs[:, :2].argmax(1) == targets["class"])
        self.count(mae=(10 * outputs[:, 2] - targets["number"]).abs())

    test_step = validation_step
