"""Batches of images that have a shape and no contents, for steps on fake tensors."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch


class FakeImages(pl.LightningDataModule):
    """Batches of the right shape: `steps` to train on, one to validate on."""

    def __init__(self, shape: tuple[int, int, int], batch: int, eval_batch: int, steps: int, num_classes: int) -> None:
        super().__init__()
        self.shape, self.batch, self.eval_batch, self.steps = shape, batch, eval_batch, steps
        self.num_classes = num_classes

    def train_dataloader(self) -> "Repeated":
        return Repeated(self.shape, self.batch, self.steps)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """As our data sets deliver them: bytes, channels innermost, become float32."""
        images, labels = batch
        return images.float().permute(0, 3, 1, 2), labels

    def val_dataloader(self) -> "Repeated":
        return Repeated(self.shape, self.eval_batch, 1)


class Repeated:
    def __init__(self, shape: tuple[int, int, int], batch: int, times: int) -> None:
        self.shape, self.batch, self.times = shape, batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        channels, height, width = self.shape
        for _ in range(self.times):  # the consumer alone holds what is yielded
            yield (
                torch.zeros(self.batch, height, width, channels, dtype=torch.uint8),
                torch.zeros(self.batch, dtype=torch.int64),
            )
