"""Keep a rank's next batches over a resume; sets Lightning's `_last_train_dl_reload_epoch`.

A DataLoader draws its order and its workers' seeds from the global generators when its iterator is
made, and Lightning has no hook at that moment. `LoaderState` therefore wraps three methods with
public names on the objects of one trainer:

- `strategy.process_dataloader`, the last call before the iterator of a fit's first epoch is made;
- `fit_loop.epoch_loop.on_run_start`, which makes the iterators of later epochs;
- `fit_loop.epoch_loop.val_loop.run`, where a validation begins.

tests/lockstep/checkpoints/test_loader_state.py fails where a release renames them.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

from lockstep.checkpoints.random_state import RandomState, random_state, set_random_state
from lockstep.checkpoints.resume_point import EPOCH_END, TRAINING, ResumePoint
from lockstep.process.errors import UserError
from lockstep.ranks.collectives import gather_for_checkpoint

log = logging.getLogger(__name__)


def loaders_in(collection: Any) -> list[Any]:
    """Return the loaders of a trainer's `train_dataloader` or `val_dataloaders`, or none."""
    if collection is None:
        return []
    return CombinedLoader(collection).flattened


def has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class LoaderState:
    """The states of a rank's training loaders and generators, now and when this epoch began.

    Attributes:
        random_before_epoch: the state before the iterator of this epoch was made.
        random_before_batches: the state before the first batch of this epoch was drawn.
        random_before_validation: the state before the latest validation.
        has_validated: whether a validation or sanity check has begun in any start of this run.
    """

    def __init__(self) -> None:
        self.random_before_epoch: RandomState | None = None
        self.random_before_batches: RandomState | None = None
        self.random_before_validation: RandomState | None = None
        self.has_validated = False
        self.must_start_val_workers = False
        self.point = ResumePoint(0, 0, TRAINING)
        self.stored_states: dict[str, Any] | None = None
        self.trainer: Any = None
        self.loaders_in_setup: list[Any] = []

    # These methods serve a run that saves.

    def attach(self, trainer: pl.Trainer) -> None:
        """Wrap the three methods of a trainer, once."""
        if self.trainer is trainer:
            return
        self.trainer = trainer
        epoch_loop = trainer.fit_loop.epoch_loop
        _wrap_method(trainer.strategy, "process_dataloader", self._process_loader)
        _wrap_method(epoch_loop, "on_run_start", self._start_epoch)
        _wrap_method(epoch_loop.val_loop, "run", self._run_validation)

    def state_dict(self, point: ResumePoint, *, is_before_validation: bool) -> dict[str, Any]:
        """Return the states of all ranks for a checkpoint at `point`.

        This is a collective unless fit has failed.

        Args:
            is_before_validation: store the random state before the latest validation, in place
                of the present one.
        """
        loaders = loaders_in(self.trainer.train_dataloader)
        current_state = self._random_state()
        if is_before_validation and self.random_before_validation is not None:
            current_state = self.random_before_validation
        replay = None
        if (
            point.phase != EPOCH_END
            and self.random_before_epoch
            and not all(map(has_state, loaders))
        ):
            replay = {
                "before_epoch": self.random_before_epoch,
                "before_batches": self.random_before_batches,
                # A step that is not complete is trained again from its first micro-batch.
                "batches": point.steps_done * self.trainer.accumulate_grad_batches
                - point.missing_micro_batches,
            }
        states = [loader.state_dict() for loader in loaders if has_state(loader)]
        ranks = gather_for_checkpoint((current_state, replay, states), self.trainer)
        random_states, replays, loader_states = zip(*ranks, strict=True)
        return {
            "random": list(random_states),
            "replay": list(replays),
            "loaders": list(loader_states),
            "has_validated": self.has_validated,
        }

    def log_resume_exactness(self) -> None:
        """Say on rank 0 how exact a resume is with the training loaders of this run."""
        if not self.trainer.is_global_zero:
            return
        loaders = loaders_in(self.trainer.train_dataloader)
        if any(map(self._is_cut_by_epoch, loaders)):
            log.info(
                "An epoch ends within a pass over a training loader that has a state_dict. Resume "
                "is exact if each epoch begins a new pass; a stream that goes on over epochs loses "
                "a batch in a resume at an epoch's end."
            )
        stateless = [loader for loader in loaders if not has_state(loader)]
        if stateless:
            self._log_stateless_loaders(stateless, loaders)

    def _is_cut_by_epoch(self, loader: Any) -> bool:
        """Return whether an epoch ends within a pass over a loader that is not Lockstep's."""
        length = sized_len(loader)
        if not length or self.trainer.num_training_batches % length == 0:
            return False
        return has_state(loader) and not is_lockstep_state(loader.state_dict())

    def _log_stateless_loaders(self, stateless: list[Any], loaders: list[Any]) -> None:
        """Say how exact a resume is if some of the training loaders have no state."""
        if len(stateless) < len(loaders):
            log.info(
                "Resume is exact at an epoch's end only: some of the training loaders have a "
                "state_dict, and some have none."
            )
        else:
            log.info(
                "Resume is exact: the training loader has no state_dict, so a resume in mid-epoch "
                "reads the first batches of the epoch again."
            )
        if any(getattr(loader, "persistent_workers", False) for loader in stateless):
            log.info(
                "Random numbers that persistent workers draw differ after a resume; the order of "
                "the samples does not."
            )
        if any(is_read_ahead(loader) for loader in stateless):
            log.info(
                "The training data have no length, so one batch is read ahead: its random numbers "
                "differ after a resume in mid-epoch, unless a worker draws them (num_workers=1)."
            )

    # These methods serve a run that resumes.

    def load_state_dict(self, point: ResumePoint, stored_states: dict[str, Any]) -> None:
        """Keep a checkpoint's states until this start makes its iterators."""
        self.point = point
        self.stored_states = stored_states
        self.has_validated = stored_states.get("has_validated", False)
        self.must_start_val_workers = self.has_validated
        if self._rank_part("replay") is not None:
            # Lightning does not know that the batches are read again.
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")

    def set_epoch_random_state(self) -> None:
        """Set the random state of an epoch's end, before hooks of the next epoch draw from it."""
        if self.stored_states is not None and self.point.phase == EPOCH_END:
            self._set_random_state(self._rank_part("random"))

    def _rank_part(self, name: str) -> Any:
        """Return this rank's part of the stored states; None if another number of ranks saved it.

        Args:
            name: random, replay or loaders.
        """
        assert self.stored_states is not None
        parts = self.stored_states.get(name) or []
        if len(parts) != self.trainer.world_size:
            return None
        return parts[self.trainer.global_rank]

    def _loader_states(self) -> list[Any]:
        """Return the states of this rank's loaders, or rank 0's if the number of ranks differs.

        The state of Lockstep's own loaders does not depend on the rank.
        """
        assert self.stored_states is not None
        if "loaders" in self.stored_states:
            return self._rank_part("loaders") or self.stored_states["loaders"][0]
        # Earlier versions stored the state of one loader.
        state = self.stored_states.get("loader")
        return [state] if state else []

    def _resume_iterator(self, fetcher: Any) -> None:
        """Make the iterator of this start's first epoch, with the state of a run without a stop."""
        loaders = fetcher.combined_loader.flattened
        stateful = [loader for loader in loaders if has_state(loader)]
        self.random_before_epoch = self.random_before_batches = None
        is_exact = all(hasattr(loader, "order_on_any_ranks") for loader in loaders)
        if self._rank_part("random") is None and not is_exact:
            self._warn_of_changed_ranks()

        if self.point.phase == EPOCH_END:
            self._begin_next_epoch(fetcher, stateful)
        else:
            self._continue_epoch(fetcher, stateful)
        self._keep_reload_phase()
        self.stored_states = None

    def _continue_epoch(self, fetcher: Any, stateful: list[Any]) -> None:
        replay = self._rank_part("replay")
        if stateful:
            self._load_loader_states(stateful)
            iter(fetcher)
        elif replay is not None and not self.point.is_last:
            self._replay(fetcher, replay)
        self._set_random_state(self._rank_part("random"))

    def _keep_reload_phase(self) -> None:
        """Reload the loaders in the epochs in which a run without a stop does.

        Lightning counts from the epoch of the resume.
        """
        interval = self.trainer.reload_dataloaders_every_n_epochs
        epoch = self.trainer.current_epoch
        if interval:
            self.trainer.fit_loop._last_train_dl_reload_epoch = epoch - epoch % interval

    def _load_loader_states(self, loaders: list[Any]) -> None:
        states = self._loader_states()
        if len(states) != len(loaders):
            raise UserError(
                f"The checkpoint holds the states of {len(states)} training loaders, and this run "
                f"has {len(loaders)} with a load_state_dict. Resume with the loaders that it had."
            )
        for loader, state in zip(loaders, states):
            if self.point.phase == EPOCH_END and is_lockstep_state(state):
                # The epoch may have been a part of the images (overfit_batches).
                state = {**state, "global_batches": 0}
            loader.load_state_dict(state)

    def _begin_next_epoch(self, fetcher: Any, stateful: list[Any]) -> None:
        current_state = self._random_state()
        if stateful:
            self._load_loader_states(stateful)
            if not all(map(is_lockstep_state, self._loader_states())):
                self._end_loaded_epoch(stateful)
            self._set_random_state(current_state)
        self.random_before_epoch = current_state
        iter(fetcher)

    def _end_loaded_epoch(self, stateful: list[Any]) -> None:
        """Move loaders with a state to where the next iter() begins the next epoch.

        A loaded state may be that of an epoch's end (torchdata's StatefulDataLoader): there iter()
        would make an epoch without batches. Or it may be that of the next epoch's start.
        """
        batches = self.trainer.num_training_batches
        for loader, state in zip(stateful, self._loader_states()):
            try:
                next(iter(loader))
            except StopIteration:
                continue
            length = sized_len(loader)
            if length is None or batches % length == 0:
                # The epoch was whole, so this batch is the first one of the next epoch.
                loader.load_state_dict(state)

    def _warn_of_changed_ranks(self) -> None:
        assert self.stored_states is not None
        if self.trainer.is_global_zero:
            log.warning(
                f"The checkpoint is from {len(self.stored_states['random'])} rank(s), and this "
                f"start has {self.trainer.world_size}: batches and random numbers differ from "
                "those of a run without a stop, because only the batches of Lockstep's own data "
                "modules do not depend on the ranks."
            )

    def _replay(self, fetcher: Any, replay: dict[str, Any]) -> None:
        """Draw the order of this epoch again, and skip the batches that were trained."""
        batches = replay["batches"]
        if self.trainer.is_global_zero:
            log.info(f"Reading the first {batches} batches of this epoch again …")
        if self.point.epoch == 0:
            # Workers that persist over epochs were started with this epoch's seeds.
            fetcher.combined_loader.reset()
        self._set_random_state(replay["before_epoch"])
        iter(fetcher)
        self._set_random_state(replay["before_batches"])
        self.random_before_epoch = replay["before_epoch"]
        self.random_before_batches = replay["before_batches"]

        # A training_step(dataloader_iter) draws from the wrapper.
        source = getattr(fetcher, "iterator_wrapper", fetcher)
        for number in range(batches):
            try:
                next(source)
            except StopIteration:
                raise UserError(
                    f"The training data end after {number} batches, and the checkpoint has trained "
                    f"{batches} of this epoch. Resume with the data and batch size that it had."
                ) from None
        # Lightning adds the batches of the checkpoint.
        fetcher.fetched = 0

    # These methods wrap those of the trainer.

    def _process_loader(self, original: Callable[[Any], Any], loader: Any) -> Any:
        loader = original(loader)
        if self.trainer.training:
            self.loaders_in_setup.append(loader)
            self.random_before_epoch = self._random_state(self.loaders_in_setup)
        return loader

    def _start_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        fit_loop = self.trainer.fit_loop
        is_restart = fit_loop.is_resuming or fit_loop.epoch_loop.restarting
        if self.stored_states is not None:
            self._resume_iterator(fetcher)
        elif self.trainer.current_epoch > 0 and not is_restart:
            # The original makes an iterator under these conditions.
            self.random_before_epoch = self._random_state()
            self.random_before_batches = None
        elif is_restart:
            # A checkpoint of another program does not say how this epoch began.
            self.random_before_epoch = None
        original(fetcher)
        self.loaders_in_setup = []
        if self.random_before_batches is None:
            self.random_before_batches = self._random_state()

    def _run_validation(self, original: Callable[[], Any]) -> Any:
        if not self.trainer.sanity_checking:
            self.random_before_validation = self._random_state()
            if self.must_start_val_workers:
                self._start_val_workers()
        self.has_validated = True
        return original()

    def _start_val_workers(self) -> None:
        """Start persistent workers, because a run without a stop starts them only once.

        It starts them in its first validation. Their start draws a random number.
        """
        self.must_start_val_workers = False
        self.trainer.fit_loop.epoch_loop.val_loop.setup_data()
        for loader in loaders_in(self.trainer.val_dataloaders):
            if getattr(loader, "persistent_workers", False):
                iter(loader)
        self._set_random_state(self.random_before_validation)

    # These methods read and set random states.

    def _generator_owners(self, train_loaders: list[Any] | None = None) -> dict[str, Any]:
        """Return the objects whose attributes may be generators."""
        trainer = self.trainer
        if train_loaders is None:
            train_loaders = loaders_in(trainer.train_dataloader)
        return {
            "train": train_loaders,
            "val": loaders_in(trainer.val_dataloaders),
            "module": trainer.lightning_module,
            "data": trainer.datamodule,
        }

    def _random_state(self, train_loaders: list[Any] | None = None) -> RandomState:
        return random_state(self._generator_owners(train_loaders), self._devices())

    def _set_random_state(self, state: RandomState | None) -> None:
        if state is not None:
            set_random_state(state, self._generator_owners(), self._devices())

    def _devices(self) -> Sequence[torch.device]:
        """Return the devices of a process that computes on several; none for other processes."""
        devices: Sequence[torch.device] = getattr(self.trainer.strategy, "process_devices", ())
        return devices


def is_read_ahead(loader: Any) -> bool:
    """Return whether Lightning reads one batch ahead in this process, drawing from its state."""
    return sized_len(loader) is None and getattr(loader, "num_workers", 0) == 0


def is_lockstep_state(state: Any) -> bool:
    """Return whether a loader's state counts global batches, as lockstep.data.batches does."""
    return isinstance(state, dict) and "global_batches" in state


def _wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper` in place of a method of one object, with the method as first argument."""
    setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))
