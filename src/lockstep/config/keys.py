"""The one table of keys: the kind of each option of the config, and what follows from the kind.

The longest matching pattern counts. A key that no pattern matches is of the kind `recipe`.
A pattern matches a key and everything below it, and `*` in it matches any text. Imports no torch.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from lockstep.records.batch import ACCUMULATION

# numpy refuses a larger seed.
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Kind:
    """The facts that all keys of a kind share.

    Args:
        may_resume_change: a resume may give another value, which holds from there on.
        is_equal_on_all_ranks: a run whose nodes have different values does not begin.
        may_be_foreign: plain values are taken from the config of a bucket or a checkpoint.
        is_compared: a comparison of runs shows different values.
    """

    name: str
    may_resume_change: bool
    is_equal_on_all_ranks: bool
    may_be_foreign: bool
    is_compared: bool


# These keys say what is trained, and by which rule.
RECIPE = Kind(
    "recipe",
    may_resume_change=False,
    is_equal_on_all_ranks=True,
    may_be_foreign=True,
    is_compared=True,
)
# These keys say how the recipe is computed, for how long, and how often it is validated.
EXECUTION = Kind(
    "execution",
    may_resume_change=True,
    is_equal_on_all_ranks=True,
    may_be_foreign=True,
    is_compared=True,
)
# These keys describe this machine, which does not change the result.
MACHINE = Kind(
    "machine",
    may_resume_change=True,
    is_equal_on_all_ranks=False,
    may_be_foreign=False,
    is_compared=False,
)
# These keys say where files, buckets and peers are.
PLACE = Kind(
    "place",
    may_resume_change=True,
    is_equal_on_all_ranks=False,
    may_be_foreign=False,
    is_compared=False,
)
# These keys say what one start is asked to do. They are given each time.
START = Kind(
    "start",
    may_resume_change=True,
    is_equal_on_all_ranks=False,
    may_be_foreign=False,
    is_compared=False,
)
# These keys say what is watched, written and shown beside the training.
OUTPUT = Kind(
    "output",
    may_resume_change=True,
    is_equal_on_all_ranks=True,
    may_be_foreign=True,
    is_compared=False,
)

KIND_BY_PATTERN = {
    "against": START,
    "callbacks": OUTPUT,
    "ckpt_path": START,
    "data.*.root": PLACE,
    "data.*cache_dir": PLACE,
    "data.*download_dir": PLACE,
    "data.eval_batch_size": EXECUTION,
    "data.images": PLACE,
    "data.num_workers": MACHINE,
    "data.path": MACHINE,
    "data.root": PLACE,
    "experiment_name": OUTPUT,
    "hardware": OUTPUT,
    "hydra": START,
    "hydra.searchpath": PLACE,
    # Configs of older versions have these two.
    "initial_weights": START,
    "resume_step": START,
    "logbook": OUTPUT,
    "logger": OUTPUT,
    "metrics": EXECUTION,
    "model.weights": PLACE,
    "optimized_metric": OUTPUT,
    "overrides": START,
    "paths": PLACE,
    "pictures": OUTPUT,
    "quiet": START,
    "resume": START,
    "run_id": START,
    "s3": PLACE,
    "snapshot": START,
    "sweep_dir": START,
    "tags": OUTPUT,
    "task.log_dir": PLACE,
    "task_name": START,
    "test": OUTPUT,
    "trainer": EXECUTION,
    # It follows the number of ranks, so that a step has the same images.
    ACCUMULATION: MACHINE,
    "trainer.devices": MACHINE,
    # A checkpoint holds the average in place of the trained weights.
    "trainer.ema_decay": RECIPE,
    "trainer.host_maddrs": PLACE,
    "trainer.initial_peers": PLACE,
    # The position of a checkpoint counts the batches of an epoch.
    "trainer.limit_train_batches": RECIPE,
    "trainer.memory_limit_gib": MACHINE,
    "trainer.num_nodes": MACHINE,
    "trainer.num_threads": MACHINE,
    "trainer.overfit_batches": RECIPE,
    "trainer.reload_dataloaders_every_n_epochs": RECIPE,
    "trainer.strategy.host_maddrs": PLACE,
    "trainer.strategy.initial_peers": PLACE,
    "trainer.timeout_s": MACHINE,
    "trainer.use_distributed_sampler": RECIPE,
    "trial": START,
    "verbose": START,
}

LR_SCALING_KEY = "optimizer.scale_lr_with_batch"
WEIGHTS_AT_START = "ckpt_path"
WEIGHTS_OF_NET = "model.weights"
# A launcher that starts the ranks says how many there are.
RANK_COUNTS = ("trainer.devices", "trainer.num_nodes")
# config.yaml holds the values that replaced `auto` on the machine of that start.
RESOLVED_KEYS = ("trainer.accelerator", *RANK_COUNTS)
# Every start computes these anew, even if an override of an earlier start set them.
RECOMPUTED_KEYS = (ACCUMULATION, "paths.log_dir")
# These keys of a trainer place the ranks. Another trainer has its own values of them.
PLACEMENT_KEYS = ("trainer.launch", "trainer.strategy", ACCUMULATION, *RESOLVED_KEYS)
# These keys label a run or say what it leaves. An evaluation of the run does not inherit them.
LABEL_KEYS = ("logbook", "tags", "test")
# A run of a few steps has none of these.
LEFT_OUT_OF_SHORT_RUNS = ("debug", "logbook", "logger")
# These keys choose the images that are read. data=NAME chooses them, too.
IMAGE_KEYS = ("data.root", "data.images", "data.*dataset")
# This key chooses the fold that validates.
FOLD_KEY = "data.fold"
# Jobs of a sweep that differ in these alone repeat one configuration.
REPEAT_KEYS = (FOLD_KEY, "data.seed", "seed")
# Both arms of against=baseline have these: images, their split, what is predicted, and the length.
SHARED_BY_ARMS = (
    "debug",
    "experiment",
    "data.*column*",
    "data.*fraction",
    "data.channels",
    "data.group",
    "data.name",
    "data.num_folds",
    "data.num_val",
    "data.splits",
    "data.suffix",
    "data.target",
    "data.unknown",
    "task.mode",
    "task.monitor",
    "trainer.limit_train_batches",
    "trainer.overfit_batches",
)
# A resume of a run that is older than a key gives it this value, which keeps what the run did.
LEGACY_DEFAULTS = {"data.range": None}
# The values of these keys are names: `run_id=2025_11_25` is not a number.
NAME_KEYS = (
    "ckpt_path",
    "data.cache_dir",
    "data.group",
    "data.images",
    "data.label_column",
    "data.label_columns",
    "data.name",
    "data.path_column",
    "data.root",
    "data.sampling",
    "experiment_name",
    "hydra.sweep.dir",
    "hydra.sweeper.study",
    "model.name",
    "model.weights",
    "optimized_metric",
    "paths.*",
    "resume",
    "run_id",
    "s3.endpoint_url",
    "s3.uri",
    "sweep_dir",
    "tags",
)
# The values of these keys must be text in a yaml, too.
TEXT_KEYS = ("run_id", "experiment_name", "data.name")
# Each of these keys takes a number or this word.
WORD_OF_NUMBER = {
    "data.global_batch_size": "max",
    "data.page": "all",
    "trainer.devices": "auto",
    "trainer.num_nodes": "auto",
}
# The values of these keys may be nodes in place of their defaults.
NODE_KEYS = ("trainer.compile", "trainer.strategy")
# Hydra and the project set them, and nobody types them.
INTERNAL_KEYS = ("_target_", "_partial_", "task_name", "sweep_dir", "trial")
# These overrides give a run another number of GPUs.
DEVICE_KEYS = ("experiment", "trainer", "trainer.devices", "trainer.process_devices")
# These keys set the length of a training, over which a schedule stretches.
LENGTHS = ("trainer.max_epochs", "trainer.max_steps")


@cache
def kind_of(key: str) -> Kind:
    """Return the kind of a dotted key: that of the longest pattern that matches it."""
    patterns = [pattern for pattern in KIND_BY_PATTERN if is_below(key, pattern)]
    return KIND_BY_PATTERN[max(patterns, key=len)] if patterns else RECIPE


def is_below(key: str, pattern: str) -> bool:
    """Return whether a pattern matches a key or a node above it."""
    return fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*")


def is_text(key: str) -> bool:
    """Return whether the value of a key is a name, whatever it looks like."""
    return any(fnmatchcase(key, pattern) for pattern in NAME_KEYS)


def root_of(key: str) -> str:
    """Return `trainer` for trainer.devices."""
    return key.partition(".")[0]


def may_resume_change(key: str) -> bool:
    """Return whether a resume may give another value."""
    return kind_of(key).may_resume_change


def is_equal_on_all_ranks(key: str) -> bool:
    """Return whether all nodes of a run must have the same value."""
    # All ranks take part in the check of the bucket, or none.
    return kind_of(key).is_equal_on_all_ranks or root_of(key) == "s3"


def may_be_foreign(key: str) -> bool:
    """Return whether a plain value may come from an untrusted config."""
    return kind_of(key).may_be_foreign


def is_compared(key: str) -> bool:
    """Return whether a comparison of runs shows different values."""
    return kind_of(key).is_compared


def is_run_locator(key: str) -> bool:
    """Return whether an override says where a run or a checkpoint is."""
    return kind_of(root_of(key)) in (START, PLACE)


def is_not_inherited(key: str) -> bool:
    """Return whether a value belongs to one run only: an evaluation does not inherit it."""
    return is_run_locator(key) or root_of(key) in LABEL_KEYS


def is_carried_over(key: str) -> bool:
    """Return whether a resume keeps the value that the run has.

    A run that was stopped before its first checkpoint starts from `ckpt_path` once more.
    """
    return kind_of(key) is not START or key == WEIGHTS_AT_START


def is_shown_as_changed(key: str) -> bool:
    """Return whether the page of a run shows that the command line changed this value."""
    kind = kind_of(key)
    return kind not in (START, PLACE, OUTPUT) or root_of(key) in ("callbacks", "logger")


def is_left_out_of_short_runs(key: str) -> bool:
    """Return whether a run of a few steps, for a batch or as a dry run, leaves an override out."""
    return kind_of(key) is START or root_of(key) in LEFT_OUT_OF_SHORT_RUNS


def chooses_images(key: str) -> bool:
    """Return whether an override chooses the images that are read."""
    return key == "data" or any(is_below(key, pattern) for pattern in IMAGE_KEYS)


def is_omitted_by_baseline(key: str) -> bool:
    """Return whether the baseline of a sweep with against=baseline omits an override."""
    if key == "task" or chooses_images(key) or key in REPEAT_KEYS:
        return False
    is_shared = any(is_below(key, pattern) for pattern in SHARED_BY_ARMS)
    return kind_of(key) is RECIPE and not is_shared


def is_placement(key: str) -> bool:
    """Return whether a key places the ranks."""
    return any(is_below(key, pattern) for pattern in PLACEMENT_KEYS)


def is_rate(name: str) -> bool:
    """Return whether an option of an optimizer is a learning rate."""
    return name == "lr" or name.endswith("_lr")
