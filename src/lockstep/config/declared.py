"""Refuses a key that nothing reads, with the nearest that exists: what is swallowed looks like what was obeyed.

Declared are the keys of train.yaml and of the chosen options, the parameters of what a `_target_` names, and those of
Lightning's Trainer. An experiment declares nothing: it says values, as the command line does. Imports no torch.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.help import keys
from lockstep.config.signatures import signature_of
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError

MARKS = ("_target_", "_partial_")
OPEN = ("callbacks", "logger", "metrics")  # whose entries have names of the user's own
FREE = ("hardware.peak_tflops",)  # whose keys are data
TRAINER = "lightning.pytorch.Trainer"
OURS = "the run makes it itself"
REFUSED_TRAINER_KEYS = {
    "reload_dataloaders_every_n_epochs": OURS, "callbacks": "take callbacks=", "logger": "take logger=",
    "plugins": OURS, "default_root_dir": "take paths.log_dir", "enable_checkpointing": OURS,
    "enable_progress_bar": OURS, "enable_model_summary": OURS, "use_distributed_sampler": OURS,
    "fast_dev_run": "take debug=fast_dev_run",
}  # fmt: skip

# Words of other programs, by their last part, and what to write here.
HABITS = {
    "data.global_batch_size": "batch_size batch bs train_batch_size global_batch",
    "data.eval_batch_size": "val_batch_size test_batch_size",
    "data.num_workers": "workers num_workers n_workers",
    "data.root": "root data_dir data_path dataset_dir dataset_path data_root",
    "data.image_size": "img_size size input_size resolution",
    "trainer.devices": "gpus gpu num_gpus n_gpus ngpus num_devices nproc_per_node world_size",
    "trainer.num_nodes": "nodes nnodes num_machines",
    "trainer.max_epochs": "epochs epoch num_epochs n_epochs max_epoch",
    "trainer.max_steps": "steps num_steps iterations max_iters max_steps",
    "trainer.precision": "fp16 bf16 amp dtype",
    "trainer.accelerator": "device cuda cpu",
    "trainer.accumulate_grad_batches": "accumulate grad_accum accumulation_steps gradient_accumulation_steps",
    "trainer.gradient_clip_val": "clip grad_clip clip_grad max_grad_norm clip_grad_norm",
    "trainer.ema_decay": "ema",
    "trainer=ddp": "distributed parallel",
    "optimizer.lr": "lr learning_rate base_lr",
    "optimizer.weight_decay": "wd decay",
    "scheduler.warmup_epochs": "warmup warmup_steps",
    "classifier.label_smoothing": "smoothing label_smooth",
    "model": "arch architecture net network backbone",
    "data": "dataset",
    "loss": "criterion loss_fn",
    "model.freeze": "freeze frozen freeze_backbone",
    "optimizer.layer_decay": "layer_decay lr_layer_decay",
    "optimizer": "optim opt",
    "scheduler": "sched lr_scheduler schedule",
    "paths.log_dir": "output_dir out_dir save_dir log_dir output",
    "ckpt_path": "checkpoint ckpt weights init_from finetune",
    "resume": "resume_from continue_from",
    "run_id": "run_name",
    "experiment=": "recipe",
    "experiment_name": "exp exp_name",
    "s3.uri": "bucket s3_uri",
    "debug=fast_dev_run": "fast_dev_run",
    "debug=profiler": "profile",
}
HABIT = {word: key for key, words in HABITS.items() for word in words.split()}

ANY_OTHER = {
    "model": "any model of timm is model=timm model.name={name}; ",
    "metrics": "any class of torchmetrics is '+metrics.auroc={{_target_: torchmetrics.AUROC, task: multiclass}}'; ",
}


def refuse_undeclared(config: Config, options: Config, configs: Path, words: Iterable[str] = ()) -> None:
    """
    Args:
        config: composed, plain, interpolations unresolved.
        options: the same options composed without an experiment and without values.
        configs: the folder of all options.
        words: the command line's; a key that none of them names stands in an experiment.
    Raises:
        UserError: the first key that nothing reads, and the nearest that something does.
    """
    for key in undeclared(config, options):
        typed = not words or any(key_of(word).startswith(key) for word in words)
        raise UserError(sentence(key, options, configs) + ("" if typed else " It stands in the experiment's yaml."))


YOURS = {
    "model": "models", "data": "data", "augmentation": "augmentations", "loss": "losses", "optimizer": "optimizers",
    "scheduler": "schedulers", "metrics": "metrics", "callbacks": "callbacks", "logger": "callbacks",
}  # where the classes of a group's options stand  # fmt: skip


def refuse_without_class(config: Config) -> None:
    """
    Raises:
        UserError: a component that names no class.
    """
    for group, package in YOURS.items():
        node = config.get(group) or {}
        for name, part in node.items() if group in OPEN else [("", node)] * bool(node):
            if part is not None and not (isinstance(part, Mapping) and "_target_" in part):
                target = f"_target_: {package}.FILE.CLASS"
                below = "NAME" if name in MARKS else name
                written = f"{below}: {{{target}}}" if name else target
                key = group if below != name else f"{group}.{name}".rstrip(".")
                raise UserError(f"{key} has no _target_ where it stands: configs/{group}/…yaml says `{written}`.")


def key_of(word: str) -> str:
    """`trainer.devices` of +trainer.devices=2."""
    return word.split("=")[0].lstrip("+~")


def undeclared(config: Config, options: Config) -> Iterator[str]:
    """The dotted keys that nothing reads."""
    yield from _below("", config, options)


def _below(place: str, node: Config, declared: Config) -> Iterator[str]:
    signature = signature_of(str(node["_target_"])) if "_target_" in node else None
    for name, value in node.items():
        key = f"{place}.{name}".lstrip(".")
        if name in declared:
            yield from _of_value(key, value, declared[name])
        elif not _is_known(place, name, value, "_target_" in node, signature):
            yield key
        elif isinstance(value, Mapping) and "_target_" in value:
            yield from _below(key, value, {})


def _of_value(key: str, value: Any, declared: Any) -> Iterator[str]:
    if value is None or key in FREE:
        return
    if not isinstance(value, Mapping):
        _refuse_word_for_a_part(key, value, declared)
    elif isinstance(declared, Mapping) or "_target_" in value:
        yield from _below(key, value, declared if isinstance(declared, Mapping) else {})
    elif value:
        yield f"{key}.{next(iter(value))}"  # e.g. of a strategy that this trainer does not have


def _refuse_word_for_a_part(key: str, value: Any, declared: Any) -> None:
    interpolated = isinstance(value, str) and "${" in value
    if key == "trainer.strategy" and not interpolated:
        raise UserError(f"trainer.strategy={value}: strategies are chosen as trainer=ddp, trainer=fsdp and the like.")
    if isinstance(declared, Mapping) and declared and not interpolated:
        chosen = f"; a yaml's defaults choose one by `- override /{key}: {value}`" if "." not in key else ""
        raise UserError(f"{key}={value}: {key} has keys of its own, as {key}.{next(iter(declared))}{chosen}.")


def _is_known(place: str, name: str, value: Any, is_target: bool, signature: Any) -> bool:
    if place == "trainer":
        _refuse_trainer_key(name)
        trainer = signature_of(TRAINER)
        return trainer is None or name in trainer.names
    if place in OPEN:
        return value is None or (isinstance(value, Mapping) and "_target_" in value)
    if not is_target:
        return False
    return name in MARKS or signature is None or signature.any_name or name in signature.names


def _refuse_trainer_key(name: str) -> None:
    if name in REFUSED_TRAINER_KEYS:
        raise UserError(f"trainer.{name} cannot be given: {REFUSED_TRAINER_KEYS[name]}.")


def sentence(key: str, options: Config, configs: Path) -> str:
    """That nothing reads `key`, and what to write in its place."""
    if key.startswith("trainer.strategy."):
        return f"There is no {key} here: choose a trainer whose strategy has it, as trainer=ddp."
    if key in set(dotted(options)):
        return f"{key} is a parameter that the yaml does not list: write +{key}=VALUE."
    if others := options_with(key, configs):
        return f"There is no {key} here: {' or '.join(others[:4])} has it."
    found, place = nearest(key, options, configs), key.rpartition(".")[0]
    if place in OPEN and not (found or "").startswith(f"{place}."):
        return f"There is no {key}: a new one is written '+{key}={{_target_: …}}'."
    instead = f"take {found}" if found else "python src/train.py --help lists what there is"
    return f"There is no {key}, and nothing would read it: {instead}."


def nearest(key: str, options: Config, configs: Path) -> str | None:
    """What somebody who wrote `key` most likely means: a habit from elsewhere, its place, or its spelling."""
    known, last = list(dotted(options)), key.rpartition(".")[2]
    if slip := difflib.get_close_matches(key, known, 1, cutoff=0.9):
        return _written(slip[0], options, configs)
    if habit := HABIT.get(last):
        return _written(habit, options, configs)
    if placed := next((name for name in known if name.rpartition(".")[2] == last), None):
        return placed
    trainer = signature_of(TRAINER)
    known += [f"trainer.{name}" for name in (trainer.names if trainer else ()) if name not in REFUSED_TRAINER_KEYS]
    known += [found.name for path in sorted(configs.glob(f"{key.partition('.')[0]}/*.yaml"))
              for found in keys(path, path.parent.name)]  # fmt: skip
    if close := difflib.get_close_matches(key, known, 1):
        return _written(close[0], options, configs)
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = difflib.get_close_matches(last, [*by_last, *HABIT], 1)
    return _written(by_last.get(close[0]) or HABIT[close[0]], options, configs) if close else None


def _written(key: str, options: Config, configs: Path) -> str:
    """As it is written: with an option that has it where the chosen one lacks it, a group with its sign."""
    if "=" in key or key in set(dotted(options)):
        return f"{key}=" if (configs / key).is_dir() else key
    others = options_with(key, configs)
    return f"{key} ({' or '.join(others[:2])})" if others else key


def dotted(node: Config, place: str = "") -> Iterator[str]:
    """Every key that can be given, by its full name; the values of nodes before the nodes themselves."""
    for name, value in node.items():
        if name not in MARKS:
            if isinstance(value, Mapping):
                yield from dotted(value, f"{place}{name}.")
            yield f"{place}{name}"
    if "_target_" in node:
        signature = signature_of(str(node["_target_"]))
        yield from (f"{place}{name}" for name in (signature.names if signature else ()) if name not in node)


def options_with(key: str, configs: Path) -> list[str]:
    """The options that declare `key`, as data=cifar10."""
    group = key.partition(".")[0]
    files = sorted((configs / group).glob("*.yaml"))
    return [f"{group}={path.stem}" for path in files if key in {found.name for found in keys(path, group)}]


def dashed(words: list[str], options: Config, configs: Path) -> str:
    """For `--epochs 5` or `--epochs=5`, which is how other programs are called."""
    if words[0].partition("=")[0] in ("--config-name", "-cn", "--config-path", "-cp"):
        return f"{words[0]}: a recipe is chosen as experiment=NAME; folders of more yamls are added by --config-dir."
    if words[0] == "--estimate":
        return "--estimate belongs to another script: python src/find_batch_size.py --estimate, with the same options."
    name, _, value = words[0].lstrip("-").replace("-", "_").partition("=")
    value = value or next((word for word in words[1:2] if "=" not in word and not word.startswith("-")), "")
    found = name if name in set(dotted(options)) else nearest(name, options, configs)
    meant = found if found and "=" in found else f"{found or name}={value or '…'}"
    return f"{words[0]}: keys are written without dashes: {meant}."


def missing_option(group: str, name: str, configs: Path) -> str | None:
    """For `model=resnet50`: what to choose instead; None where there is such an option."""
    there = sorted(path.stem for path in (configs / group).glob("*.yaml"))
    if not there or name in there:
        return None
    by_lower = {option.lower(): option for option in there}
    close = [by_lower[word] for word in difflib.get_close_matches(name.lower(), by_lower, 1)]
    did = f"did you mean {group}={close[0]}? " if close else ""
    listed = [key for path in sorted((configs / group).glob("*.yaml")) for key in keys(path, group)]
    if not close and group not in OPEN and (key := next((key for key in listed if name in _words(key.name)), None)):
        did = f"take {key.name}=… ({key.comment}); "
    any_other = ANY_OTHER.get(group, "").format(name=name)
    return f"There is no {group}={name}: {did}{any_other}{group}= takes {', '.join(there)}."


def _words(key: str) -> list[str]:
    """`cutmix_alpha`, `cutmix` and `alpha` of augmentation.cutmix_alpha."""
    last = key.rpartition(".")[2]
    return [last, *last.split("_")]
