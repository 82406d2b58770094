"""Semantic segmentation by a module that brings its own loaders."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from projects.images import labelled_images


class Scenes(Dataset):
    """Images, and masks of what is bright in them."""

    def __init__(self, split: str):
        rows, seed = {"train": (64, 0), "valid": (32, 1), "test": (32, 2)}[split]
        self.images = labelled_images(rows, seed)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index][0]
        return image, (image[0] > 1).long()


class SegModel(pl.LightningModule):
    def __init__(self, batch_size: int = 8, lr: float = 1e-2, epochs: int = 20):
        super().__init__()
        self.batch_size = batch_size
        self.lr = lr
        self.epochs = epochs
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_nb):
        img, mask = batch
        loss = F.cross_entropy(self(img), mask)
        self.log_dict({"train_loss": loss})
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        img, mask = batch
        self.log_dict({"valid_loss": F.cross_entropy(self(img), mask)}, sync_dist=True)

    def test_step(self, batch, batch_idx):
        img, mask = batch
        self.log_dict({"test_loss": F.cross_entropy(self(img), mask)}, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.net.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.epochs)
        return [optimizer], [schedule]

    def train_dataloader(self):
        return DataLoader(Scenes("train"), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Scenes("valid"), batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(Scenes("test"), batch_size=self.batch_size)

    def predict_dataloader(self):
        images = [image for image, _ in Scenes("test")]
        return DataLoader(images, batch_size=self.batch_size)
