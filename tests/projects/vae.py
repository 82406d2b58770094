"""A variational autoencoder that is written for the package pytorch_lightning."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader

from projects.images import labelled_images


class VAE(pl.LightningModule):
    def __init__(self, latent_dim: int = 4, kl_coeff: float = 0.1, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.fc_mu = nn.Linear(16, latent_dim)
        self.fc_var = nn.Linear(16, latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, 16), nn.ReLU(), nn.Linear(16, 64))

    def step(self, batch):
        x, _ = batch
        hidden = self.encoder(x)
        mu = self.fc_mu(hidden)
        std = torch.exp(self.fc_var(hidden) / 2)
        posterior = torch.distributions.Normal(mu, std)
        prior = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(std))
        reconstruction = self.decoder(posterior.rsample())
        recon_loss = F.mse_loss(reconstruction, x.flatten(1))
        kl = self.hparams.kl_coeff * torch.distributions.kl_divergence(posterior, prior).mean()
        return recon_loss + kl, {"recon_loss": recon_loss, "kl": kl}

    def training_step(self, batch, batch_idx):
        loss, logs = self.step(batch)
        self.log_dict({f"train_{name}": value for name, value in logs.items()})
        return loss

    def validation_step(self, batch, batch_idx):
        loss, logs = self.step(batch)
        self.log_dict({f"val_{name}": value for name, value in logs.items()}, sync_dist=True)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    @rank_zero_only
    def on_train_epoch_end(self):
        pass

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Images(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(labelled_images(64, seed=0), 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(labelled_images(32, seed=1), 8)
