"""One training run of the parity table, in a rank or in this process: 20 steps on the same images
in the same order.
"""

import logging
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from data.synthetic import SyntheticDataModule
from local_ranks import meet
from lockstep.data.augmentation import CropFlip
from lockstep.ranks.find import Cluster
from lockstep.runs.join import StartedRanks
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.sync_batchnorm import synchronise
from lockstep.training.parameter_groups import GroupRules, freeze, parameter_groups
from models.alexnet import AlexNet, AlexNetBN
from models.small_cnn import SmallCNN
from models.timm import TimmModel
from strategies.allreduce import AllReduce
from strategies.model_parallel import ModelParallel
from tasks.classifier import ImageClassifier

STEPS, EPOCHS, GLOBAL_BATCH, CLASSES, SEED = 20, 2, 16, 4, 5
MODELS = ("vit", "alexnet", "alexnet_bn", "small_cnn")
FAULTS = (
    "gradients not divided",
    "one parameter not reduced",
    "one rank's batch repeated",
    "a stale gradient",
)
IMAGE_SIZE = {"vit": 16, "alexnet": 64, "alexnet_bn": 128, "small_cnn": 16}
FROZEN = {
    "vit": ["patch_embed", "blocks.0"], "alexnet": ["features.0"], "alexnet_bn": ["features.[0-3]"],
    "small_cnn": ["features.0"],
}  # fmt: skip
FINE_TUNING = GroupRules(layer_decay=0.8, head_lr_factor=1.5, decay_norms=False)
LEARNING_RATE = {"vit": 0.005, "alexnet": 0.0003, "alexnet_bn": 0.0003, "small_cnn": 0.05}


@dataclass(frozen=True)
class Case:
    """A row of the table for one model."""

    model: str
    strategy: str  # bare, one_process, ddp, fsdp, allreduce, model_parallel
    accumulate: int = 1
    fine_tuning: bool = False  # with FROZEN layers, layer decay, and weight decay on matrices alone
    mixup: bool = False  # and cutmix, of half of the pairs
    fault: str = ""
    cache_dir: str = ""


def build_net(case: Case) -> nn.Module:
    """Return a model with dropout off, whose random numbers differ between ranks, and AlexNet's
    head narrowed.
    """
    torch.manual_seed(SEED)
    net = new_net(
        case.model, {"num_classes": CLASSES, "image_size": IMAGE_SIZE[case.model], "channels": 3}
    )
    if case.fine_tuning:
        freeze(net, FROZEN[case.model])
    return net


def new_net(model: str, shape: dict[str, Any]) -> nn.Module:
    if model == "vit":
        small = {"embed_dim": 192, "depth": 2, "num_heads": 3, "patch_size": 4}
        return TimmModel(**shape, name="vit_tiny_patch16_224", pretrained=False, **small)
    if model == "small_cnn":
        return SmallCNN(**shape, dropout=0.0, head_dropout=0.0)
    net = (AlexNetBN if model == "alexnet_bn" else AlexNet)(**shape, dropout=0.0)
    wide, middle, last = 256 * 6 * 6, 96, CLASSES
    for place, (inputs, outputs) in {
        1: (wide, middle),
        4: (middle, middle),
        6: (middle, last),
    }.items():
        net.classifier[place] = nn.Linear(inputs, outputs)
    for layer in (
        net.modules()
    ):  # PyTorch's own initialisation lets AlexNet's loss stand still for hundreds of steps
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return net


def build_data(case: Case, rank: int = 0, world_size: int = 1) -> SyntheticDataModule:
    size = IMAGE_SIZE[case.model]
    data = SyntheticDataModule(
        image_size=size, num_classes=CLASSES, num_images=GLOBAL_BATCH * STEPS // EPOCHS + 8, num_val=8, noise=0.5,
        num_test_images=8, global_batch_size=GLOBAL_BATCH, crop_padding=2, flip=True, seed=SEED,
        cache_dir=case.cache_dir,
    )  # fmt: skip
    if case.mixup:
        data.set_augmentation(CropFlip(mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.5))
    data.prepare()
    if case.fault == "one rank's batch repeated":
        rank = 0
    data.attach_to_ranks(
        rank=rank, world_size=world_size, accumulate_grad_batches=case.accumulate, device="cpu"
    )
    return data


def sgd(case: Case) -> partial:
    decay = 0.01 if case.fine_tuning else 0.0
    return partial(torch.optim.SGD, lr=LEARNING_RATE[case.model], momentum=0.9, weight_decay=decay)


def parameters_of(net: nn.Module, case: Case) -> Any:
    if not case.fine_tuning:
        return net.parameters()
    trained = [
        (name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad
    ]
    return parameter_groups(net, trained, FINE_TUNING, LEARNING_RATE[case.model])


def bare_loop(case: Case) -> dict[str, Any]:
    """What the strategies must reproduce: plain PyTorch over the same batches, without
    Lightning.
    """
    net, data = build_net(case).double(), build_data(case)
    optimizer, losses = sgd(case)(parameters_of(net, case)), []
    loader = data.train_dataloader()
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for index, batch in enumerate(loader):
            images, labels = data.on_after_batch_transfer(batch, 0)
            loss = F.cross_entropy(net(images.double()), labels)
            (loss / case.accumulate).backward()
            losses.append(float(loss.detach()))
            if (index + 1) % case.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": {name: value.numpy().copy() for name, value in net.state_dict().items()},
    }


class Losses(pl.Callback):
    """The loss of each micro-batch on this rank."""

    values: list[float]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self.values.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)


class FaultyAllReduce(AllReduce):
    """Gradients averaged wrongly in one of the ways that the table must notice."""

    fault = ""
    previous: torch.Tensor | None = None

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        first = next(self.model.parameters())
        before = first.grad.clone()
        super().post_backward(closure_loss)
        if self.fault == "gradients not divided":
            for parameter in self.model.parameters():
                parameter.grad *= self.world_size
        elif self.fault == "one parameter not reduced":
            first.grad.copy_(before)
        elif self.fault == "a stale gradient":
            current = first.grad.clone()
            first.grad.copy_(current if self.previous is None else self.previous)
            self.previous = current


def build_strategy(case: Case) -> Any:
    if case.strategy == "one_process":
        return "auto"
    if case.strategy == "model_parallel":
        return ModelParallel(stage_devices=["cpu", "cpu"])
    if not case.fault:
        return {"ddp": DDP, "fsdp": FSDP, "allreduce": AllReduce}[case.strategy]()
    strategy = FaultyAllReduce()
    strategy.fault = case.fault
    return strategy


def lightning_run(cluster: Cluster, case: Case) -> dict[str, Any]:
    """20 steps through the Trainer; this rank's losses, and on rank 0 the whole final weights."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    data = build_data(case, cluster.rank, cluster.world_size)
    rules = FINE_TUNING if case.fine_tuning else None
    net = ImageClassifier(build_net(case), sgd(case), num_classes=CLASSES, rules=rules)
    meet(cluster, "cpu")
    if case.model == "alexnet_bn" and cluster.world_size > 1:
        synchronise(net.net, "cpu")
    strategy, losses = build_strategy(case), Losses()
    losses.values = []
    trainer = pl.Trainer(
        accelerator="cpu", devices=cluster.devices, strategy=strategy, plugins=[StartedRanks(cluster)],
        precision="64-true", callbacks=[losses], max_epochs=EPOCHS, accumulate_grad_batches=case.accumulate,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(net, datamodule=data)
    assert trainer.global_step == STEPS, trainer.global_step
    state = trainer.strategy.lightning_module_state_dict()
    weights = {name.removeprefix("net."): value.numpy().copy() for name, value in state.items()}
    return {"losses": losses.values, "weights": weights}
