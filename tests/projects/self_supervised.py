"""Self-supervision with two views of each image and a slow copy of the net.

Nothing is validated.
"""

import copy

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from projects.images import labelled_images


class TwoViews(Dataset):
    def __init__(self, rows: int = 64):
        self.images = labelled_images(rows, seed=0)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        views = [image + 0.1 * torch.randn_like(image) for _ in range(2)]
        return views, label


class BYOL(pl.LightningModule):
    def __init__(self, lr: float = 0.05, tau: float = 0.9):
        super().__init__()
        self.save_hyperparameters()
        self.online = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        (first, second), _ = batch
        loss = 0
        for view, other in ((first, second), (second, first)):
            predicted = self.predictor(self.online(view))
            loss = loss - F.cosine_similarity(predicted, self.target(other).detach()).mean()
        self.log("ssl_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data.lerp_(fast.data, 1 - self.hparams.tau)

    def configure_optimizers(self):
        trained = [*self.online.parameters(), *self.predictor.parameters()]
        return torch.optim.SGD(trained, lr=self.hparams.lr)


class Views(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TwoViews(), batch_size=8, shuffle=True)
