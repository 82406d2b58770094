"""Batches of images that have a shape and no contents, for steps on fake tensors."""

from collections.abc import Iterator

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

    def val_dataloader(self) -> "Repeated":
        return Repeated(self.shape, self.eval_batch, 1)


class Repeated:
    def __init__(self, shape: tuple[int, int, int], batch: int, times: int) -> None:
        self.shape, self.batch, self.times = shape, batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.times):
            yield torch.zeros(self.batch, *self.shape), torch.zeros(self.batch, dtype=torch.int64)
