"""A GAN with manual optimization, which shows images in every logger."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from projects.images import labelled_images


class GAN(L.LightningModule):
    def __init__(self, latent_dim: int = 4, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.validation_z = torch.randn(4, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def _adversarial_loss(self, images, is_real: bool):
        scores = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))

    def training_step(self, batch):
        images = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(images), self.hparams.latent_dim).type_as(images)

        self.toggle_optimizer(optimizer_g)
        g_loss = self._adversarial_loss(self(z), is_real=True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self._adversarial_loss(images, is_real=True)
        fake_loss = self._adversarial_loss(self(z).detach(), is_real=False)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self):
        z = self.validation_z.type_as(self.generator[0].weight)
        images = self(z).view(-1, 1, 8, 8)
        for logger in self.loggers:
            logger.experiment.add_images("generated_images", images, self.current_epoch)
            logger.experiment.add_scalar("mean_pixel", images.mean(), self.current_epoch)
            logger.experiment.log_image("first", images[0])

    def configure_optimizers(self):
        lr = self.hparams.lr
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(0.5, 0.999))
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(0.5, 0.999))
        return [optimizer_g, optimizer_d], []


class Images(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(labelled_images(64, seed=0), 8, shuffle=True)
