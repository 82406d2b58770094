"""Trainings with one fault each, which src/prove.py must find.

Sound is what they have in common.
"""

import random

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

ROWS = 192
HELD_OUT = 38


class Rows(Dataset):
    """Points and the class of their sum."""

    def __init__(self, number: int = ROWS, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(number, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.x[index].sum() > 0)


class Points(pl.LightningDataModule):
    def __init__(self, num_workers: int = 0) -> None:
        super().__init__()
        self.num_workers = num_workers

    def training_rows(self) -> Dataset:
        return Rows()

    def train_dataloader(self):
        return DataLoader(self.training_rows(), 16, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(Rows(HELD_OUT, seed=1), 16)

    test_dataloader = val_dataloader


class Sound(pl.LightningModule):
    """Adam with a schedule, dropout, a metric that counts each point once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Normalised(Sound):
    """BatchNorm over the part of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


class LogsItsShare(Sound):
    """The metric is that of rank 0."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class MeanOfMeans(Sound):
    """The metric is a mean of what is no mean."""

    def on_validation_epoch_start(self):
        self.worst = torch.zeros((), dtype=self.dtype)

    def validation_step(self, batch, batch_idx):
        self.worst = torch.maximum(self.worst, self.loss(batch))

    def on_validation_epoch_end(self):
        self.log("val_loss", self.worst, sync_dist=True)


class Summed(Sound):
    """The loss of a step is a sum."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum")


class Halving(nn.Module):
    def forward(self, x):
        return x / 2 if torch.compiler.is_compiling() else x


class HalvesWhenCompiled(Sound):
    """The compiled net computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(Halving())


class CountsLosses(Sound):
    """A metric of the training epoch that a checkpoint within the epoch omits."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_loss = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss


class KeepsLosses(CountsLosses):
    """The same, of which checkpoints keep the state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_loss.persistent(True)


class Unused(Sound):
    """A layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)  # UNUSED


class CountsEpochs(Sound):
    """What its steps depend on is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs_seen = 0

    def on_train_epoch_start(self):
        self.epochs_seen += 1

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.epochs_seen)


class ForgetsMoments(Sound):
    """Its checkpoints hold no state of the optimizer."""

    def on_save_checkpoint(self, checkpoint):
        for optimizer in checkpoint["optimizer_states"]:
            optimizer["state"] = {}


class KnowsItsRank(Sound):
    """Rank 1 trains with another loss."""

    def training_step(self, batch, batch_idx):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.loss(batch) * (1 + rank)


class CountsTests(Sound):
    """The test depends on what the training has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch) + self.seen, sync_dist=True)


class NoisyRows(Rows):
    """Noise from a generator that draws its seed from the system."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = np.random.default_rng().normal()  # UNSEEDED
        return x + 0.1 * float(noise), y


class NoisyPoints(Points):
    def training_rows(self):
        return NoisyRows()


class CopiedRows(Rows):
    """Noise from a generator that every worker has a copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)  # COPIED

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * float(self.generator.normal()), y


class CopiedPoints(Points):
    def training_rows(self):
        return CopiedRows()


class Stream(IterableDataset):
    """Every worker reads all of it."""

    def __iter__(self):
        return iter([Rows()[index] for index in range(ROWS)])


class StreamPoints(Points):
    def train_dataloader(self):
        return DataLoader(Stream(), 16)


class Endless:
    """A loader that goes on where the last epoch has ended, and does not say where."""

    def __init__(self) -> None:
        self.chance = [random.Random(epoch).sample(range(ROWS), ROWS) for epoch in range(9)]
        self.epoch = -1

    def __len__(self) -> int:
        return ROWS // 16

    def __iter__(self):
        self.epoch += 1
        order = self.chance[self.epoch]
        rows = Rows()
        for start in range(0, ROWS, 16):
            index = order[start : start + 16]
            yield rows.x[index], (rows.x[index].sum(1) > 0).long()


class EndlessPoints(Points):
    def train_dataloader(self):
        return Endless()
