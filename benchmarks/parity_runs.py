"""The trainings of the parity table, in ranks or in this process, over the same images."""

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from data.synthetic import SyntheticDataModule
from lockstep.data.augmentation import CropFlip
from lockstep.ranks.find import Cluster
from lockstep.strategies.sync_batchnorm import synchronise
from lockstep.training.parameter_groups import GroupRules, freeze, parameter_groups
from models import alexnet
from models.small_cnn import SmallCNN
from models.timm import TimmModel
from strategies.allreduce import AllReduce
from strategy_runs import strategy_of, trainer_of
from tasks.classifier import ImageClassifier

STEPS = 12
EPOCHS = 2
GLOBAL_BATCH = 16
CLASSES = 4
SEED = 5
MODELS = ("vit", "alexnet", "alexnet_bn", "small_cnn")
FAULTS = (
    "gradients not divided",
    "one parameter not reduced",
    "one rank's batch repeated",
    "a stale gradient",
)
IMAGE_SIZE = {"vit": 16, "alexnet": 64, "alexnet_bn": 128, "small_cnn": 16}
LEARNING_RATE = {"vit": 0.005, "alexnet": 0.003, "alexnet_bn": 0.003, "small_cnn": 0.05}
FROZEN = {
    "vit": ["patch_embed", "blocks.0"],
    "alexnet": ["features.0"],
    "alexnet_bn": ["features.[0-3]"],
    "small_cnn": ["features.0"],
}
FINE_TUNING = GroupRules(layer_decay=0.8, head_lr_factor=1.5, decay_norms=False)
VIT = {"embed_dim": 192, "depth": 2, "num_heads": 3, "patch_size": 4}
# AlexNet computes a tenth with layers of a quarter of the width.
ALEXNET_NARROWER = 4
ALEXNET_HEAD_WIDTH = 96
# Options of a strategy in the ranks of a row.
OPTIONS = {"model_parallel": {"stage_devices": ["cpu", "cpu"]}}


@dataclass(frozen=True)
class Case:
    """A row of the table for one model.

    Args:
        strategy: one_process, ddp, fsdp, allreduce, model_parallel or ddp_model_parallel.
        fine_tuning: with FROZEN layers, layer decay, and weight decay on matrices alone.
        mixup: mix half of the pairs of images, by mixup or cutmix.
        fault: one of FAULTS, which is seeded into allreduce.
    """

    model: str
    strategy: str = "one_process"
    accumulate: int = 1
    fine_tuning: bool = False
    mixup: bool = False
    fault: str = ""
    cache_dir: str = ""


def build_net(case: Case) -> nn.Module:
    """Return a model without dropout, whose random numbers differ between ranks."""
    torch.manual_seed(SEED)
    shape = {"num_classes": CLASSES, "image_size": IMAGE_SIZE[case.model], "channels": 3}
    net: nn.Module
    if case.model == "vit":
        net = TimmModel(**shape, name="vit_tiny_patch16_224", pretrained=False, **VIT)
    elif case.model == "small_cnn":
        net = SmallCNN(**shape, dropout=0.0, head_dropout=0.0)
    else:
        net = narrow_alexnet(case.model, shape)
    if case.fine_tuning:
        freeze(net, FROZEN[case.model])
    return net


def narrow_alexnet(model: str, shape: dict[str, Any]) -> nn.Module:
    """Return AlexNet with narrow layers, whose loss changes within a few steps."""
    convolutions = tuple(
        (width // ALEXNET_NARROWER, *rest) for width, *rest in alexnet.CONVOLUTIONS
    )
    net_class = alexnet.AlexNetBN if model == "alexnet_bn" else alexnet.AlexNet
    with mock.patch.multiple(alexnet, CONVOLUTIONS=convolutions, HEAD_WIDTH=ALEXNET_HEAD_WIDTH):
        net = net_class(**shape, dropout=0.0)
    # PyTorch's own initialisation lets AlexNet's loss stand still for hundreds of steps.
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return net


def build_data(case: Case, rank: int = 0, world_size: int = 1) -> SyntheticDataModule:
    data = SyntheticDataModule(
        image_size=IMAGE_SIZE[case.model],
        num_classes=CLASSES,
        num_images=GLOBAL_BATCH * STEPS // EPOCHS + 8,
        num_val=8,
        noise=0.5,
        num_test_images=8,
        global_batch_size=GLOBAL_BATCH,
        crop_padding=2,
        flip=True,
        seed=SEED,
        cache_dir=case.cache_dir,
    )
    if case.mixup:
        data.set_augmentation(CropFlip(mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.5))
    data.prepare()
    if case.fault == "one rank's batch repeated":
        rank = 0
    data.attach_to_ranks(
        rank=rank, world_size=world_size, accumulate_grad_batches=case.accumulate, device="cpu"
    )
    return data


def make_optimizer(case: Case) -> partial:
    decay = 0.01 if case.fine_tuning else 0.0
    return partial(torch.optim.SGD, lr=LEARNING_RATE[case.model], momentum=0.9, weight_decay=decay)


def select_parameters(net: nn.Module, case: Case) -> Any:
    if not case.fine_tuning:
        return net.parameters()
    trained = [
        (name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad
    ]
    return parameter_groups(net, trained, FINE_TUNING, LEARNING_RATE[case.model])


def run_bare_loop(case: Case) -> dict[str, Any]:
    """Train in plain PyTorch over the same batches, as the strategies must reproduce it.

    Returns:
        The loss of each micro-batch, and the final weights.
    """
    net = build_net(case).double()
    data = build_data(case)
    optimizer = make_optimizer(case)(select_parameters(net, case))
    losses = []
    loader = data.train_dataloader()
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for index, batch in enumerate(loader, start=1):
            images, labels = data.on_after_batch_transfer(batch, 0)
            loss = F.cross_entropy(net(images.double()), labels)
            (loss / case.accumulate).backward()
            losses.append(float(loss.detach()))
            if index % case.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    weights = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    return {"losses": losses, "weights": weights}


class Losses(pl.Callback):
    """Collect the loss of each micro-batch on this rank."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self.values.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)


class FaultyAllReduce(AllReduce):
    """Average gradients wrongly, in one of the ways that the table must notice."""

    previous: torch.Tensor | None = None

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

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
    if case.fault:
        return FaultyAllReduce(case.fault)
    name = "one" if case.strategy == "one_process" else case.strategy
    return strategy_of(name, **OPTIONS.get(case.strategy, {}))


def train(cluster: Cluster, case: Case) -> dict[str, Any]:
    """Train in the Trainer.

    Returns:
        This rank's loss of each micro-batch; on rank 0 the final weights, whole.
    """
    data = build_data(case, cluster.rank, cluster.world_size)
    rules = FINE_TUNING if case.fine_tuning else None
    module = ImageClassifier(
        build_net(case), make_optimizer(case), num_classes=CLASSES, rules=rules
    )
    if case.model == "alexnet_bn" and cluster.world_size > 1:
        synchronise(module.net, "cpu")
    losses = Losses()
    trainer = trainer_of(
        cluster,
        build_strategy(case),
        callbacks=[losses],
        max_epochs=EPOCHS,
        accumulate_grad_batches=case.accumulate,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == STEPS, trainer.global_step
    # FSDP gathers the weights on all ranks together.
    state = trainer.strategy.lightning_module_state_dict()
    weights = {}
    if cluster.is_rank_zero:
        for name, value in state.items():
            weights[name.removeprefix("net.")] = value.numpy().copy()
    return {"losses": losses.values, "weights": weights}


def train_all(cluster: Cluster, cases: list[Case]) -> list[dict[str, Any]]:
    """Train each case after the other in the same ranks, because processes start slowly."""
    return [train(cluster, case) for case in cases]
