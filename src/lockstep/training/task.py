"""The base class of a task: a LightningModule with the config's optimizer, and exact means."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from lockstep.config.instantiate import parameters_of
from lockstep.process.errors import UserError
from lockstep.training.parameter_groups import GroupRules, head_names, parameter_groups

# These fused optimizers of torch 2.14 take DTensors.
FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
# The options that choose the kernel of an optimizer of torch.
KERNEL_OPTIONS = ("fused", "foreach")


class Task(pl.LightningModule):
    """Train `net` by the config's optimizer and schedule.

    A subclass adds the steps. Its constructor may declare these parameters, which are passed by
    name: net, optimizer, rules, scheduler, loss, metrics, num_classes, class_names, image_size,
    channels. Its other parameters are options of its yaml.

    Args:
        net: any network; under FSDP the one that is sharded.
        optimizer: partial that takes the parameters (named ones where it has
            `takes_named_parameters`).
        scheduler: partial called with (optimizer, total_steps=, steps_per_epoch=), stepped every
            optimizer step.
        rules: learning rates and weight decay of parts of the net; by default the optimizer's own
            for all.

    Raises:
        UserError: rules for an optimizer that groups the parameters itself.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: partial[torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        rules: GroupRules | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.rules = rules or GroupRules()
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler
        # The metric of ReduceLROnPlateau. A run sets scheduler.monitor, or else task.monitor.
        self.monitor = "val/loss"
        # (2,) float64 by metric: sum and number of the values of this rank.
        self.sums: dict[str, Tensor] = {}

        if self.rules != GroupRules() and optimizer and _takes_named_parameters(optimizer):
            raise UserError(
                f"{optimizer.func.__name__} groups the parameters itself: leave "
                "optimizer.layer_decay, head_lr_factor and decay_norms as they are, "
                "or choose another optimizer, e.g. adamw."
            )

    def forward(self, images: Tensor) -> Any:
        return self.net(images)

    # --- exact means

    def count(self, **values: Tensor) -> None:
        """Add to the exact means over all images and ranks, which are logged at an epoch's end.

        `self.count(loss=losses, acc=hits)` gives train/loss and train/acc, val/loss … or test/loss
        … by the step that calls it. Nothing waits for the device. Every rank counts under the same
        names.

        Args:
            values: a tensor with one number for each image, or several (pixels).
        """
        stage = self._stage()
        for metric, numbers in values.items():
            name = f"{stage}/{metric}"
            total = numbers.detach().sum(dtype=torch.float64)
            pair = torch.stack([total, torch.full_like(total, numbers.numel())])
            if name in self.sums:
                pair = self.sums[name] + pair
            self.sums[name] = pair

    def _stage(self) -> str:
        if self.training:
            return "train"
        return "test" if self.trainer.testing else "val"

    def pop_sums(self, stage: str) -> dict[str, Tensor]:
        """Return sum and number of this rank by metric, since the last call.

        Each pair is a tensor (2,) float64 on the device.
        """
        return {name: self.sums.pop(name) for name in self._counted_names(stage)}

    def _counted_names(self, stage: str) -> list[str]:
        """Return the metrics counted in a stage, in the same order on every rank."""
        return sorted(name for name in self.sums if name.startswith(f"{stage}/"))

    def pop_totals(self, stage: str) -> dict[str, list[float]]:
        """Return sum and number over all ranks by metric, as {"val/loss": [12.5, 50.0]}.

        It is a collective and a host-device synchronisation, and it empties the sums.
        """
        return self._totals(self.pop_sums(stage))

    def _totals(self, sums: dict[str, Tensor]) -> dict[str, list[float]]:
        if not sums:
            return {}
        pairs = torch.stack([*sums.values()])
        # After an exception a rank may save without the others.
        if not self.trainer.interrupted:
            pairs = self.trainer.strategy.reduce(pairs, reduce_op="sum")
        return dict(zip(sums, pairs.tolist(), strict=True))

    def pop_epoch_means(self, stage: str) -> dict[str, float]:
        """Return the exact means since the last call, as {"val/loss": 0.25}; empty the sums.

        The means of "train" are those of the augmented images. It is a collective.
        """
        totals = self.pop_totals(stage)
        return {name: total / number for name, (total, number) in totals.items() if number}

    # Tasks that were written for earlier versions call these names.
    totals = pop_totals
    epoch_means = pop_epoch_means

    def log_exactly(self, values: dict[str, float]) -> None:
        """Log values that are equal on all ranks, in float64."""
        for name in values:
            # Lightning would recommend to average them over the ranks.
            message = rf".*recommended to use `self.log\('{re.escape(name)}'.*sync_dist=True.*"
            warnings.filterwarnings("ignore", message)
        doubles = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        self.log_dict(doubles, logger=False, on_step=False, on_epoch=True, rank_zero_only=False)

    def on_validation_epoch_start(self) -> None:
        # A validation or test that was cut short may have left its sums.
        for stage in ("val", "test"):
            self.pop_sums(stage)

    on_test_epoch_start = on_validation_epoch_start

    def evaluation_values(self, stage: str) -> dict[str, float]:
        """Return what the end of an evaluation logs, "val" or "test".

        A subclass adds to the exact means.
        """
        return self.pop_epoch_means(stage)

    def on_validation_epoch_end(self) -> None:
        self.log_exactly(self.evaluation_values("val"))

    def on_test_epoch_end(self) -> None:
        self.log_exactly(self.evaluation_values("test"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what all ranks have counted in this epoch; a collective unless fit has failed."""
        sums = {name: self.sums[name] for name in self._counted_names("train")}
        checkpoint["train_sums"] = self._totals(sums)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give rank 0 what all ranks had counted, if training resumes; the others begin at zero."""
        try:
            trainer = self.trainer
        except RuntimeError:
            # load_from_checkpoint has no trainer.
            return
        if trainer.state.fn != "fit":
            return
        for name, pair in (checkpoint.get("train_sums") or {}).items():
            device = trainer.strategy.root_device
            sums = torch.tensor(pair, dtype=torch.float64, device=device)
            if not trainer.is_global_zero:
                sums = torch.zeros_like(sums)
            self.sums[name] = sums

    # --- optimizer and schedule

    def configure_optimizers(self) -> Any:
        optimizer = self._build_optimizer()
        if self.scheduler_factory is None:
            return optimizer

        lengths = self._training_lengths()
        names, takes_any_name = parameters_of(self.scheduler_factory.func)
        arguments = {key: value for key, value in lengths.items() if takes_any_name or key in names}
        limits = _limits_of_groups(self.scheduler_factory, optimizer)
        schedule = self.scheduler_factory(optimizer, **arguments, **limits)
        # torch's own schedules take no lengths, and count epochs. A cycle counts steps.
        options: dict[str, Any] = {"scheduler": schedule}
        is_per_step = arguments or isinstance(schedule, CyclicLR)
        options["interval"] = "step" if is_per_step else "epoch"
        if isinstance(schedule, ReduceLROnPlateau):
            options["monitor"] = self.monitor
            if not self.monitor.startswith("train/"):
                # An epoch without a validation would count the value of an earlier one again.
                options["frequency"] = self.trainer.check_val_every_n_epoch or 1
        return {"optimizer": optimizer, "lr_scheduler": options}

    def _build_optimizer(self) -> torch.optim.Optimizer:
        factory = self.optimizer_factory
        assert factory is not None, "built for evaluation only"
        options = inspect.signature(factory.func).parameters
        trainable_parameters = [
            (name.removeprefix("net."), parameter)
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        ]

        parameters: Any
        if _takes_named_parameters(factory):
            parameters = trainable_parameters
        elif self.rules != GroupRules():
            keywords = factory.keywords
            lr = keywords["lr"] if "lr" in keywords else options["lr"].default
            parameters = self._group_parameters(trainable_parameters, float(lr))
        else:
            parameters = [parameter for _, parameter in trainable_parameters]

        is_sharded = any(hasattr(parameter, "full_tensor") for _, parameter in trainable_parameters)
        # torch raises ValueError, for example at a negative learning rate.
        try:
            optimizer = factory(parameters, **self._kernel_options(options, is_sharded))
        except ValueError as error:
            raise UserError(
                f"optimizer: {factory.func.__name__} refuses its options ({error})."
            ) from None
        optimizer.register_load_state_dict_pre_hook(_keep_kernel)
        return optimizer

    def _group_parameters(
        self, named_parameters: list[tuple[str, nn.Parameter]], lr: float
    ) -> list[dict[str, Any]]:
        # A task may join the features of the net to its classes in a head of its own.
        head_beside_net = {name for name in head_names(self) if not name.startswith("net.")}
        return parameter_groups(self.net, named_parameters, self.rules, lr, head_beside_net)

    def _training_lengths(self) -> dict[str, int]:
        """Return the numbers of optimizer steps of the whole training and of an epoch.

        Raises:
            UserError: the training has no end.
        """
        # Lightning does not set up the data where max_steps alone ends the training.
        self.trainer.fit_loop.setup_data()
        total_steps = self.trainer.estimated_stepping_batches
        if total_steps == math.inf:
            raise UserError(
                "scheduler: the training has no length, give trainer.max_steps= or scheduler=none."
            )

        accumulate = self.trainer.accumulate_grad_batches
        batches = self.trainer.num_training_batches
        if batches == math.inf:
            # Data without a length: the training is one epoch.
            batches = total_steps * accumulate
        return {"total_steps": int(total_steps), "steps_per_epoch": math.ceil(batches / accumulate)}

    def _kernel_options(self, options: Mapping[str, Any], is_sharded: bool) -> dict[str, bool]:
        """Return the option that gives one kernel for all parameters, where torch has it.

        It is `fused`, except for scaled gradients, whose norm it would hide. Shards that have no
        fused kernel take `foreach`, because DTensors are dispatched one by one otherwise.
        """
        factory = self.optimizer_factory
        if factory.keywords.keys() & {*KERNEL_OPTIONS, "differentiable"}:
            return {}

        has_fused = "fused" in options and self.trainer.precision != "16-mixed"
        if has_fused and (not is_sharded or factory.func in FUSED_ON_SHARDS):
            return {"fused": True}
        if is_sharded and "foreach" in options:
            return {"foreach": True}
        return {}


def _limits_of_groups(factory: partial[Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the limits of a cycle for each group of parameters, as layer decay scales them.

    torch gives every group the same limits where they are numbers.
    """
    scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
    if factory.func not in (OneCycleLR, CyclicLR) or set(scales) == {1.0}:
        return {}
    limits = {}
    for name in ("base_lr", "max_lr"):
        limit = factory.keywords.get(name)
        if isinstance(limit, int | float):
            limits[name] = [limit * scale for scale in scales]
    return limits


def _takes_named_parameters(optimizer: partial[torch.optim.Optimizer]) -> bool:
    return hasattr(optimizer.func, "takes_named_parameters")


def _keep_kernel(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Keep this run's kernel: a checkpoint's groups name the one that its strategy used."""
    groups = []
    for saved_group, current_group in zip(
        state["param_groups"], optimizer.param_groups, strict=True
    ):
        kernel = {name: current_group[name] for name in KERNEL_OPTIONS if name in current_group}
        groups.append({**saved_group, **kernel})
    return {**state, "param_groups": groups}
