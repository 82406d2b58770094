"""The base class of a task: a LightningModule with the config's optimizer and schedule, and exact means."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.config.instantiate import options_of
from lockstep.runs.errors import UserError
from lockstep.training.parameter_groups import GroupRules, parameter_groups

FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)  # of torch 2.14's fused optimizers those that take DTensors


class Task(pl.LightningModule):
    """Train `net` by the config's optimizer and schedule.

    A subclass adds the steps. Its constructor may declare these parameters, which are passed by name: net,
    optimizer, rules, scheduler, loss, metrics, num_classes, class_names, image_size, channels. Its other parameters
    are options of its yaml.

    Args:
        net: any network; under FSDP the one that is sharded.
        optimizer: partial that takes the parameters (named ones where it has `takes_named_parameters`).
        scheduler: partial called with (optimizer, total_steps=, steps_per_epoch=), stepped every optimizer step.
        rules: learning rates and weight decay of parts of the net; by default the optimizer's own for all.
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
        if rules and rules != GroupRules() and optimizer and hasattr(optimizer.func, "takes_named_parameters"):
            raise UserError(
                f"{optimizer.func.__name__} groups the parameters itself: leave optimizer.layer_decay, head_lr_factor "
                "and decay_norms as they are, or choose another optimizer, e.g. adamw."
            )
        self.net, self.rules = net, rules or GroupRules()
        self.optimizer_factory, self.scheduler_factory = optimizer, scheduler
        self.length_of_schedule: int | None = None  # optimizer steps
        self.sums: dict[str, Tensor] = {}  # (2,) float64 by metric: sum and number of the values of this rank

    def forward(self, images: Tensor) -> Any:
        return self.net(images)

    # --- exact means

    def count(self, **values: Tensor) -> None:
        """Add to the exact means over all images and ranks, which are logged at the end of an epoch.

        `self.count(loss=losses, acc=hits)` gives train/loss and train/acc, val/loss … or test/loss … by the step that
        calls it. Nothing waits for the device. Every rank counts under the same names.

        Args:
            values: a tensor with one number for each image, or several (pixels).
        """
        stage = "train" if self.training else "test" if self.trainer.testing else "val"
        for metric, each in values.items():
            name, total = f"{stage}/{metric}", each.detach().sum(dtype=torch.float64)
            pair = torch.stack([total, torch.full_like(total, each.numel())])
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def take_sums(self, stage: str) -> dict[str, Tensor]:
        """Return (2,) float64 by metric, sum and number of this rank since the last call, still on the device."""
        names = sorted(name for name in self.sums if name.startswith(f"{stage}/"))
        return {name: self.sums.pop(name) for name in names}

    def totals(self, stage: str) -> dict[str, tuple[float, float]]:
        """Return sum and number over all ranks by metric: a collective and a host-device synchronisation."""
        if not (sums := self.take_sums(stage)):
            return {}
        summed = self.trainer.strategy.reduce(torch.stack([*sums.values()]), reduce_op="sum").tolist()
        return {name: (total, number) for name, (total, number) in zip(sums, summed, strict=True)}

    def epoch_means(self, stage: str) -> dict[str, float]:
        """Return the exact means since the last call; of "train" of the images as they were augmented."""
        return {name: total / number for name, (total, number) in self.totals(stage).items() if number}

    def log_exactly(self, values: dict[str, float]) -> None:
        """Log values that are equal on all ranks, in float64."""
        doubles = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        self.log_dict(doubles, logger=False, on_step=False, on_epoch=True, rank_zero_only=False)

    def on_validation_epoch_start(self) -> None:
        self.take_sums("val")  # of an evaluation that was cut short

    def evaluation_values(self, stage: str) -> dict[str, float]:
        """Return what the end of an evaluation logs, "val" or "test"; a subclass adds to the exact means."""
        return self.epoch_means(stage)

    def on_validation_epoch_end(self) -> None:
        self.log_exactly(self.evaluation_values("val"))

    def on_test_epoch_end(self) -> None:
        self.log_exactly(self.evaluation_values("test"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what all ranks have counted in this epoch; a collective."""
        names = sorted(name for name in self.sums if name.startswith("train/"))
        reduce = self.trainer.strategy.reduce
        checkpoint["train_sums"] = {name: reduce(self.sums[name].clone(), reduce_op="sum").tolist() for name in names}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, pair in (checkpoint.get("train_sums") or {}).items():
            found = torch.tensor(pair, dtype=torch.float64, device=self.trainer.strategy.root_device)
            self.sums[name] = found if self.trainer.is_global_zero else torch.zeros_like(found)

    # --- optimizer

    def configure_optimizers(self) -> Any:
        assert self.optimizer_factory is not None, "built for evaluation only"
        factory, options = self.optimizer_factory, inspect.signature(self.optimizer_factory.func).parameters
        trainable = [(name.removeprefix("net."), p) for name, p in self.named_parameters() if p.requires_grad]
        given: Any = [parameter for _, parameter in trainable]
        if hasattr(factory.func, "takes_named_parameters"):
            given = trainable
        elif self.rules != GroupRules():
            rate = float(factory.keywords["lr"] if "lr" in factory.keywords else options["lr"].default)
            given = parameter_groups(self.net, trainable, self.rules, rate)
        try:
            optimizer = factory(given, **self._kernel(options, any(hasattr(p, "full_tensor") for _, p in trainable)))
        except ValueError as error:  # as torch refuses a negative learning rate
            raise UserError(f"optimizer: {factory.func.__name__} refuses its options ({error}).") from None
        optimizer.register_load_state_dict_pre_hook(_keep_kernel)
        if self.scheduler_factory is None:
            return optimizer
        self.trainer.fit_loop.setup_data()  # Lightning does not where max_steps alone ends the training
        if (total_steps := self.trainer.estimated_stepping_batches) == math.inf:
            raise UserError("scheduler: the training has no length, give trainer.max_steps= or scheduler=none.")
        batches = min(self.trainer.num_training_batches, total_steps * self.trainer.accumulate_grad_batches)
        steps_per_epoch, total_steps = math.ceil(batches / self.trainer.accumulate_grad_batches), int(total_steps)
        lengths = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
        taken, any_name = options_of(self.scheduler_factory.func)
        known = {key: value for key, value in lengths.items() if any_name or key in taken}
        interval = "step" if known else "epoch"  # as torch's own schedules count
        schedule = self.scheduler_factory(optimizer, **known)
        self.length_of_schedule = known.get("total_steps")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    def on_train_start(self) -> None:
        """Refuse another length if the state of the schedule holds the old one, as OneCycleLR's."""
        for config in self.trainer.lr_scheduler_configs:
            length = getattr(config.scheduler, "total_steps", None)
            if length and self.length_of_schedule and length != self.length_of_schedule:
                raise UserError(
                    f"{type(config.scheduler).__name__} keeps the {length} steps that the run "
                    "began with: resume it with the same trainer.max_epochs and trainer.max_steps, or "
                    "start a new run with ckpt_path=."
                )

    def _kernel(self, options: Mapping[str, Any], is_sharded: bool) -> dict[str, bool]:
        """Return the option that gives one kernel for all parameters, where torch has it.

        fused, but not with scaled gradients, whose norm it hides. Shards take foreach at least, because DTensors are
        dispatched one by one otherwise.
        """
        factory = self.optimizer_factory
        if factory.keywords.keys() & {"fused", "foreach", "differentiable"}:
            return {}
        is_supported = self.trainer.precision != "16-mixed" and (not is_sharded or factory.func in FUSED_ON_SHARDS)
        if "fused" in options and is_supported:
            return {"fused": True}
        return {"foreach": True} if is_sharded and "foreach" in options else {}


def _keep_kernel(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Keep this run's kernel: a checkpoint's groups name the one that its strategy used."""
    groups = [
        {**saved, **{name: own[name] for name in ("fused", "foreach") if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": groups}
