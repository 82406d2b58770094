"""Build the LightningModule of a run: pass the constructor of task= the arguments it declares, from config and data."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lockstep.config.instantiate import build, options_of, resolve_target
from lockstep.config.schema import key_of
from lockstep.process.errors import UserError
from lockstep.records.config import Config
from lockstep.training.build_data import DataFacts
from lockstep.training.parameter_groups import RULES, GroupRules, freeze

OPTIONAL_KEYS = ("monitor", "mode", "outputs")  # keys of the config that a constructor need not know
FACTS = ("num_classes", "class_names", "image_size", "channels", "class_counts")  # that a constructor may ask for
OF_EVERY_OPTIMIZER = ("scale_lr_with_batch", "base_batch_size", *RULES)  # options of train.yaml
OPTIONS_OF_LOSSES = {"label_smoothing": 0.0, "class_weights": None, "gamma": 2.0, "target_threshold": None}


KINDS = {  # of targets, as data modules have them, with the options that make them
    "class": "a class for each image (task=classifier)", "dict": "several targets for each image",
    "labels": "several labels for each image (data.label_columns=[a,b] task=multilabel)",
    "number": "a number for each image (data.target=number task=regression)",
    "mask": "a mask for each image (data.target=mask task=segmentation model=unet)",
}  # fmt: skip
TARGETS = {  # that an example task takes; a class of the user's own may take any
    "tasks.classifier.ImageClassifier": "class", "tasks.distillation.Distillation": "class",
    "tasks.multilabel.MultiLabel": "labels", "tasks.segmentation.Segmentation": "mask",
    "tasks.regression.Regression": "number",
}  # fmt: skip


def build_module(
    config: Config,
    facts: DataFacts,
    *,
    trainable: bool = True,
    has_checkpoint: bool = False,
    learning_rates: Config | None = None,
) -> Any:
    """Return the LightningModule of a run; it is seeded here, so that all ranks have the same initial weights.

    Parameters that the constructor declares and the yaml does not set are passed by name: net, optimizer, rules,
    scheduler, loss, metrics and properties of the data (FACTS).

    Args:
        facts: properties of the data, as far as the data module defines them; see FACTS.
        trainable: build an optimizer and a scheduler.
        has_checkpoint: a checkpoint will provide all weights, so that no pretrained weights are downloaded.
        learning_rates: learning-rate options that replace those of optimizer=.
    Raises:
        UserError: the class is not a LightningModule, or needs something that neither the config nor the data has.
    """
    torch.manual_seed(config["seed"])
    node = dict(config["task"])
    wanted, _ = options_of(resolve_target(node["_target_"], "task._target_"))
    kind, taken = facts.get("target"), TARGETS.get(node["_target_"])
    if taken and kind and kind != taken:
        raise UserError(f"The task takes {KINDS[taken]}, and the data has {KINDS[kind]}.")
    outputs = node.get("outputs") or facts.get("num_classes")
    node = {key: value for key, value in node.items() if key in wanted or key not in OPTIONAL_KEYS}
    asked = wanted.keys() - node.keys()
    for word in config.get("overrides") or () if trainable and not has_checkpoint else ():
        group = key_of(word).partition(".")[0]
        if group in ("loss", "metrics", "optimizer", "scheduler") and config.get(group) and group not in wanted:
            raise UserError(f"{node['_target_']} does not take {group}=: remove {word}, or add the parameter {group}.")
    parts: dict[str, Any] = {key: facts[key] for key in FACTS if key in facts}
    if "net" in asked:
        if not outputs:
            raise UserError(
                f"{node['_target_']} takes model=, which needs the number of classes: let the data module have an "
                "attribute num_classes, or give task.outputs=NUMBER."
            )
        shape = {**{key: facts[key] for key in ("image_size", "channels") if key in facts}, "num_classes": outputs}
        parts["net"] = build_net(config, shape, trainable=trainable, has_checkpoint=has_checkpoint)
    own = config["optimizer"]
    if trainable and "optimizer" in asked:
        stated = {key: value for key, value in own.items() if key not in OF_EVERY_OPTIMIZER}
        parts["optimizer"] = build({**stated, **(learning_rates or {}), "_partial_": True})
    if "rules" in asked:
        parts["rules"] = GroupRules(**{key: own[key] for key in RULES if key in own})
    if trainable and "scheduler" in asked:
        stated = config.get("scheduler") or {}
        parts["scheduler"] = build({**stated, "_partial_": True}) if "_target_" in stated else None
    if "loss" in asked and "num_classes" in facts:
        parts["loss"] = build_loss(config, facts)
    if "metrics" in asked:
        nodes = (config.get("metrics") or {}).items()
        parts["metrics"] = {name: build(each, {"num_classes": outputs}) for name, each in nodes if each}
    module = build(node, parts)
    if not isinstance(module, pl.LightningModule):
        raise UserError(f"task._target_={node['_target_']} is not a LightningModule.")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UserError(
                f"{name} is of a lazy layer, without a shape yet: give its size, or run the net once before."
            )
    if str(config["trainer"]["precision"]) in ("64-true", "64"):
        module = module.double()  # Lightning restores weights before it converts the module, and would round them
    return module


def build_net(config: Config, shape: Config, *, trainable: bool, has_checkpoint: bool) -> nn.Module:
    """Build the network of model=, with layers frozen by model.freeze and the format of trainer.channels_last."""
    own, trainer = dict(config["model"]), config["trainer"]
    frozen = own.pop("freeze", None)
    if not trainable or has_checkpoint:  # the checkpoint brings the weights: nothing is fetched
        own.update({key: value for key, value in (("pretrained", False), ("weights", None)) if key in own})
    net: nn.Module = build(own, shape)
    if frozen and trainable:
        freeze(net, frozen)
    in_16_bits = str(trainer["precision"]).startswith(("auto", "bf16", "16"))
    on_tensor_cores = in_16_bits and trainer["accelerator"] != "cpu" and torch.cuda.is_available()
    if uses_channels_last(net, trainer.get("channels_last", False), on_tensor_cores):
        net = net.to(memory_format=torch.channels_last)
    return net


def uses_channels_last(net: nn.Module, stated: bool | str, on_tensor_cores: bool = False) -> bool:
    """Return trainer.channels_last; "auto" is for depthwise convolutions, and for all on a GPU's tensor cores.

    EfficientNet-Lite0 at 96 px is 1.4 times as fast with it on a CPU; ResNet-18, AlexNet and ViT lose 5 %.
    """
    if stated != "auto":
        if not isinstance(stated, bool):
            raise UserError(f"trainer.channels_last={stated}: give true, false or auto.")
        return stated
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    overlap = any(layer.kernel_size != layer.stride for layer in convolutions)  # false for a ViT's patch embedding
    return (on_tensor_cores and overlap) or any(1 < layer.groups == layer.in_channels for layer in convolutions)


def build_loss(config: Config, facts: DataFacts) -> Any:
    """Build loss=; its constructor may declare num_classes and class_counts (number of training images by class).

    If `loss._target_=` names a class without some options of the default loss, those left at their default are dropped.
    """
    node = config.get("loss")
    if not node:
        return None
    taken, any_name = options_of(resolve_target(node["_target_"], "loss._target_"))
    unset = {key for key, value in OPTIONS_OF_LOSSES.items() if node.get(key) == value and key not in taken}
    node = {key: value for key, value in node.items() if key not in unset or (any_name and value is not None)}
    classes = facts["num_classes"]
    return build(node, {"num_classes": classes, "class_counts": facts.get("class_counts") or [1] * classes})
