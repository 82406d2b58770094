"""A LightningModule and a LightningDataModule as any other project has them: nothing here knows
Lockstep.
"""

import random

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset


class Regression(pl.LightningModule):
    """Two optimizers' worth of habits: a loss in a dict, metrics by self.log, a scheduler."""

    def __init__(self, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": nn.functional.mse_loss(self(x), y)}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LazyLinear(1)


class Numbers(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16, rows: int = 160) -> None:
        super().__init__()
        self.batch_size, self.rows = batch_size, rows

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, 4, generator=generator)
        self.parts = TensorDataset(x, x.sum(1)), TensorDataset(x[:32], x[:32].sum(1))

    def train_dataloader(self):
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], self.batch_size)

    test_dataloader = val_dataloader


class RandomSplit(Numbers):
    """Its test set is drawn in each setup, from the generator that the seed sets."""

    def setup(self, stage):
        super().setup(stage)
        order = torch.randperm(self.rows)
        print("split", order[:4].tolist())
        rows = self.parts[0]
        self.parts = Subset(rows, order[32:].tolist()), Subset(rows, order[:32].tolist())


class NoisyRows(Dataset):
    """Rows with noise from each global generator, as random transforms have it."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        noise = torch.rand(()) + np.random.rand() + random.random()
        return (x + 0.01 * noise).float(), y


class NoisyNumbers(Numbers):
    """Loaders with noise, in training and in validation; the training loader shuffles."""

    def __init__(self, num_workers: int = 0, rows: int = 160) -> None:
        super().__init__(rows=rows)
        self.num_workers = num_workers

    def train_dataloader(self):
        rows = NoisyRows(self.parts[0])
        return DataLoader(rows, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(NoisyRows(self.parts[1]), self.batch_size)


class NoisyRegression(Regression):
    """A step that draws from each global generator."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = np.random.rand() + random.random()
        return nn.functional.mse_loss(self(nn.functional.dropout(x, 0.1)) + 0.01 * noise, y)


class Configured(NoisyRegression):
    """A module whose optimizer is that of the config, as a public template has it."""

    def __init__(self, optimizer, width: int = 16) -> None:
        super().__init__(width)
        self.make_optimizer = optimizer

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Rows(IterableDataset):
    """Ten batches of four rows on rank 1, twelve on rank 0."""

    def __iter__(self):
        is_rank_zero = not dist.is_initialized() or dist.get_rank() == 0
        for _ in range(4 * (12 if is_rank_zero else 10)):
            x = torch.randn(4)
            yield x, x.sum()


class Streams(Numbers):
    def train_dataloader(self):
        return DataLoader(Rows(), 4)


class Unused(Regression):
    """A part of it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)


class Late(Regression):
    """It makes a layer when Lightning asks for it."""

    def configure_model(self):
        self.more = nn.Linear(4, 4)


class TrainsAlone(pl.LightningModule):
    """A module that has nothing but a training step, and logs a metric of its own."""

    def __init__(self, size: tuple[int, int] = (4, 1), lr: float = 0.05) -> None:
        super().__init__()
        assert isinstance(size, tuple)
        self.lr = lr
        self.layer = nn.Linear(*size)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x).squeeze(1), y)
        self.log("fit_error", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Small(pl.LightningModule):
    """A linear layer of two inputs, which learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


class TwoOptimizers(Small):
    """A GAN's shape: two optimizer steps a batch, the loss in a dict beside something of its
    own.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def training_step(self, batch, batch_idx):
        for optimizer, layer in zip(self.optimizers(), self.layers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(batch).square().mean())
            optimizer.step()
        self.log("own", float(batch_idx))
        return {"loss": torch.tensor(float(batch_idx)), "more": 1}

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.layers]


def fit(
    module, *callbacks, batches=4, batch_size=1, data=None, val_loader=None, ckpt_path=None, **options
) -> pl.Trainer:  # fmt: skip
    """Fit a `Small` with nothing but these callbacks."""
    data = torch.ones(batches * batch_size, 2) if data is None else data
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "callbacks": list(callbacks), **off, **options}
    )
    trainer.fit(module, DataLoader(data, batch_size), val_loader, ckpt_path=ckpt_path)
    return trainer


class Worded(Regression):
    """Its parameters have the names of parts."""

    def __init__(self, optimizer: str = "sgd", scheduler: bool = False):
        super().__init__()
        self.said = (optimizer, scheduler)


class Needy(Regression):
    def __init__(self, optimizer, scheduler):
        super().__init__()
        self.said = (optimizer, scheduler)
