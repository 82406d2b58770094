"""A config from outside (a checkpoint's, a bucket's) as words of this clone's command line: names and plain values.

It is data. It names options, which are looked up in this clone's configs, and says plain values for keys that those
options have. What to build, where to read or write and whom to talk to, this clone and its user say alone. Imports no
torch.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.config.signatures import signature_of
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.own_config import own_config

OF_A_CHECKPOINT = ("data", "model", "loss", "metrics", "classifier", "trainer.precision", "trainer.channels_last")
OF_ITS_DATA = (*OF_A_CHECKPOINT, "augmentation", "seed")
OF_A_RUN = (
    "data", "augmentation", "model", "loss", "metrics", "optimizer", "scheduler", "trainer", "classifier",
    "callbacks.checkpoints", "seed", "tags", "experiment_name", "test",
)  # fmt: skip
GROUPS = ("data", "augmentation", "model", "loss", "metrics", "optimizer", "scheduler", "trainer")
SEVERAL = ("metrics",)  # take a list of options
NEEDED = ("data", "model")  # nothing can be built without
EXACT = ("model", "loss", "classifier")  # what they say and this clone does not know would make another net

OPTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
NOT_TAKEN = {"trainer": ("hivemind",)}  # whom it talks to, the user says
# A word without dot, slash and colon is no path, no address and no dotted name of a class.
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,99}")
DOTTED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_+-]|\.(?!\.)){0,99}")
PATTERN = re.compile(r"[A-Za-z0-9_*?\[\]!.-]{1,100}")  # of parameters' names, or of files' below data.root
METRIC = re.compile(r"(?:train|val|test)/[a-z0-9_]{1,40}")
WORDS_OF = {
    "model.name": DOTTED, "data.name": DOTTED, "experiment_name": DOTTED, "tags": DOTTED,
    "callbacks.checkpoints.monitor": METRIC, "model.freeze": PATTERN,
    "data.train": PATTERN, "data.val": PATTERN, "data.test": PATTERN,
}  # fmt: skip
# Parameters that say where to read or write, what to fetch, whom to talk to, or what to call.
PLACE = re.compile(
    r"(?:.*_)?(?:path|dir|directory|root|file|filename|folder|url|urls|uri|address|addr|maddrs|peers|endpoint|host"
    r"|port|cache|cfg|config|overlay|weights|checkpoint|fn|func|function|callback|hook|target|swarm|nat_port_map)"
)
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}|_target_|_partial_")
LARGEST = 2**31
LONGEST_LIST = 64
Missing = object()


@dataclass
class Taken:
    """
    Args:
        words: for the command line, the options first.
        left_out: keys that say something which a config from outside may not say, or that nothing here knows.
    """

    words: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def words_from(stored: object, roots: tuple[str, ...], whose: str) -> Taken:
    """What of a config from outside counts here.

    Args:
        roots: the parts of it that are looked at.
        whose: names it in an error, e.g. "The checkpoint x.ckpt".
    Raises:
        UserError: it names no option of this clone for the data or the model, or a model that has other parameters.
    """
    if not isinstance(stored, Mapping):
        raise UserError(f"{whose} carries no config: it was not written by this project.")
    taken = Taken()
    for group in [group for group in GROUPS if group in roots]:
        _take_option(stored, group, taken, whose)
    here = plain(compose("train", taken.words))
    for root in roots:
        if root in taken.left_out:
            continue
        for key, value, known in _below(root, _at(stored, root), _at(here, root)):
            name = key.rpartition(".")[2]
            if known and not _is_place(name, value) and _is_plain(value, WORDS_OF.get(key, WORD)):
                sign = "++" if _at(here, key) is Missing else ""
                taken.words.append(f"{sign}{key}={value if isinstance(value, str) else json.dumps(value)}")
            elif root in EXACT and not _is_place(name, value):
                raise UserError(f"{whose} says {key}={_shown(value)}, which is nothing that this clone builds.")
            elif _at(here, key) in (None, Missing):  # else this machine has a value of its own
                taken.left_out.append(key)
    return taken


def _take_option(stored: Config, group: str, taken: Taken, whose: str) -> None:
    name = _options(stored, group) if group in SEVERAL else _option(stored, group)
    if name and name not in NOT_TAKEN.get(group, ()):
        taken.words.append(f"{group}={name}")
    elif group in NEEDED or (group in EXACT and stored.get(group)):
        choices = stored.get("choices")
        said = choices.get(group) if isinstance(choices, Mapping) else None
        there = ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
        raise UserError(f"{whose} names {group}={_shown(said)}, which this clone does not have: it has {there}.")
    elif stored.get(group):
        taken.left_out.append(group)


def _options(stored: Config, group: str) -> str | None:
    """`[a,b]` of a config's entries that are options here: of these groups an entry has its option's name."""
    node = stored.get(group)
    names = [name for name in node if _is_option(group, name)] if isinstance(node, Mapping) else []
    return f"[{','.join(names)}]" if names else None


def _is_option(group: str, name: object) -> bool:
    return isinstance(name, str) and bool(OPTION.fullmatch(name)) and (CONFIGS / group / f"{name}.yaml").is_file()


def _option(stored: Config, group: str) -> str | None:
    """The option that a config names; of one that names none, the one that builds the same."""
    choices, node = stored.get("choices"), stored.get(group)
    name = choices.get(group) if isinstance(choices, Mapping) else None
    if _is_option(group, name):
        return str(name)
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if name is not None or not isinstance(target, str):
        return None
    same = [path for path in sorted((CONFIGS / group).glob("*.yaml")) if f"_target_: {target}\n" in path.read_text()]
    return same[0].stem if same else None


def _at(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree.get(part, Missing) if isinstance(tree, Mapping) else Missing
    return tree


def _below(key: str, there: Any, here: Any, known: bool = True) -> Iterator[tuple[str, Any, bool]]:
    """(key, value, whether this clone knows such a key) of everything that `there` says otherwise than `here`."""
    if there is Missing or there == here or (isinstance(there, tuple) and list(there) == here):
        return
    if there == {} and here is None:
        return
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        yield key, there, known and here is not Missing and not isinstance(here, Mapping)
        return
    for name, value in there.items():
        if not isinstance(name, str) or not KEY.fullmatch(name):
            yield f"{key}.{_shown(name)}", value, False
        elif name in here:
            yield from _below(f"{key}.{name}", value, here[name], name != "_target_")
        elif value is not None:
            yield f"{key}.{name}", value, _is_declared(key, name, value, here)


def _is_declared(key: str, name: str, value: Any, here: Config) -> bool:
    """A parameter of the model's class; of a class that hands any name on, numbers and switches."""
    signature = signature_of(str(here["_target_"])) if key == "model" and "_target_" in here else None
    if signature is None:
        return False
    return name in signature.names or (signature.any_name and isinstance(value, int | float))


def _is_place(name: str, value: Any) -> bool:
    return bool(PLACE.fullmatch(name)) or (name == "pretrained" and value is not False)


def _is_plain(value: Any, word: re.Pattern[str]) -> bool:
    """It can name no place, no address and nothing to call."""
    if isinstance(value, list | tuple):
        return len(value) <= LONGEST_LIST and all(_is_scalar(item, word) and item is not None for item in value)
    return _is_scalar(value, word)


def _is_scalar(value: Any, word: re.Pattern[str]) -> bool:
    if isinstance(value, str):
        return bool(word.fullmatch(value))
    if isinstance(value, bool) or value is None:
        return True
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= LARGEST


def _shown(value: object) -> str:
    return repr(value)[:60]


def config_of_checkpoint(path: Path, stored: object, logs: Path, roots: tuple[str, ...] = OF_A_CHECKPOINT) -> Config:
    """The config to build a checkpoint's net with.

    Of a run that this machine trained it is the one that lies in its folder, and says all that its user said. Of any
    other it is composed here from what the checkpoint names.

    Args:
        path: the checkpoint, whose own config is `stored`.
        logs: under which this machine's runs lie.
        roots: the parts of another's that are looked at.
    Raises:
        UserError: it names what this clone does not have.
    """
    if own := config_of_own_run(path, logs):
        return own
    taken = words_from(stored, roots, f"The checkpoint {path}")
    return config_of_words(taken.words)


def config_of_words(words: list[str]) -> Config:
    cfg = compose("train", words)
    return {**plain(cfg), "choices": {group: cfg.hydra.runtime.choices.get(group) for group in GROUPS}}


def config_of_own_run(checkpoint: Path, logs: Path) -> Config | None:
    """config.yaml of the run that a checkpoint lies in, where a start of this machine's user wrote it."""
    folder = RunFolder(checkpoint.resolve().parent.parent)
    is_own = checkpoint.parent.name == folder.checkpoints.name and folder.path.is_relative_to(logs.resolve())
    path = folder.any_config() if is_own else None
    return own_config(path, logs) if path else None
