"""The yaml files as the schema: list their options and keys, check a composed config, suggest the nearest valid name.

A group is a folder and an option a yaml file in it, described by its first comment line; the comment after a key
describes the key. A key exists if train.yaml or the chosen option of its group lists it, and its default gives its
type. An experiment declares no keys. The parameters of a `_target_` are checked when it is built
(config/instantiate.py), because this file imports no torch.
"""

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.process.errors import UserError
from lockstep.records.config import Config

KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_][\w]*):(?P<value>[^#]*?)(?:\s+# (?P<comment>.+))?$")
FREE_GROUPS = ("callbacks", "logger", "metrics")  # the user names their entries
REFUSED_TRAINER_KEYS = {
    "callbacks": "use callbacks=", "logger": "use logger=", "default_root_dir": "use paths.log_dir",
    "fast_dev_run": "use debug=fast_dev_run", "enable_checkpointing": "use '~callbacks.checkpoints'",
    "enable_progress_bar": "use '~callbacks.progress' or callbacks=rich_progress_bar",
    "enable_model_summary": "use callbacks=model_summary", "barebones": "use callbacks=none",
}  # fmt: skip
WORDS = {"data.global_batch_size": "max", "trainer.devices": "auto", "trainer.num_nodes": "auto"}  # beside a number
NODES = ("trainer.compile", "trainer.strategy")  # that may be a node in place of their default
# The options that --help lists before the others of their group.
EVERYDAY = {"trainer": ("cpu", "gpu", "ddp", "fsdp", "ddp_sim", "fsdp_sim")}
KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
NAMES = ("run_id", "experiment_name", "data.name")

# Names from other programs
SYNONYMS = {
    name: key
    for key, names in {
        "data.global_batch_size": "batch_size batch bs", "data.num_workers": "workers", "data.image_size": "img_size",
        "data.root": "root data_dir data_path", "trainer.precision": "fp16 bf16 amp", "trainer.num_nodes": "nnodes",
        "trainer.devices": "gpus gpu num_gpus nproc_per_node world_size", "trainer.max_epochs": "epochs num_epochs",
        "trainer.max_steps": "steps iterations max_iters", "trainer.accelerator": "device cuda cpu",
        "trainer.accumulate_grad_batches": "accumulate grad_accum", "trainer.gradient_clip_val": "clip max_grad_norm",
        "optimizer.lr": "learning_rate base_lr", "optimizer.weight_decay": "wd", "data=": "dataset",
        "scheduler.warmup_epochs": "warmup warmup_steps", "model=": "arch net backbone", "loss=": "criterion",
        "optimizer=": "optim opt", "scheduler=": "sched lr_scheduler", "experiment=": "recipe", "s3.uri": "bucket",
        "paths.log_dir": "output_dir save_dir", "ckpt_path": "checkpoint weights", "trainer.ema_decay": "ema",
    }.items()
    for name in names.split()
}  # fmt: skip
ANY_OTHER = {
    "model": "any model of timm is model=timm model.name={name}; ",
    "metrics": "any class of torchmetrics is '+metrics.auroc={{_target_: torchmetrics.AUROC, task: multiclass}}'; ",
}


class Option(NamedTuple):
    """One yaml file of a group."""

    name: str
    description: str
    path: Path


class Key(NamedTuple):
    """One commented key by its full dotted name, e.g. trainer.max_epochs."""

    name: str
    default: str
    comment: str


def groups(configs: Path) -> dict[str, list[Option]]:
    """Return every group with its options, both in alphabetical order."""
    found: dict[str, list[Option]] = {}
    for path in sorted(configs.glob("*/*.yaml")):
        lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
        found.setdefault(path.parent.name, []).append(Option(path.stem, lines[0] if lines else "", path))
    return found


def keys(path: Path, prefix: str = "", *, commented: bool = True) -> list[Key]:
    """Return every commented key of one yaml file, or every key but Hydra's own."""
    found: list[Key] = []
    stack: list[tuple[int, str]] = []
    for match in map(KEY.match, path.read_text().splitlines()):
        if match is not None:
            depth = len(match["indent"])
            stack = [(at, name) for at, name in stack if at < depth] + [(depth, match["key"])]
            if match["comment"] or not (commented or match["key"] == "defaults" or match["key"].startswith("_")):
                name = ".".join([prefix, *(name for _, name in stack)]).lstrip(".")
                found.append(Key(name, match["value"].strip(), (match["comment"] or "").strip()))
    return found


def help_text(configs: Path, config_name: str, description: str) -> str:
    """Return the answer to --help: the script's description, the options of each group, and the main keys."""
    lines = [description.strip(), ""]
    text = (configs / f"{config_name}.yaml").read_text()
    defaults = set(re.findall(r"^  - (\w+)(?:: |/)(\w+)$", text, re.MULTILINE))
    for group, options in groups(configs).items():
        lines.append(f"{group}=")
        for option in everyday_first(group, options):
            mark = "*" if (group, option.name) in defaults else " "
            lines.append(f"  {mark} {option.name:22} {option.description}")
    lines += ["", "  * chosen by default", "", "Keys (docs/options.md has those of every option):"]
    shown = [*keys(configs / f"{config_name}.yaml"), *keys(configs / "trainer" / "default.yaml", "trainer")]
    lines += [f"  {key.name + '=' + key.default:44} {key.comment}" for key in shown]
    lines += ["", "Hydra: -m sweeps (optimizer.lr=1e-3,1e-2), --cfg job prints the config, --info explains it."]
    return "\n".join(lines)


def everyday_first(group: str, options: list[Option]) -> list[Option]:
    """Return the options of a group with those of EVERYDAY at the top."""
    everyday = EVERYDAY.get(group, ())
    first = [option for option in options if option.name in everyday]
    first.sort(key=lambda option: everyday.index(option.name))
    return [*first, *(option for option in options if option.name not in everyday)]


def key_of(override: str) -> str:
    """Return `trainer.devices` for +trainer.devices=2."""
    return override.split("=")[0].lstrip("+~").split("@")[0]


def is_group(key: str, folders: tuple[Path, ...]) -> bool:
    """Return whether a key is the name of a config group."""
    return any((folder / key).is_dir() for folder in folders)


def check(config: Config, options: Config, overrides: list[str], folders: tuple[Path, ...]) -> None:
    """Check every key and type of a composed config; a UserError names the first wrong key and the nearest valid one.

    Args:
        config: plain, with unresolved interpolations.
        options: the chosen options alone, without the values of an experiment or of the command line.
        folders: that hold the groups, configs/ first.
    """
    for key, value, expected in _differences(config, options):
        typed = any(key_of(word).startswith(key) or key.startswith(key_of(word)) for word in overrides)
        said = f"{key}={value!r}: give {expected}." if expected else unknown_key(key, options, folders)
        origin = "" if typed or not overrides else " It is in a yaml of the experiment or the callbacks."
        raise UserError(said + origin)


def _differences(config: Config, options: Config, place: str = "") -> Iterator[tuple[str, Any, str | None]]:
    """Yield each wrong key, its value and what to give instead, None if nothing reads the key."""
    for name, value in config.items():
        key, default = f"{place}{name}", options.get(name)
        if name not in options:
            if not _is_read(place[:-1], str(name), value, config, options):
                yield key, value, None
        elif key in NAMES and isinstance(value, int | float):
            yield key, value, f"it in quotes: '{value}'"
        elif value is None or value in (default, WORDS.get(key)) or (isinstance(value, str) and "${" in value):
            continue
        elif isinstance(value, Mapping) and (isinstance(default, Mapping) or key in NODES):
            yield from _differences(value, default, f"{key}.") if isinstance(default, Mapping) else ()
        elif key == "trainer.strategy":
            yield key, value, "a strategy as trainer=ddp, trainer=fsdp and the like"
        elif isinstance(default, Mapping) and default:
            choice = f"; a yaml chooses an option in its defaults: `- override /{key}: {value}`" if not place else ""
            yield key, value, f"one of its keys, as {key}.KEY=VALUE{choice}"
        elif (kind := type(default)) in KINDS and (kind, type(value)) not in ((kind, kind), (float, int)):
            yield key, value, f"{KINDS[kind]} (the default is {str(default).lower()})"


def _is_read(place: str, name: str, value: Any, parent: Config, listed: Config) -> bool:
    """Return whether something may read a key that no yaml lists."""
    if place == "trainer":
        if name in REFUSED_TRAINER_KEYS:
            raise UserError(f"trainer.{name} cannot be given: {REFUSED_TRAINER_KEYS[name]}.")
        return name in trainer_arguments()
    if place in FREE_GROUPS:
        return value is None or isinstance(value, Mapping)
    is_slip = difflib.get_close_matches(name, map(str, listed), 1, cutoff=0.88)  # rooot for root
    return name == "_target_" or ("_target_" in parent and not is_slip)


@cache
def trainer_arguments() -> tuple[str, ...]:
    """Return the parameters of Lightning's Trainer, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("lightning")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "pytorch" / "trainer" / "trainer.py").read_text()
    found = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == "__init__"]
    return tuple(argument.arg for argument in found[0].args.kwonlyargs)  # type: ignore[attr-defined]


def unknown_key(key: str, options: Config, folders: tuple[Path, ...]) -> str:
    """Return the sentence for a key that nothing reads."""
    group = key.partition(".")[0]
    if group == "classifier":  # of version 1
        return f"{key} is now task{key.removeprefix(group)}."
    if others := _options_with(key, folders):
        return f"There is no {key} here: {' or '.join(others[:4])} has it."
    here = list(dotted(options))
    known = [*here, *(f"trainer.{name}" for name in trainer_arguments() if name not in REFUSED_TRAINER_KEYS)]
    known += [found.name for path in _files(group, folders) for found in keys(path, group, commented=False)]
    if found := nearest(key, known):
        others = [] if found in here else _options_with(found, folders)
        where = f" ({' or '.join(others[:2])})" if others else ""
        return f"There is no {key}: use {found}{'=' if is_group(found, folders) else ''}{where}."
    value = "{_target_: …}" if group in FREE_GROUPS else "VALUE"
    more = f", '+{key}={value}' adds one" if "{" in value or "_target_" in (options.get(group) or ()) else ""
    return f"There is no {key}: python src/train.py --help lists all keys{more}."


def nearest(key: str, known: list[str]) -> str | None:
    """Return the key that was most likely meant: by its last part, a synonym, or its spelling."""
    place, _, last = key.rpartition(".")
    if slip := difflib.get_close_matches(key, known, 1, cutoff=0.9):
        return slip[0]
    if last in SYNONYMS:
        return SYNONYMS[last]
    beside = [name for name in known if name.rpartition(".")[0] == place]
    for names in (beside, known):
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        if close := difflib.get_close_matches(last, by_last, 1, cutoff=0.7):
            return by_last[close[0]]
    return None


def dotted(node: Config, place: str = "") -> Iterator[str]:
    """Yield every key that a user can give, by its full name; values before the nodes that hold them."""
    for name, value in node.items():
        if name not in ("_target_", "_partial_", "task_name", "sweep_dir"):
            if isinstance(value, Mapping):
                yield from dotted(value, f"{place}{name}.")
            yield f"{place}{name}"


def _files(group: str, folders: tuple[Path, ...]) -> list[Path]:
    return [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]


def _options_with(key: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the options that list `key`, as data=cifar10."""
    group = key.partition(".")[0]
    names = {p.stem: {found.name for found in keys(p, group, commented=False)} for p in _files(group, folders)}
    return [f"{group}={name}" for name, found in names.items() if key in found]


def missing_option(group: str, name: str, folders: tuple[Path, ...]) -> str | None:
    """Return the sentence for `model=resnet50`; None if the option exists or `group` is not a group."""
    names = [path.stem for path in _files(group, folders)]
    if not names or name in names or "/" in group:  # Hydra's plugins bring options of hydra/launcher
        return None
    close = difflib.get_close_matches(name.lower(), names, 1)
    hint = f"did you mean {group}={close[0]}? " if close else ""
    other = ANY_OTHER.get(group, "").format(name=name)
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
        other = f"a class of any package is {group}._target_={name}; "
    elif group == "data" and "/" in name:
        other = f"a folder of images is data=image_folder data.root={name}; "
    return f"There is no {group}={name}: {hint}{other}{group}= takes {', '.join(sorted(names))}."
