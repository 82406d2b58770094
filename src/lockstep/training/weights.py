"""Check that a checkpoint fits a module and its data, and load its weights for a new run."""

import logging
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lockstep.checkpoints.load import Checkpoint, load_on_all_ranks
from lockstep.process.errors import UserError
from lockstep.process.output import join_names
from lockstep.records.config import Config, model_name
from lockstep.runs.run import Run
from lockstep.training.build_data import DataFacts, other_pixels
from lockstep.training.parameter_groups import head_names
from lockstep.training.task import Task

log = logging.getLogger(__name__)

# An error lists at most this many names of classes.
SHOWN_CLASSES = 5


def facts_of(checkpoint: Checkpoint) -> DataFacts:
    """Return the facts about the training data in a checkpoint; {} if there are none."""
    of_lockstep = checkpoint.get("lockstep")
    if not isinstance(of_lockstep, dict):
        return {}
    return of_lockstep.get("data") or {}


def load_weights(module: pl.LightningModule, facts: DataFacts, run: Run) -> None:
    """Load the initial weights of a new run.

    Of a resumed run only check its checkpoint, which trainer.fit() loads later.

    Raises:
        UserError: the checkpoint is of another model, or the run to resume was trained on other
            images.
    """
    if not run.checkpoint:
        return
    if run.resume_step:
        check_resumed(module, facts, run)
        return

    loaded = start_from(module, run.checkpoint, model_name(run.config), run.config["data"], facts)
    if run.cluster.is_rank_zero:
        log.info(loaded)


def check_resumed(module: pl.LightningModule, facts: DataFacts, run: Run) -> None:
    """Compare the checkpoint of the run to resume with its module and its data."""
    checkpoint = load_on_all_ranks(run.checkpoint)
    # Lightning loads any module but a task. Its hooks may make layers first.
    if isinstance(module, Task):
        state = checkpoint["state_dict"]
        check_fits(module, state, run.checkpoint, model_name(run.config))
    if "data_hash" in facts:
        check_data_of_run(checkpoint, facts, run.folder.run_id)


def check_fits(
    module: torch.nn.Module, state: dict[str, Tensor], path: str, model_name: str
) -> None:
    """Compare keys and shapes before anything is loaded."""
    module_state = module.state_dict()
    for name in sorted(module_state.keys() | state.keys()):
        in_checkpoint = _shape(state, name)
        in_module = _shape(module_state, name)
        if in_checkpoint != in_module:
            raise UserError(
                f"The checkpoint {path} is of another model than model={model_name}: "
                f"{name} is {in_checkpoint} there, {in_module} here."
            )


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | str:
    return tuple(state[name].shape) if name in state else "missing"


def check_data_of_run(checkpoint: Checkpoint, facts: DataFacts, run_id: str) -> None:
    """Refuse to resume a run with other images than it began with."""
    stored = facts_of(checkpoint)
    before = {**facts, **stored}
    if before["class_names"] != facts["class_names"]:
        change = f"{_class_names(before['class_names'])}, now {_class_names(facts['class_names'])}"
        raise _other_images(run_id, change)
    if before["data_hash"] == facts["data_hash"]:
        _check_pixels_of_run(stored, facts, run_id)
    elif stored.get("hash_method") == facts.get("hash_method"):
        change = f"hash {before['data_hash']:.12}, now hash {facts['data_hash']:.12}"
        raise _other_images(run_id, change)
    elif rank_zero_only.rank == 0:
        log.info(
            "The run began with a version that hashed its images in another way: whether the "
            "images are the same is not checked."
        )


def _other_images(run_id: str, change: str) -> UserError:
    return UserError(
        f"The run {run_id} was trained on other images ({change}): give it the same data.root, or "
        "start a new run with ckpt_path=."
    )


def _check_pixels_of_run(stored: DataFacts, facts: DataFacts, run_id: str) -> None:
    """Refuse to resume a run whose files become other pixels than those it began with."""
    change = other_pixels(stored, facts)
    if change:
        raise UserError(
            f"The run {run_id} was trained on other pixels of the same files ({change}): resume it "
            "with the packages that it was started with, such as tifffile and pydicom."
        )


def start_from(
    module: pl.LightningModule, path: str, model_name: str, data: Config, facts: DataFacts
) -> str:
    """Load a checkpoint's weights into the module of a new run.

    The head follows the class names: its rows are reordered if the order differs, and a head for
    other classes starts at zero, which gives each class the same logit. So does a head that the
    task has beside the net. Position embeddings are resampled for another image size. Parameters
    outside the net that only one of the two modules has are skipped.

    Args:
        data: the run's data config.
        facts: of the run's data.

    Returns:
        A sentence that says what was loaded.

    Raises:
        UserError: the checkpoint is of another model; names the first parameter that differs.
    """
    checkpoint = load_on_all_ranks(path)
    before = facts_of(checkpoint)
    state = dict(checkpoint["state_dict"])
    module_state = module.state_dict()
    has_net = hasattr(module, "net")
    net = module.net if has_net else module
    prefix = "net." if has_net else ""

    notes = [f"Starting from the weights of {path}"]
    notes += _adapt_net(net, prefix, state)
    names_of_head = {f"{prefix}{name}" for name in head_names(net)}
    notes += _match_head(names_of_head, module_state, state, before, facts)
    # A task may join the features of the net to its classes in a head of its own.
    names_beside_net = {name for name in head_names(module) if not name.startswith(prefix)}
    notes += _match_head(names_beside_net, module_state, state, before, facts)
    notes += _match_parts_beside_net(prefix, module_state, state)

    check_fits(module, state, path, model_name)
    module.load_state_dict(state)

    if _may_have_seen_evaluation_images(checkpoint, data, facts):
        notes.append(
            "warning: the split differs, so the checkpoint may have seen "
            "this run's validation or test images"
        )
    return "; ".join(notes) + "."


def _adapt_net(net: torch.nn.Module, prefix: str, state: dict[str, Tensor]) -> list[str]:
    """Let the net change its part of `state` to its image size; return what was done."""
    if not hasattr(net, "adapted"):
        return []

    net_state = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    adapted = net.adapted(net_state)
    if adapted is net_state:
        return []
    for name, value in adapted.items():
        state[f"{prefix}{name}"] = value
    return ["position embeddings resampled"]


def _match_parts_beside_net(
    prefix: str, module_state: dict[str, Tensor], state: dict[str, Tensor]
) -> list[str]:
    """Remove what this task lacks beside the net from `state`, and add what is new; say so."""
    skipped = [name for name in state if name not in module_state and not name.startswith(prefix)]
    for name in skipped:
        del state[name]
    for name, value in module_state.items():
        if not name.startswith(prefix):
            state.setdefault(name, value)

    if not skipped:
        return []
    parts = sorted({name.split(".")[0] for name in skipped})
    return [f"skipped {', '.join(parts)}, which this task lacks"]


def _images_of_classes(facts: DataFacts) -> dict[str, int]:
    """Return the number of training images of each class by its name; nothing if unknown."""
    return dict(zip(facts.get("class_names") or (), facts.get("class_counts") or (), strict=False))


def _may_have_seen_evaluation_images(
    checkpoint: Checkpoint, data: Config, facts: DataFacts
) -> bool:
    """Return whether the checkpoint was trained on the same data, split in another way."""
    config_before = (checkpoint.get("lockstep") or {}).get("config") or {}
    data_before = config_before.get("data") or {}
    if data_before.get("name") != data.get("name"):
        return False

    facts_before = facts_of(checkpoint)
    counts_before = _images_of_classes(facts_before)
    counts = _images_of_classes(facts)
    if counts_before and counts_before.keys() != counts.keys():
        # Folders of one `data.name` may hold other data.
        return False
    # The hash says nothing about the split, as it differs by data.path.
    if counts_before != counts:
        return True
    keys = ("seed", "fold", "num_folds")
    return any(data_before.get(key) != data.get(key) for key in keys)


@dataclass
class HeadWeights:
    """The weights of a head in a checkpoint, which its methods change, and those of the module.

    Args:
        names: of the weights that differ at most in their number of rows.
        saved: the checkpoint's weights of the whole module.
        initial: the module's own.
        num_classes: of this run's data; None if they say none.
    """

    names: list[str]
    saved: dict[str, Tensor]
    initial: dict[str, Tensor]
    num_classes: int | None

    def reorder(self, order: list[int]) -> list[str]:
        for name in self.names:
            self.saved[name] = self.saved[name][order]
        return ["the head's rows are in this run's order of classes"]

    def match_outputs(self) -> list[str]:
        """Begin the head anew if the same classes have another number of outputs."""
        resized = [name for name in self.names if len(self.saved[name]) != len(self.initial[name])]
        if not resized:
            return []
        before = len(self.saved[resized[0]])
        now = len(self.initial[resized[0]])
        return self.reset(resized, f"it had {before} outputs, now {now}")

    def reset(self, names: list[str], change: str) -> list[str]:
        """Begin these weights anew; return what has changed.

        Zeros give each class the same logit. Features keep their random values: zeros would never
        learn behind a ReLU.
        """
        for name in names:
            fresh = self.initial[name]
            are_features = self.num_classes is not None and len(fresh) != self.num_classes
            self.saved[name] = fresh.clone() if are_features else torch.zeros_like(fresh)
        if not names:
            return []
        return [f"the head is new ({', '.join(names)}): {change}"]


def _match_head(
    names_of_head: set[str],
    module_state: dict[str, Tensor],
    state: dict[str, Tensor],
    before: DataFacts,
    facts: DataFacts,
) -> list[str]:
    """Change the head's rows in `state` to this run's classes or outputs; return what was done."""
    classes = list(facts.get("class_names") or ())
    classes_before = list(before.get("class_names") or classes)
    names = [
        name
        for name in sorted(names_of_head & state.keys() & module_state.keys())
        if state[name].ndim and state[name].shape[1:] == module_state[name].shape[1:]
    ]
    head = HeadWeights(names, state, module_state, facts.get("num_classes"))

    sizes = {len(module_state[name]) for name in names}
    # Outputs of another number are features.
    if classes_before == classes or (classes and sizes != {len(classes)}):
        return head.match_outputs()
    if sorted(classes_before) == sorted(classes):
        return head.reorder([classes_before.index(name) for name in classes])
    change = f"the classes were {_class_names(classes_before)}, now {_class_names(classes)}"
    return head.reset(names, change)


def _class_names(classes: list[str]) -> str:
    """Return the first names, and how many there are if not all of them are named."""
    count = f" ({len(classes)})" if len(classes) > SHOWN_CLASSES else ""
    return f"{join_names(classes, SHOWN_CLASSES)}{count}"
