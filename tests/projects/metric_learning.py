"""Metric learning: a triplet loss, and torchmetrics as attributes of the module."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from projects.images import CLASSES, labelled_images


class MetricLearner(pl.LightningModule):
    def __init__(self, embedding_dim: int = 4, margin: float = 0.5, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(64, embedding_dim))
        self.prototypes = nn.Parameter(torch.randn(CLASSES, embedding_dim))
        self.criterion = nn.TripletMarginLoss(margin)
        metrics = MetricCollection(
            {"accuracy": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
        )
        self.valid_metrics = metrics.clone(prefix="valid_")
        self.test_metrics = metrics.clone(prefix="test_")

    def forward(self, x):
        return self.embed(x)

    def _loss(self, x, y):
        return self.criterion(self(x), self.prototypes[y], self.prototypes[(y + 1) % CLASSES])

    def training_step(self, batch, batch_idx):
        return self._loss(*batch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.valid_metrics(-torch.cdist(self(x), self.prototypes), y)
        self.log("valid_loss", self._loss(x, y), sync_dist=True)
        self.log_dict(self.valid_metrics)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_metrics(-torch.cdist(self(x), self.prototypes), y)
        self.log("test_loss", self._loss(x, y), sync_dist=True)
        self.log_dict(self.test_metrics)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Images(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(labelled_images(64, seed=0), 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(labelled_images(32, seed=1), 8)

    def test_dataloader(self):
        return DataLoader(labelled_images(32, seed=2), 8)
