"""Check that a checkpoint fits a module and its data, and load its weights into the module of a new run."""

import logging

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.launch.plan import RunPlan
from lockstep.ranks.collectives import load_on_all_ranks
from lockstep.runs.config import Config, model_name
from lockstep.runs.errors import UserError
from lockstep.storage.load import Checkpoint
from lockstep.training.build_data import DataFacts
from lockstep.training.parameter_groups import head_names
from lockstep.training.task import Task

log = logging.getLogger(__name__)

SHOWN_CLASSES = 5


def facts_of(checkpoint: Checkpoint) -> DataFacts:
    """Return the facts about the training data in a checkpoint; {} if there are none."""
    own = checkpoint.get("lockstep")
    return own.get("data") or {} if isinstance(own, dict) else {}


def load_weights(module: pl.LightningModule, facts: DataFacts, plan: RunPlan) -> None:
    """Load the initial weights of a new run; of a resumed run check its checkpoint, which trainer.fit() loads later.

    Raises:
        UserError: the checkpoint is of another model, or the run to resume was trained on other images.
    """
    if plan.checkpoint and plan.resume_step:
        checkpoint = load_on_all_ranks(plan.checkpoint)
        if isinstance(module, Task):  # Lightning loads any other module, whose hooks may make layers first
            check_fits(module, checkpoint["state_dict"], plan.checkpoint, model_name(plan.config))
        if "data_hash" in facts:
            check_data_of_run(checkpoint, facts, plan.folder.run_id)
    elif plan.checkpoint:
        loaded = start_from(module, plan.checkpoint, model_name(plan.config), plan.config["data"], facts)
        if plan.cluster.is_rank_zero:
            log.info(loaded)


def check_fits(module: torch.nn.Module, found: dict[str, Tensor], path: str, model_name: str) -> None:
    """Compare keys and shapes before anything is loaded."""
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        here, there = (tuple(state[name].shape) if name in state else "missing" for state in (wanted, found))
        if here != there:
            raise UserError(
                f"The checkpoint {path} is of another model than model={model_name}: "
                f"{name} is {there} there, {here} here."
            )


def check_data_of_run(checkpoint: Checkpoint, facts: DataFacts, run_id: str) -> None:
    """Refuse to resume a run with other images than it began with."""
    there = {**facts, **facts_of(checkpoint)}
    for name, shown in (("class_names", _shown), ("data_hash", "hash {:.12}".format)):
        if there[name] != facts[name]:
            raise UserError(
                f"The run {run_id} was trained on other images ({shown(there[name])}, now {shown(facts[name])}): give "
                "it the same data.root and data.path, or start a new run with ckpt_path=."
            )


def start_from(module: pl.LightningModule, path: str, model_name: str, data: Config, facts: DataFacts) -> str:
    """Load a checkpoint's weights into the module of a new run.

    The head follows the class names: its rows are reordered if the order differs, and a head for other classes starts
    at zero, which gives each class the same logit. Position embeddings are resampled for another image size. Parameters
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
    own, found, before = module.state_dict(), dict(checkpoint["state_dict"]), facts_of(checkpoint)
    net, prefix = (module.net, "net.") if hasattr(module, "net") else (module, "")
    notes = [f"Starting from the weights of {path}"]
    if hasattr(net, "adapted"):
        of_net = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        if (adapted := net.adapted(of_net)) is not of_net:
            notes.append("position embeddings resampled")
            found.update({f"{prefix}{name}": value for name, value in adapted.items()})
    notes += _match_head({f"{prefix}{name}" for name in head_names(net)}, own, found, before, facts)
    skipped = [name for name in found if name not in own and not name.startswith(prefix)]
    if skipped:
        notes.append(f"skipped {', '.join(sorted({name.split('.')[0] for name in skipped}))}, which this task lacks")
    beside = {name: value for name, value in own.items() if not name.startswith(prefix)}
    found = {**beside, **{name: value for name, value in found.items() if name not in skipped}}
    check_fits(module, found, path, model_name)
    module.load_state_dict(found)
    then = ((checkpoint.get("lockstep") or {}).get("config") or {}).get("data") or {}
    is_other_split = any(then.get(key) != data.get(key) for key in ("seed", "fold", "num_folds"))
    is_other_split |= before.get("class_counts") != facts.get("class_counts")  # the hash differs by data.path
    if is_other_split and then.get("name") == data.get("name"):
        notes.append("it may have trained on images that validate or test here, because the split is another one")
    return "; ".join(notes) + "."


def _match_head(
    of_head: set[str], own: dict[str, Tensor], found: dict[str, Tensor], before: DataFacts, facts: DataFacts
) -> list[str]:
    """Change the rows of the head in `found` to this run's classes or outputs; return what was done."""
    here = list(facts.get("class_names") or ())
    there = list(before.get("class_names") or here)
    heads = [
        name for name in sorted(of_head & found.keys() & own.keys())
        if found[name].ndim and found[name].shape[1:] == own[name].shape[1:]
    ]  # fmt: skip
    if there != here and sorted(there) == sorted(here):
        order = [there.index(name) for name in here]
        found.update({name: found[name][order] for name in heads})
        return ["the head's rows are in this run's order of classes"]
    change = f"the classes were {_shown(there)}, now {_shown(here)}"
    if there == here:
        heads = [name for name in heads if len(found[name]) != len(own[name])]
        change = f"it had {len(found[heads[0]])} outputs, now {len(own[heads[0]])}" if heads else ""
    found.update({name: torch.zeros_like(own[name]) for name in heads})
    return [f"the head is new ({', '.join(heads)}): {change}"] if heads else []


def _shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_CLASSES]) + (f", … ({len(names)})" if len(names) > SHOWN_CLASSES else "")
