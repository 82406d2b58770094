"""Build the LightningModule of a run: net, optimizer, schedule, loss and metrics from config and data."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lockstep.config.instantiate import build, options_of, resolve_target
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.training.checks import DataFacts
from lockstep.training.freeze import freeze
from lockstep.training.metrics import build_metrics
from lockstep.training.parameter_groups import RULES, GroupRules
from lockstep.training.plain import build_plain_task, has_plain_task

CLASSIFIER = "classifier.ImageClassifier"  # of checkpoints that do not name theirs
OPTIONS_OF_LOSSES = {"label_smoothing": 0.0, "class_weights": None, "gamma": 2.0, "target_threshold": None}


def build_module(
    config: Config,
    facts: DataFacts,
    *,
    trainable: bool = True,
    has_checkpoint: bool = False,
    learning_rates: Config | None = None,
) -> pl.LightningModule:
    """Return the classifier for these data, with the same weights on every rank, whatever was drawn before.

    Args:
        facts: num_classes, image_size and channels.
        trainable: build an optimizer and a schedule.
        has_checkpoint: all weights come from one, so that no pretrained ones are fetched.
        learning_rates: in place of the optimizer's own, by option.
    """
    torch.manual_seed(config["seed"])
    if has_plain_task(config):
        return build_plain_task(config)
    if not facts:
        raise UserError("The classifier needs Lockstep's data: add a LightningModule with task._target_=package.Class.")
    shape = {name: facts[name] for name in ("num_classes", "image_size", "channels")}
    own = dict(config["model"])
    frozen = own.pop("freeze", None)
    if not trainable or has_checkpoint:  # the checkpoint brings the weights: nothing is fetched
        own.update({key: value for key, value in (("pretrained", False), ("weights", None)) if key in own})
    net = build(own, shape)
    if frozen and trainable:
        freeze(net, frozen)
    if pays_channels_last(net, config["trainer"].get("channels_last", False)):
        net = net.to(memory_format=torch.channels_last)
    if str(config["trainer"]["precision"]) in ("64-true", "64"):
        net = net.double()  # Lightning restores weights before it converts the module, and would round them
    of_all = ("scale_lr_with_batch", "base_batch_size", *RULES)  # options of train.yaml for every optimizer
    stated = {key: value for key, value in config["optimizer"].items() if key not in of_all}
    optimizer = build({**stated, **(learning_rates or {})}) if trainable else None
    rules = GroupRules.of(config["optimizer"])
    rules.check(getattr(optimizer, "func", None))
    schedule = config.get("scheduler") or {}
    parts = {
        "net": net, "optimizer": optimizer, "rules": rules, "loss": build_loss(config, facts),
        "metrics": build_metrics(config, facts["num_classes"]), "num_classes": facts["num_classes"],
        "scheduler": build(schedule) if trainable and "_target_" in schedule else None,
    }  # fmt: skip
    task = config.get("task") or {}
    return build(task if task.get("_target_") else {"_target_": CLASSIFIER, **config["classifier"]}, parts)


def pays_channels_last(net: nn.Module, stated: bool | str) -> bool:
    """Return trainer.channels_last; "auto" is for nets with depthwise convolutions.

    EfficientNet-Lite0 at 96 px is 1.4 times as fast with it on a CPU; ResNet-18, AlexNet and ViT lose 5 %.
    """
    if stated not in (True, False, "auto"):
        raise UserError(f"trainer.channels_last={stated}: give true, false or auto.")
    if stated != "auto":
        return bool(stated)
    return any(isinstance(layer, nn.Conv2d) and 1 < layer.groups == layer.in_channels for layer in net.modules())


def build_loss(config: Config, facts: DataFacts) -> Any:
    """Return loss=, whose constructor may ask for num_classes and class_counts (the training images of each class).

    For a class given by `loss._target_=`, unchanged options of the default loss that it lacks are left out.
    """
    node = dict(config.get("loss") or {})
    if not node:
        return None
    taken, any_name = options_of(resolve_target(node["_target_"], "loss._target_"))
    unset = {key for key, value in OPTIONS_OF_LOSSES.items() if node.get(key) == value and key not in taken}
    node = {key: value for key, value in node.items() if key not in unset or (any_name and value is not None)}
    classes = facts["num_classes"]
    return build(node, {"num_classes": classes, "class_counts": facts.get("class_counts") or [1] * classes})
