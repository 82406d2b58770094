"""The usual Hydra + Lightning template (github.com/ashleve/lightning-hydra-template, MIT), as its README shows it.

    PROJECT_ROOT=FOLDER python benchmarks/peers/hydra_template/train.py trainer.max_epochs=2

Its imports at the top, its callbacks, its printed config tree, torchmetrics and rich bar; the net, optimizer and
schedule are those of PyTorch's MNIST example. Says the seconds without imports at the end, for the benchmark.
"""

import time
from typing import Any

import hydra
import lightning as L
import rich
import rich.syntax
import rich.tree
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

IMPORTED_AT = time.perf_counter()


def print_config_tree(cfg: DictConfig, resolve: bool = True) -> None:
    tree = rich.tree.Tree("CONFIG", style="dim", guide_style="dim")
    for field in ("data", "model", "callbacks", "logger", "trainer", "paths", "extras"):
        branch = tree.add(field, style="dim", guide_style="dim")
        branch.add(rich.syntax.Syntax(OmegaConf.to_yaml(cfg[field], resolve=resolve), "yaml"))
    rich.print(tree)


def instantiate_all(node: DictConfig) -> list[Any]:
    return [hydra.utils.instantiate(part) for part in node.values() if isinstance(part, DictConfig)]


def train(cfg: DictConfig) -> dict[str, Any]:
    if cfg.get("seed"):
        L.seed_everything(cfg.seed, workers=True)
    datamodule: LightningDataModule = hydra.utils.instantiate(cfg.data)
    model: LightningModule = hydra.utils.instantiate(cfg.model)
    callbacks: list[Callback] = instantiate_all(cfg.callbacks)
    logger: list[Logger] = instantiate_all(cfg.logger)
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=logger)
    for each in logger:
        each.log_hyperparams({"model/params/total": sum(p.numel() for p in model.parameters())})
    if cfg.get("train"):
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
    if cfg.get("test"):
        ckpt_path = trainer.checkpoint_callback.best_model_path
        trainer.test(model=model, datamodule=datamodule, ckpt_path=ckpt_path or None, weights_only=False)
    return dict(trainer.callback_metrics)


@hydra.main(version_base="1.3", config_path="configs", config_name="train.yaml")
def main(cfg: DictConfig) -> None:
    if cfg.extras.get("print_config"):
        print_config_tree(cfg)
    metrics = train(cfg)
    print(f"accuracy {float(metrics['test/acc']):.4f} threads {torch.get_num_threads()}")
    print(f"seconds_without_imports {time.perf_counter() - IMPORTED_AT:.3f}")


if __name__ == "__main__":
    main()
