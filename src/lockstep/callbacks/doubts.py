"""Warn when a training begins of things that are probably not intended, once of each."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lockstep.checkpoints.loader_state import loaders_in
from lockstep.process.output import join_names
from lockstep.ranks.collectives import gather_objects, has_ranks

log = logging.getLogger(__name__)

NAMES_IN_WARNING = 3


class Doubts(pl.Callback):
    """Warn of parameters without an optimizer and of batches that are probably not meant.

    These are loaders that do not shuffle, that drop samples, that give all ranks the same ones, and
    evaluations that a limit keeps from whole classes. The first batch of each epoch checks the
    parameters, because a callback may unfreeze them.
    """

    def __init__(self) -> None:
        self.has_warned_of_parameters = False
        self.has_checked_training_loaders = False
        self.has_compared_ranks = False
        self.checked_evaluations: set[str] = set()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.has_compared_ranks:
            self.has_compared_ranks = True
            _warn_of_equal_batches(trainer, batch)
        if not trainer.is_global_zero or is_trial_run(trainer):
            return
        if batch_idx == 0 and not self.has_warned_of_parameters:
            self.has_warned_of_parameters = self._warn_of_parameters(trainer)
        if not self.has_checked_training_loaders:
            self.has_checked_training_loaders = True
            if any(map(never_shuffles, loaders_in(trainer.train_dataloader))):
                log.warning(
                    "The training loader does not shuffle: each epoch has the samples in the same "
                    "order. Pass shuffle=True to its DataLoader unless this order is meant."
                )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0 and trainer.global_step == 0 and trainer.is_global_zero:
            log.warning(
                "No optimizer step was counted in the first epoch, so that a resume would begin "
                "anew: Lightning counts the steps of self.optimizers()."
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_unlimited(trainer.limit_val_batches):
            self._warn_of_dropped_samples(trainer, "validation", trainer.val_dataloaders)
        elif not trainer.sanity_checking:
            self._warn_of_missing_classes(trainer, "val", sum(trainer.num_val_batches))

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_unlimited(trainer.limit_test_batches):
            self._warn_of_dropped_samples(trainer, "test", trainer.test_dataloaders)
        else:
            self._warn_of_missing_classes(trainer, "test", sum(trainer.num_test_batches))

    def _warn_of_parameters(self, trainer: pl.Trainer) -> bool:
        """Return whether parameters require a gradient that no optimizer uses, and name them."""
        names = parameters_without_optimizer(trainer)
        if not names:
            return False
        some_names = join_names(names, NAMES_IN_WARNING)
        log.warning(
            f"{len(names)} parameters require a gradient but are in no optimizer, and stay as they "
            f"are ({some_names}): return them in configure_optimizers, or set requires_grad=False."
        )
        return True

    def _warn_of_dropped_samples(self, trainer: pl.Trainer, kind: str, collection: Any) -> None:
        if kind in self.checked_evaluations or not trainer.is_global_zero or is_trial_run(trainer):
            return
        self.checked_evaluations.add(kind)
        samples = sum(map(dropped_samples, loaders_in(collection))) * trainer.world_size
        if samples:
            log.warning(
                f"The {kind} loader has drop_last=True and drops {samples} samples, the last "
                "batch: pass drop_last=False to its DataLoader."
            )

    def _warn_of_missing_classes(self, trainer: pl.Trainer, stage: str, batches: int) -> None:
        """Warn if a limit ends an evaluation of Lockstep's data before the last classes.

        Images in folders come class by class.
        """
        data = getattr(trainer, "datamodule", None)
        is_checked = stage in self.checked_evaluations or not trainer.is_global_zero
        if is_checked or is_trial_run(trainer) or not hasattr(data, "attach_to_ranks"):
            return
        self.checked_evaluations.add(stage)
        if data.target_kind != "class":
            return
        positions = getattr(data.splits, stage)
        largest = data.options.eval_batch_size * trainer.world_size
        whole = math.ceil(len(positions) / largest)
        count = math.ceil(len(positions) * batches / max(whole, 1))
        expected = len(np.unique(data.source.classes[positions]))
        reached = len(np.unique(data.source.classes[positions[:count]]))
        if reached < expected:
            log.warning(
                f"trainer.limit_{stage}_batches={getattr(trainer, f'limit_{stage}_batches')} takes "
                f"the first {count} of {len(positions)} images, which are of {reached} of "
                f"{expected} classes: the metrics say nothing of the others."
            )


def _warn_of_equal_batches(trainer: pl.Trainer, batch: Any) -> None:
    """Warn if ranks train on the same samples of a loader that Lightning cannot spread."""
    if not has_ranks() or hasattr(getattr(trainer, "datamodule", None), "attach_to_ranks"):
        return
    if is_trial_run(trainer) or all(map(is_spread, loaders_in(trainer.train_dataloader))):
        return
    values = [tensor.flatten()[:100].tolist() for tensor in tensors_in(batch)]
    values_of_ranks = gather_objects(values)
    is_equal = any(values_of_ranks[0] == other for other in values_of_ranks[1:])
    if values and is_equal and trainer.is_global_zero:
        log.warning(
            "Ranks train on the same samples: Lightning spreads neither a stream nor a loader that "
            "is no DataLoader. Take the share of torch.distributed.get_rank() there."
        )


def is_spread(loader: Any) -> bool:
    """Return whether Lightning can give each rank its own samples of a loader."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch of nested lists and dicts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from tensors_in(list(batch.values()))
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_in(part)


def is_trial_run(trainer: pl.Trainer) -> bool:
    """Return whether the trainer only tries the code, or overfits some batches on purpose."""
    return bool(trainer.fast_dev_run or trainer.overfit_batches)


def is_unlimited(limit: float) -> bool:
    """Return whether a limit of batches is the share 1.0; the integer 1 is a number of batches."""
    return isinstance(limit, float) and limit == 1.0


def parameters_without_optimizer(trainer: pl.Trainer) -> list[str]:
    """Return the parameters that require a gradient and are in none of the optimizers."""
    if not trainer.optimizers:
        return []
    updated_ids: set[int] = set()
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            updated_ids.update(map(id, group["params"]))
    return [
        name
        for name, parameter in trainer.lightning_module.named_parameters()
        if parameter.requires_grad and id(parameter) not in updated_ids
    ]


def never_shuffles(loader: Any) -> bool:
    """Return whether a DataLoader reads several batches of a map-style data set in their order.

    A sampler of the user's own class has an order of its own.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # A sampler need not have a length.
    length = sized_len(loader)
    if loader.batch_size is None or length is None or length < 2:
        return False
    sampler = loader.sampler
    if type(sampler) is DistributedSampler:
        return not sampler.shuffle
    return type(sampler) is SequentialSampler


def dropped_samples(loader: Any) -> int:
    """Return how many samples of this rank drop_last drops."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return 0
    if not loader.drop_last or loader.batch_size is None:
        return 0
    samples = sized_len(loader.sampler)
    return 0 if samples is None else samples % loader.batch_size
