"""A backbone that is frozen for an epoch and then fine-tuned, with a callback of the module."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader

from projects.images import CLASSES, labelled_images


class Unfreeze(BaseFinetuning):
    def __init__(self, epoch: int = 1):
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class Transfer(pl.LightningModule):
    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(4 * 36, CLASSES)

    def configure_callbacks(self):
        return [Unfreeze()]

    def forward(self, x):
        return self.head(self.backbone(x))

    def _step(self, batch, stage):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_accuracy", accuracy, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._step(batch, "validation")

    def test_step(self, batch, batch_idx):
        self._step(batch, "test")

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.hparams.lr, momentum=0.9)


class Images(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(labelled_images(64, seed=0), 8, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(labelled_images(32, seed=1), 8)

    def test_dataloader(self):
        return DataLoader(labelled_images(32, seed=2), 8)
