"""Build the LightningModule of a run.

The constructor of task= gets the arguments that it declares, from the config and the data.
"""

import inspect
from collections.abc import Mapping, Set
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.config.instantiate import build, parameters_of, positional_parameters, resolve_target
from lockstep.config.locate import describe_foreign_import
from lockstep.config.schema import key_of
from lockstep.process.errors import UserError
from lockstep.records.config import Config
from lockstep.records.metric_names import is_lower_better
from lockstep.training.build_data import DataFacts
from lockstep.training.parameter_groups import RULES, GroupRules, freeze
from lockstep.training.task import Task

# Options of task= that a constructor need not take.
OPTIONAL_KEYS = ("monitor", "mode", "outputs")
# Parts that a constructor may take by name.
PARTS = {"net", "optimizer", "scheduler", "rules", "loss", "metrics"}
# Facts about the data that a constructor may ask for.
FACTS = (
    "num_classes",
    "class_names",
    "image_size",
    "channels",
    "class_counts",
    "target_mean",
    "target_std",
    "inputs",
)
# Options of optimizer= that are no arguments of the optimizer's class.
KEYS_BESIDE_OPTIMIZER = ("scale_lr_with_batch", "base_batch_size", *RULES)
# Options of the default loss and of the default schedule, with their defaults.
LOSS_DEFAULTS = {
    "label_smoothing": 0.0,
    "class_weights": None,
    "gamma": 2.0,
    "target_threshold": None,
}
SCHEDULE_DEFAULTS = {"warmup_epochs": 0.0, "final_share": 0.0}
# An override of one of these groups is refused if the task does not take its part.
PART_OF_GROUP = {
    "model": "net",
    "loss": "loss",
    "metrics": "metrics",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
}

# The kinds of targets that data modules have, with the options that make them.
TARGET_DESCRIPTIONS = {
    "class": "a class for each image (task=classifier)",
    "dict": "several targets for each image",
    "labels": "several labels for each image (data.label_columns=[a,b] task=multilabel)",
    "number": "a number for each image (data.target=number task=regression)",
    "mask": "a mask for each image (data.target=mask task=segmentation model=unet)",
}
# The kind that an example task takes. A class of the user's own may take any.
TARGET_KIND_OF_TASK = {
    "tasks.classifier.ImageClassifier": "class",
    "tasks.distillation.Distillation": "class",
    "tasks.multilabel.MultiLabel": "labels",
    "tasks.segmentation.Segmentation": "mask",
    "tasks.regression.Regression": "number",
    "tasks.image_and_numbers.ImageAndNumbers": "class",
}
# The example tasks that take numbers beside the images.
TASKS_WITH_INPUTS = ("tasks.image_and_numbers.ImageAndNumbers",)


def build_module(
    config: Config,
    facts: DataFacts,
    *,
    trainable: bool = True,
    has_checkpoint: bool = False,
    learning_rates: Config | None = None,
) -> Any:
    """Return the LightningModule of a run.

    Parameters that the constructor declares and the yaml does not set are passed by name: net,
    optimizer, rules, scheduler, loss, metrics and properties of the data (FACTS).

    Args:
        facts: properties of the data, as far as the data module defines them; see FACTS.
        trainable: build an optimizer and a scheduler.
        has_checkpoint: a checkpoint will provide all weights, so that no pretrained weights are
            downloaded.
        learning_rates: learning-rate options that replace those of optimizer=.

    Raises:
        UserError: the class is not a LightningModule, or needs something that neither the config
            nor the data has.
    """
    # All ranks have the same initial weights.
    torch.manual_seed(config["seed"])
    task = config["task"]
    target = task["_target_"]
    parameters, _ = parameters_of(resolve_target(target, "task._target_"))
    check_target(target, facts)
    if trainable:
        _refuse_unused_parts(config, parameters)

    options = _task_options(task, parameters)
    open_names = _find_open_parameters(options, parameters)
    parts: dict[str, Any] = {key: facts[key] for key in FACTS if key in facts}
    num_outputs = task.get("outputs") or facts.get("num_classes")
    # The net is built first, so that random numbers of other parts do not change its weights.
    if "net" in open_names:
        shape = net_shape(facts, num_outputs, target)
        # Only a task that makes classes of the net's features has the option `outputs`.
        shape["outputs_are_classes"] = not task.get("outputs")
        if "class_names" in facts and not task.get("outputs"):
            shape["class_names"] = facts["class_names"]
        parts["net"] = build_net(config, shape, trainable=trainable, has_checkpoint=has_checkpoint)
    if trainable:
        _refuse_unused_rules(config, open_names)
        parts |= _build_training_parts(config, open_names, learning_rates or {})
        if "loss" in open_names:
            _refuse_unknown_counts(config, facts)
    else:
        parts |= _placeholders_of_evaluation(parameters, open_names)
    parts |= _build_rules_loss_metrics(config, open_names, facts, num_outputs)
    return _check_and_prepare(build(options, parts), config, trainable=trainable)


def _task_options(task: Config, parameters: Mapping[str, inspect.Parameter]) -> Config:
    """Return the options of task= without those OPTIONAL_KEYS that its class does not take."""
    options = {}
    for key, value in task.items():
        if key in parameters or key not in OPTIONAL_KEYS:
            options[key] = value
    # The task itself is built, even if its yaml says _partial_.
    options.pop("_partial_", None)
    return options


def _find_open_parameters(options: Config, parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """Return the parameters that the yaml leaves open, which get parts and facts about the data."""
    names = parameters.keys() - options.keys() - positional_parameters(options, parameters)
    for name in PARTS & names:
        # A text or a number is an option of the user's that has the name of a part.
        if isinstance(parameters[name].default, str | bool | int | float):
            names.discard(name)
    return names


def _build_training_parts(config: Config, open_names: Set[str], learning_rates: Config) -> Config:
    """Return optimizer and scheduler as far as the task takes them."""
    parts = {}
    if "optimizer" in open_names:
        parts["optimizer"] = _build_optimizer(config["optimizer"], learning_rates)
    if "scheduler" in open_names:
        parts["scheduler"] = _build_scheduler(config)
    return parts


def _placeholders_of_evaluation(
    parameters: Mapping[str, inspect.Parameter], open_names: Set[str]
) -> Config:
    """Return {"optimizer": None} if the constructor needs one, because an evaluation has none."""
    names = open_names & {"optimizer", "scheduler"}
    return {name: None for name in names if parameters[name].default is inspect.Parameter.empty}


def _build_rules_loss_metrics(
    config: Config, open_names: Set[str], facts: DataFacts, num_outputs: Any
) -> Config:
    """Return rules, loss and metrics as far as the task takes them."""
    parts: dict[str, Any] = {}
    if "rules" in open_names:
        options = config["optimizer"]
        parts["rules"] = GroupRules(**{key: options[key] for key in RULES if key in options})
    if "loss" in open_names and "num_classes" in facts:
        parts["loss"] = build_loss(config, facts)
    if "metrics" in open_names:
        # The outputs of the net may be features, of which the task makes classes.
        num_classes = num_outputs
        if "num_classes" in open_names:
            num_classes = facts.get("num_classes", num_outputs)
        parts["metrics"] = _build_metrics(config, num_classes)
    return parts


def _check_and_prepare(module: Any, config: Config, *, trainable: bool) -> Any:
    """Check a module, and set what no constructor takes."""
    check_module(module, config["task"]["_target_"])
    if isinstance(module, Task):
        module.monitor = _monitor_of_schedule(config) or module.monitor
    elif trainable and _monitor_option(config):
        raise UserError(
            f"{type(module).__name__} says in configure_optimizers which metric its schedule goes "
            "by: remove scheduler.monitor=."
        )
    if str(config["trainer"]["precision"]) in ("64-true", "64"):
        # Lightning restores weights before it converts the module, and would round them.
        module = module.double()
    return module


def check_target(target: str, facts: DataFacts) -> None:
    """Refuse an example task that takes another kind of target than the data have."""
    kind = facts.get("target")
    expected_kind = TARGET_KIND_OF_TASK.get(target)
    if expected_kind and kind and kind != expected_kind:
        raise UserError(
            f"The task takes {TARGET_DESCRIPTIONS[expected_kind]}, and the data has "
            f"{TARGET_DESCRIPTIONS[kind]}."
        )
    if expected_kind and facts.get("inputs") and target not in TASKS_WITH_INPUTS:
        raise UserError(
            f"The task takes images alone, and data.inputs gives {', '.join(facts['inputs'])} "
            "beside them. Give task=image_and_numbers, or leave data.inputs out."
        )


def check_module(module: Any, target: str) -> None:
    """Raise UserError if task= is no LightningModule, or has layers without a shape."""
    if not isinstance(module, pl.LightningModule):
        raise UserError(
            describe_foreign_import(type(module))
            or f"task._target_={target} is not a LightningModule."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UserError(
                f"{name} belongs to a lazy layer and has no shape yet: give its size, or run the "
                "net once before."
            )


def _refuse_unused_parts(config: Config, parameters: Any) -> None:
    """Raise UserError for an override of a part that the task does not take."""
    target = config["task"]["_target_"]
    for override in config.get("overrides") or ():
        key = key_of(override)
        group = key.partition(".")[0]
        part = PART_OF_GROUP.get(group)
        # A small model may be named in place of the default, and a proof downloads no weights.
        if key in ("model", "model.pretrained"):
            continue
        if part and config.get(group) and part not in parameters:
            raise UserError(
                f"{target} does not take {group}=: remove {override}, or add the parameter {part}."
            )


def _refuse_unused_rules(config: Config, open_names: Set[str]) -> None:
    """Raise UserError for layer decay and the like if the task takes an optimizer without them."""
    if "optimizer" not in open_names or "rules" in open_names:
        return
    options = config["optimizer"]
    defaults = GroupRules()
    for key in RULES:
        if options.get(key, getattr(defaults, key)) != getattr(defaults, key):
            raise UserError(
                f"{config['task']['_target_']} takes optimizer= without its rules, so "
                f"optimizer.{key}={options[key]} would change nothing: add the parameter rules, or "
                "leave the option out."
            )


def _build_optimizer(options: Config, learning_rates: Config) -> Any:
    """Return a partial of optimizer=, which takes the parameters."""
    arguments = {key: value for key, value in options.items() if key not in KEYS_BESIDE_OPTIMIZER}
    return build({**arguments, **learning_rates, "_partial_": True})


def _build_scheduler(config: Config) -> Any:
    """Return a partial of scheduler=, which takes the optimizer; None for scheduler=none."""
    node = config.get("scheduler") or {}
    if "_target_" not in node:
        return None
    options = drop_foreign_defaults(node, SCHEDULE_DEFAULTS, "scheduler")
    # This option is no argument of the schedule's class.
    options.pop("monitor", None)
    target = resolve_target(node["_target_"], "scheduler._target_")
    if isinstance(target, type) and issubclass(target, ReduceLROnPlateau):
        options.setdefault("mode", _mode_of_schedule(config))
    elif _monitor_option(config):
        raise UserError(
            f"{node['_target_']} goes by no metric: remove scheduler.monitor=, or give "
            "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau."
        )
    return build({**options, "_partial_": True})


def _monitor_option(config: Config) -> str | None:
    """Return scheduler.monitor=."""
    return (config.get("scheduler") or {}).get("monitor")


def _monitor_of_schedule(config: Config) -> str | None:
    """Return the metric that ReduceLROnPlateau goes by: scheduler.monitor, or task.monitor."""
    return _monitor_option(config) or config["task"].get("monitor")


def _mode_of_schedule(config: Config) -> str:
    """Return min or max: task.mode for the task's metric, and else by the metric's name."""
    monitor = _monitor_of_schedule(config)
    if monitor == config["task"].get("monitor"):
        return config["task"].get("mode") or "min"
    return "min" if is_lower_better(str(monitor)) else "max"


def drop_foreign_defaults(node: Config, defaults: Config, group: str) -> Config:
    """Return the options of a part without defaults that its class does not take.

    GROUP._target_=CLASS puts another class in the place of the default one, whose options stay in
    the config. Those that the user has not changed are dropped unless the class takes them.

    Args:
        defaults: options of the default class.
    """
    parameters, takes_any_name = parameters_of(
        resolve_target(node["_target_"], f"{group}._target_")
    )
    options = {}
    for key, value in node.items():
        is_default = key in defaults and value == defaults[key] and key not in parameters
        if not is_default or (takes_any_name and value is not None):
            options[key] = value
    return options


def _build_metrics(config: Config, num_outputs: Any) -> dict[str, Any]:
    nodes = (config.get("metrics") or {}).items()
    return {name: build(node, {"num_classes": num_outputs}) for name, node in nodes if node}


def net_shape(facts: DataFacts, num_outputs: Any, target: str) -> Config:
    """Return the arguments that a net gets from the data: image_size, channels and num_classes."""
    if not num_outputs:
        raise UserError(
            f"{target} takes model=, which needs the number of classes: let the data module have "
            "an attribute num_classes, or give task.outputs=NUMBER."
        )
    shape: Config = {key: facts[key] for key in ("image_size", "channels") if key in facts}
    return {**shape, "num_classes": num_outputs}


def build_net(config: Config, shape: Config, *, trainable: bool, has_checkpoint: bool) -> nn.Module:
    """Build the network of model=, with model.freeze and the format of trainer.channels_last."""
    options = dict(config["model"])
    frozen_patterns = options.pop("freeze", None)
    if not trainable or has_checkpoint:
        # The checkpoint provides the weights, so that none are downloaded.
        if "pretrained" in options:
            options["pretrained"] = False
        if "weights" in options:
            options["weights"] = None

    net: nn.Module = build(options, shape)
    if frozen_patterns and trainable:
        freeze(net, frozen_patterns)

    trainer = config["trainer"]
    is_16_bit = str(trainer["precision"]).startswith(("auto", "bf16", "16"))
    uses_tensor_cores = is_16_bit and trainer["accelerator"] != "cpu" and torch.cuda.is_available()
    if uses_channels_last(net, trainer.get("channels_last", False), uses_tensor_cores):
        net = net.to(memory_format=torch.channels_last)
    return net


def uses_channels_last(net: nn.Module, option: bool | str, uses_tensor_cores: bool = False) -> bool:
    """Return whether a net has the memory format channels_last, as trainer.channels_last says.

    "auto" gives it to nets with depthwise convolutions and, on a GPU's tensor cores, to all nets
    with convolutions that overlap. EfficientNet-Lite0 at 96 px is 1.4 times as fast with it on a
    CPU; ResNet-18, AlexNet and ViT lose 5 %.
    """
    if isinstance(option, bool):
        return option
    if option != "auto":
        raise UserError(f"trainer.channels_last={option}: give true, false or auto.")

    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    # A ViT's patch embedding is a convolution whose windows do not overlap.
    has_overlap = any(layer.kernel_size != layer.stride for layer in convolutions)
    if uses_tensor_cores and has_overlap:
        return True
    return any(1 < layer.groups == layer.in_channels for layer in convolutions)


def _refuse_unknown_counts(config: Config, facts: DataFacts) -> None:
    """Refuse loss.class_weights=auto if the number of images of each class is not known."""
    is_automatic = (config.get("loss") or {}).get("class_weights") == "auto"
    if is_automatic and not facts.get("class_counts"):
        raise UserError(
            "loss.class_weights=auto needs the number of training images of each class: give the "
            "data module an attribute class_counts, or give a weight for each class."
        )


def build_loss(config: Config, facts: DataFacts) -> Any:
    """Build loss=; its constructor may declare num_classes and class_counts.

    The counts are the numbers of training images by class.
    """
    node = config.get("loss")
    if not node:
        return None
    classes = facts["num_classes"]
    counts = facts.get("class_counts") or [1] * classes
    options = drop_foreign_defaults(node, LOSS_DEFAULTS, "loss")
    return build(options, {"num_classes": classes, "class_counts": counts})
