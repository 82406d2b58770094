"""Check that a checkpoint fits a module and its data, and load its weights for a new run."""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lockstep.checkpoints.load import Checkpoint
from lockstep.process.errors import UserError
from lockstep.process.output import join_names
from lockstep.records.config import Config, model_name
from lockstep.runs.run import Run
from lockstep.training.build_data import DataFacts, describe_pixel_change
from lockstep.training.parameter_groups import head_names
from lockstep.training.task import Task

log = logging.getLogger(__name__)

# An error lists at most this many names of classes.
SHOWN_CLASSES = 5


def facts_of(checkpoint: Checkpoint) -> DataFacts:
    """Return the facts about the training data in a checkpoint; {} if there are none."""
    lockstep_part = checkpoint.get("lockstep")
    if not isinstance(lockstep_part, dict):
        return {}
    return lockstep_part.get("data") or {}


def load_or_check_weights(
    module: pl.LightningModule, checkpoint: Checkpoint, facts: DataFacts, run: Run
) -> None:
    """Load the initial weights of a new run, or check the checkpoint of a resumed one.

    Lightning loads the weights of a resumed run later, in trainer.fit().

    Args:
        checkpoint: the content of run.checkpoint.
        facts: facts about the run's data.

    Raises:
        UserError: the checkpoint is of another model, or the run to resume was trained on other
            images.
    """
    if run.resume_step:
        check_resume_checkpoint(module, checkpoint, facts, run)
        return

    sentence = load_initial_weights(module, checkpoint, facts, run.config, run.checkpoint)
    if run.cluster.is_rank_zero:
        log.info(sentence)


def check_resume_checkpoint(
    module: pl.LightningModule, checkpoint: Checkpoint, facts: DataFacts, run: Run
) -> None:
    """Compare the checkpoint of the run to resume with its module and its data."""
    # Lightning loads a module that is no task, whose hooks may make layers before.
    if isinstance(module, Task):
        state = checkpoint["state_dict"]
        check_fits(module, state, run.checkpoint, model_name(run.config))
    if "data_hash" in facts:
        check_resume_data(checkpoint, facts, run.folder.run_id)


def check_fits(
    module: torch.nn.Module, state: dict[str, Tensor], path: str, model_name: str
) -> None:
    """Compare the names and the shapes of all weights before any is loaded.

    Raises:
        UserError: the checkpoint is of another model.
    """
    module_state = module.state_dict()
    for name in sorted(module_state.keys() | state.keys()):
        checkpoint_shape = _shape(state, name)
        module_shape = _shape(module_state, name)
        if checkpoint_shape != module_shape:
            raise UserError(
                f"The checkpoint {path} is of another model than model={model_name}: "
                f"{name} is {checkpoint_shape} there, {module_shape} here."
            )


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | str:
    return tuple(state[name].shape) if name in state else "missing"


def check_resume_data(checkpoint: Checkpoint, facts: DataFacts, run_id: str) -> None:
    """Refuse to resume a run with other images than it began with."""
    stored_facts = facts_of(checkpoint)
    facts_before = {**facts, **stored_facts}
    if facts_before["class_names"] != facts["class_names"]:
        names_before = _class_names(facts_before["class_names"])
        change = f"{names_before}, now {_class_names(facts['class_names'])}"
        raise _other_images_error(run_id, change)
    if facts_before["data_hash"] == facts["data_hash"]:
        _check_resume_pixels(stored_facts, facts, run_id)
    elif stored_facts.get("hash_method") == facts.get("hash_method"):
        change = f"hash {facts_before['data_hash']:.12}, now hash {facts['data_hash']:.12}"
        raise _other_images_error(run_id, change)
    elif rank_zero_only.rank == 0:
        log.info(
            "The run began with a version that hashed its images in another way: whether the "
            "images are the same is not checked."
        )


def _other_images_error(run_id: str, change: str) -> UserError:
    return UserError(
        f"The run {run_id} was trained on other images ({change}): give it the same data.root, or "
        "start a new run with ckpt_path=."
    )


def _check_resume_pixels(stored_facts: DataFacts, facts: DataFacts, run_id: str) -> None:
    """Refuse to resume a run whose files become other pixels than those it began with."""
    change = describe_pixel_change(stored_facts, facts)
    if change:
        raise UserError(
            f"The run {run_id} was trained on other pixels of the same files ({change}): resume it "
            "with the packages that it was started with, such as tifffile and pydicom."
        )


def load_initial_weights(
    module: pl.LightningModule,
    checkpoint: Checkpoint,
    facts: DataFacts,
    config: Config,
    path: str,
) -> str:
    """Load a checkpoint's weights into the module of a new run.

    The head follows the class names. If their order differs, its rows are reordered. For other
    classes it starts at zero, which gives each class the same logit. The same holds for a head
    that the task has beside the net. Position embeddings are resampled for another image size.
    Parameters outside the net are skipped if only one of the two modules has them.

    Args:
        facts: facts about the run's data.
        config: the config of the run.
        path: the path of the checkpoint.

    Returns:
        A sentence that says what was loaded.

    Raises:
        UserError: the checkpoint is of another model, and the error names the first parameter that
            differs. Or it took the numbers of data.inputs in another order.
    """
    _refuse_reordered_inputs(facts_of(checkpoint), facts)
    state = dict(checkpoint["state_dict"])
    initial = module.state_dict()
    net = getattr(module, "net", module)
    prefix = "net." if hasattr(module, "net") else ""

    notes = [f"Starting from the weights of {path}"]
    resampled = _resampled_positions(net, prefix, state)
    if resampled:
        state |= resampled
        notes.append("position embeddings resampled")

    head_of_net = {f"{prefix}{name}" for name in head_names(net)}
    # A task may join the features of the net to its classes in a head of its own.
    head_of_task = _names_beside_net(head_names(module), prefix)
    for names in (head_of_net, head_of_task):
        head = adapt_head(names, state, initial, facts_of(checkpoint), facts)
        state |= head.weights
        if head.note:
            notes.append(head.note)

    skipped = _names_beside_net(state, prefix) - initial.keys()
    if skipped:
        parts = sorted({name.split(".")[0] for name in skipped})
        notes.append(f"skipped {', '.join(parts)}, which this task lacks")
    state = {name: value for name, value in state.items() if name not in skipped}
    for name in _names_beside_net(initial, prefix):
        state.setdefault(name, initial[name])

    check_fits(module, state, path, model_name(config))
    module.load_state_dict(state)

    if _may_have_seen_evaluation_images(checkpoint, config["data"], facts):
        notes.append(
            "warning: the split differs, so the checkpoint may have seen "
            "this run's validation or test images"
        )
    return "; ".join(notes) + "."


def _refuse_reordered_inputs(stored_facts: DataFacts, facts: DataFacts) -> None:
    """Refuse weights that would take one number of data.inputs for another."""
    stored = list(stored_facts.get("inputs") or ())
    inputs = list(facts.get("inputs") or ())
    if stored != inputs and sorted(stored) == sorted(inputs):
        raise UserError(
            f"ckpt_path: the checkpoint takes data.inputs=[{','.join(stored)}] in this order, and "
            f"data.inputs=[{','.join(inputs)}] would exchange their weights. Give its order."
        )


def _names_beside_net(names: Iterable[str], prefix: str) -> set[str]:
    """Return the names of the parameters beside the net; none if the module itself is the net."""
    return {name for name in names if not name.startswith(prefix)}


def _resampled_positions(
    net: torch.nn.Module, prefix: str, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the net's weights with position embeddings for its image size; {} if they fit."""
    # A net that was written for version 2.1 or before defines `adapted`.
    adapt = getattr(net, "adapted", getattr(net, "adapt_to_image_size", None))
    if adapt is None:
        return {}
    net_state = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    adapted_state = adapt(net_state)
    if adapted_state is net_state:
        return {}
    return {f"{prefix}{name}": value for name, value in adapted_state.items()}


def _images_of_classes(facts: DataFacts) -> dict[str, int]:
    """Return the number of training images of each class by name; {} if it is not known."""
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
    # The hash differs by data.path, so it says nothing about the split.
    if counts_before != counts:
        return True
    keys = ("seed", "fold", "num_folds")
    return any(data_before.get(key) != data.get(key) for key in keys)


class AdaptedHead(NamedTuple):
    """The weights of a head that this run changes, and the reason; both may be empty."""

    weights: dict[str, Tensor]
    note: str = ""


def adapt_head(
    names: set[str],
    state: dict[str, Tensor],
    initial: dict[str, Tensor],
    stored_facts: DataFacts,
    facts: DataFacts,
) -> AdaptedHead:
    """Return the weights of a head that change because this run has other classes.

    If the checkpoint is of cat and dog, a run on dog and cat exchanges the rows of the head, and a
    run on cat and fox gets a new head.

    Args:
        names: the names of the head's weights.
        state: the checkpoint's weights.
        initial: the weights that the module was built with.
        stored_facts: about the checkpoint's data.
        facts: about this run's data.
    """
    classes = list(facts.get("class_names") or ())
    classes_before = list(stored_facts.get("class_names") or classes)
    saved = _weights_of_equal_width(names, state, initial)
    new = {name: _new_weight(initial[name], facts.get("num_classes")) for name in saved}

    if not saved or classes_before == classes or _are_features(new, classes):
        return _adapt_outputs(saved, new)
    if sorted(classes_before) == sorted(classes):
        order = [classes_before.index(name) for name in classes]
        reordered = {name: weight[order] for name, weight in saved.items()}
        return AdaptedHead(reordered, "the head's rows are in this run's order of classes")
    change = (
        f"the classes were {_class_names(classes_before)}, now {_class_names(classes) or 'none'}"
    )
    return AdaptedHead(new, f"the head is new ({', '.join(new)}): {change}")


def _are_features(weights: dict[str, Tensor], classes: list[str]) -> bool:
    """Return whether a head has another number of outputs than there are classes.

    Such outputs are features, which do not follow the classes.
    """
    return bool(classes) and any(len(weight) != len(classes) for weight in weights.values())


def _adapt_outputs(saved: dict[str, Tensor], new: dict[str, Tensor]) -> AdaptedHead:
    """Return new weights for those of a head that now have another number of outputs."""
    resized_names = [name for name, weight in saved.items() if len(weight) != len(new[name])]
    if not resized_names:
        return AdaptedHead({})
    change = f"it had {len(saved[resized_names[0]])} outputs, now {len(new[resized_names[0]])}"
    weights = {name: new[name] for name in resized_names}
    return AdaptedHead(weights, f"the head is new ({', '.join(resized_names)}): {change}")


def _weights_of_equal_width(
    names: set[str], state: dict[str, Tensor], initial: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the checkpoint's weights that have the module's shape, but perhaps other rows."""
    weights = {}
    for name in sorted(names & state.keys() & initial.keys()):
        weight = state[name]
        if weight.ndim and weight.shape[1:] == initial[name].shape[1:]:
            weights[name] = weight
    return weights


def _new_weight(initial: Tensor, num_classes: int | None) -> Tensor:
    """Return zeros, which give each class the same logit.

    Features keep their random values: zeros would never learn behind a ReLU.
    """
    if num_classes is not None and len(initial) != num_classes:
        return initial.clone()
    return torch.zeros_like(initial)


def _class_names(classes: list[str]) -> str:
    """Return the first names. If there are more, return their number too."""
    count = f" ({len(classes)})" if len(classes) > SHOWN_CLASSES else ""
    return f"{join_names(classes, SHOWN_CLASSES)}{count}"
