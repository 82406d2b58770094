"""Say what a misspelt key or option was most likely meant to be."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from lockstep.config.schema import (
    FREE_GROUPS,
    REFUSED_TRAINER_KEYS,
    dotted_keys,
    is_group,
    keys_in_yaml,
    trainer_arguments,
    yaml_files,
)
from lockstep.records.config import Config

# Names from other programs, by the key that they mean here.
NAMES_ELSEWHERE = {
    "data.global_batch_size": "batch_size batch bs",
    "data.num_workers": "workers",
    "data.image_size": "img_size",
    "data.root": "root data_dir data_path",
    "data=": "dataset",
    "trainer.precision": "fp16 bf16 amp",
    "trainer.num_nodes": "nnodes",
    "trainer.devices": "gpus gpu num_gpus nproc_per_node world_size",
    "trainer.max_epochs": "epochs num_epochs",
    "trainer.max_steps": "steps iterations max_iters",
    "trainer.accelerator": "device cuda cpu",
    "trainer.accumulate_grad_batches": "accumulate grad_accum",
    "trainer.gradient_clip_val": "clip max_grad_norm",
    "trainer.ema_decay": "ema",
    "optimizer.lr": "learning_rate base_lr",
    "optimizer.weight_decay": "wd",
    "optimizer=": "optim opt",
    "scheduler.warmup_epochs": "warmup warmup_steps",
    "scheduler=": "sched lr_scheduler",
    "model=": "arch net backbone",
    "loss=": "criterion",
    "experiment=": "recipe",
    "s3.uri": "bucket",
    "paths.log_dir": "output_dir save_dir",
    "ckpt_path": "checkpoint weights",
}
HINTS_FOR_ANY_CLASS = {
    "model": "any model of timm is model=timm model.name={name}; ",
    "metrics": "any class of torchmetrics is "
    "'+metrics.auroc={{_target_: torchmetrics.AUROC, task: multiclass}}'; ",
}


def unknown_key(key: str, options: Config, folders: tuple[Path, ...]) -> str:
    """Return the sentence for a key that nothing reads."""
    options_with_key = options_with(key, folders)
    if options_with_key:
        return f"There is no {key} here: {' or '.join(options_with_key[:4])} has it."

    group = key.partition(".")[0]
    keys_of_run = list(dotted_keys(options))
    arguments = [name for name in trainer_arguments() if name not in REFUSED_TRAINER_KEYS]
    keys_of_trainer = [f"trainer.{name}" for name in arguments]
    close_key = nearest_key(key, [*keys_of_run, *keys_of_trainer, *keys_of_group(group, folders)])
    if close_key:
        other_options = [] if close_key in keys_of_run else options_with(close_key, folders)
        where = f" ({' or '.join(other_options[:2])})" if other_options else ""
        sign = "=" if is_group(close_key, folders) else ""
        return f"There is no {key}: use {close_key}{sign}{where}."

    hint = ""
    if group in FREE_GROUPS:
        hint = f", '+{key}={{_target_: …}}' adds one"
    elif isinstance(options.get(group), Mapping) and "_target_" in options[group]:
        hint = f", '+{key}=VALUE' adds one"
    return f"There is no {key}: python src/train.py --help lists all keys{hint}."


def nearest_key(key: str, names: list[str]) -> str | None:
    """Return the key that was most likely meant.

    Its spelling is nearly the same (data.rooot), its last part is the same (optimizer.num_workers),
    or another program has this name for it (batch_size).
    """
    close_names = difflib.get_close_matches(key, names, 1, cutoff=0.9)
    if close_names:
        return close_names[0]

    group, _, last = key.rpartition(".")
    keys_elsewhere = [meant for meant, text in NAMES_ELSEWHERE.items() if last in text.split()]
    in_group = [meant for meant in keys_elsewhere if meant.startswith(f"{group}.")]
    if in_group:
        return in_group[0]
    siblings = [name for name in names if name.rpartition(".")[0] == group]
    if group:
        close_sibling = _find_close_last_part(last, siblings)
        if close_sibling:
            return close_sibling
    if keys_elsewhere:
        return keys_elsewhere[0]
    return _find_close_last_part(last, siblings) or _find_close_last_part(last, names)


def _find_close_last_part(last: str, names: list[str]) -> str | None:
    by_last_part = {name.rpartition(".")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(last, by_last_part, 1, cutoff=0.7)
    return by_last_part[close[0]] if close else None


def missing_option(group: str, name: str, folders: tuple[Path, ...]) -> str | None:
    """Return the sentence for `model=resnet50`; None if the option exists or there is no group."""
    names = [path.stem for path in yaml_files(group, folders)]
    # Hydra's plugins bring options of hydra/launcher.
    if not names or name in names or "/" in group:
        return None

    close = difflib.get_close_matches(name.lower(), names, 1)
    hint = f"did you mean {group}={close[0]}? " if close else ""
    alternative = HINTS_FOR_ANY_CLASS.get(group, "").format(name=name)
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
        alternative = f"a class of any package is {group}._target_={name}; "
    elif group == "data" and "/" in name:
        alternative = f"a folder of images is data=image_folder data.root={name}; "
    return (
        f"There is no {group}={name}: {hint}{alternative}{group}= takes {', '.join(sorted(names))}."
    )


def keys_of_group(group: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the keys that the options of a group list."""
    names: list[str] = []
    for path in yaml_files(group, folders):
        names += [key.name for key in keys_in_yaml(path, group, commented=False)]
    return names


def options_with(key: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the options that list `key`, as data=cifar10."""
    group = key.partition(".")[0]
    options = []
    for path in yaml_files(group, folders):
        if key in [yaml_key.name for yaml_key in keys_in_yaml(path, group, commented=False)]:
            options.append(f"{group}={path.stem}")
    return options
