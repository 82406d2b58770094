"""A LightningModule and a data module in the style of a public template: net, optimizer and
scheduler by config.
"""

import lightning.pytorch as pl
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class BackboneAndHead(nn.Module):
    """Features of timm with a head of its own, as many projects have it."""

    def __init__(self, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        self.backbone = timm.create_model("resnet10t", num_classes=0, in_chans=channels)
        self.head = nn.Linear(self.backbone.num_features, num_classes)

    def forward(self, images):
        return self.head(self.backbone(images))


class DenseNet(nn.Module):
    def __init__(self, input_size: int, hidden: int, output_size: int) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(hidden)
        self.model = nn.Sequential(
            nn.Linear(input_size, hidden), norm, nn.ReLU(), nn.Linear(hidden, output_size)
        )

    def forward(self, x):
        return self.model(x.flatten(1))


class DigitsModule(pl.LightningModule):
    def __init__(self, net, optimizer, scheduler, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net, self.criterion = net, nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (
            MulticlassAccuracy(10, average="micro") for _ in range(3)
        )
        self.val_loss, self.val_acc_best = MeanMetric(), MaxMetric()

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch, batch_idx):
        loss, predicted, y = self.model_step(batch)
        self.train_acc(predicted, y)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, predicted, y = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predicted, y)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        _, predicted, y = self.model_step(batch)
        self.test_acc(predicted, y)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        plan = {
            "scheduler": self.hparams.scheduler(optimizer=optimizer),
            "monitor": "val/loss",
            "interval": "epoch",
        }
        return {"optimizer": optimizer, "lr_scheduler": plan}


class DigitsData(pl.LightningDataModule):
    num_classes = 10

    def __init__(
        self, batch_size: int = 64, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage=None):
        x, y = load_digits(return_X_y=True)
        whole = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
        self.train, self.val, self.test = random_split(
            whole, [1397, 200, 200], torch.Generator().manual_seed(42)
        )

    def train_dataloader(self):
        return DataLoader(self.train, shuffle=True, **self.hparams)

    def val_dataloader(self):
        return DataLoader(self.val, **self.hparams)

    def test_dataloader(self):
        return DataLoader(self.test, **self.hparams)
