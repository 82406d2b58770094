"""The LightningModule: any net, an optimizer, a schedule; exact counts in evaluation.

Between log points nothing here reads a value from the device: losses and counts add up in tensors.
"""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.runs.hooks import TakesNamedParameters
from lockstep.training.parameter_groups import GroupRules, parameter_groups

TOP5_FROM_CLASSES = 6
FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)  # of torch 2.14's fused optimizers those that take DTensors


class Counts:
    """Sums of one evaluation on this rank, on the device.

    `sums` is float64 (4,): images, top-1 hits, top-5 hits, cross-entropy. Counts stay exact up to 2**53.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.confusion = torch.zeros(num_classes * num_classes, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """logits: (B, num_classes); labels: (B,) int64, -1 where the image is only padding."""
        real = labels >= 0
        loss = F.cross_entropy(logits.float(), labels, ignore_index=-1, reduction="sum")
        best = logits.topk(min(5, self.num_classes), dim=1).indices
        hits = (best == labels[:, None]) & real[:, None]
        self.sums += torch.stack([real.sum().double(), hits[:, 0].sum().double(), hits.sum().double(), loss.double()])
        cells = torch.where(real, labels * self.num_classes + best[:, 0], 0)
        self.confusion.index_add_(0, cells, real.double())


class ImageClassifier(pl.LightningModule):
    """Cross-entropy training of `net`; logs val/… and test/… exactly, each image counted once over all ranks.

    Args:
        net: (B, C, H, W) float → (B, num_classes) logits.
        optimizer: partial that takes the parameters (named ones where it has `takes_named_parameters`).
        rules: learning rates and weight decay of parts of the net; by default the optimizer's own for all.
        scheduler: partial called with (optimizer, total_steps=, steps_per_epoch=), stepped every optimizer step.
        label_smoothing: 0 to 1, in the training loss only.
        test_time_flip: evaluate on the mean logits of an image and its mirror image.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        *,
        num_classes: int,
        label_smoothing: float = 0.0,
        test_time_flip: bool = False,
        rules: GroupRules | None = None,
    ) -> None:
        super().__init__()
        self.rules = rules or GroupRules()
        self.net = net
        self.optimizer_factory, self.scheduler_factory = optimizer, scheduler
        self.num_classes, self.label_smoothing, self.test_time_flip = num_classes, label_smoothing, test_time_flip
        self.loss_sum: Tensor | None = None  # since the last log point; not a buffer: no checkpoint holds it
        self.losses_summed = 0
        self.counts: Counts | None = None
        self.test_confusion: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels, label_smoothing=self.label_smoothing)
        own = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))  # 16 bits would lose what is added
        self.loss_sum = own if self.loss_sum is None else self.loss_sum + own
        self.losses_summed += 1
        return loss

    def take_loss_sum(self) -> tuple[Tensor, int]:
        """The sum of the micro-batch losses since the last call, still on the device, and how many they were."""
        taken = (torch.zeros((), device=self.device) if self.loss_sum is None else self.loss_sum, self.losses_summed)
        self.loss_sum, self.losses_summed = None, 0
        return taken

    def on_validation_epoch_start(self) -> None:
        self.counts = Counts(self.num_classes, self.device)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        if self.test_time_flip:
            logits = (logits + self.net(images.flip(-1))) / 2
        self.counts.add(logits, labels)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._log_counts("val")

    def on_test_epoch_end(self) -> None:
        self._log_counts("test")
        confusion = self.trainer.strategy.reduce(self.counts.confusion, reduce_op="sum")
        self.test_confusion = confusion.view(self.num_classes, self.num_classes).long().cpu()

    def _log_counts(self, stage: str) -> None:
        """One collective and one host-device synchronisation per evaluation."""
        sums = self.trainer.strategy.reduce(self.counts.sums, reduce_op="sum")
        images, top1, top5, loss = sums.tolist()
        if images == 0:
            return
        values = {f"{stage}/acc": top1 / images, f"{stage}/loss": loss / images}
        if self.num_classes >= TOP5_FROM_CLASSES:
            values[f"{stage}/acc_top5"] = top5 / images
        values[f"{stage}/correct"], values[f"{stage}/images"] = top1, images
        doubles = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        self.log_dict(doubles, logger=False, on_step=False, on_epoch=True, rank_zero_only=False)

    def _kernel(self, parameters: list[nn.Parameter]) -> dict[str, bool]:
        """One kernel for all parameters where torch has it: fused, but not with scaled gradients, whose norm it hides;
        for shards foreach at least, as DTensors are dispatched one by one otherwise."""
        optimizer, stated = self.optimizer_factory.func, self.optimizer_factory.keywords.keys()
        options = inspect.signature(optimizer).parameters.keys()
        sharded = any(hasattr(parameter, "full_tensor") for parameter in parameters)
        if stated & {"fused", "foreach", "differentiable"}:
            return {}
        if (
            "fused" in options
            and self.trainer.precision != "16-mixed"
            and (not sharded or optimizer in FUSED_ON_SHARDS)
        ):
            return {"fused": True}
        return {"foreach": True} if sharded and "foreach" in options else {}

    def _learning_rate(self) -> float:
        """Stated, or the optimizer's default."""
        options = inspect.signature(self.optimizer_factory.func).parameters
        return float(self.optimizer_factory.keywords.get("lr", options["lr"].default))

    def configure_optimizers(self) -> Any:
        assert self.optimizer_factory is not None, "built for evaluation only"
        trainable = [(name.removeprefix("net."), p) for name, p in self.named_parameters() if p.requires_grad]
        parameters = [p for _, p in trainable]
        given: Any = parameters
        if isinstance(self.optimizer_factory.func, TakesNamedParameters):
            given = trainable
        elif self.rules != GroupRules():
            given = parameter_groups(self.net, trainable, self.rules, self._learning_rate())
        optimizer = self.optimizer_factory(given, **self._kernel(parameters))
        optimizer.register_load_state_dict_pre_hook(_keep_kernel)
        if self.scheduler_factory is None:
            return optimizer
        total_steps = int(self.trainer.estimated_stepping_batches)
        steps_per_epoch = max(1, int(self.trainer.num_training_batches) // self.trainer.accumulate_grad_batches)
        schedule = self.scheduler_factory(optimizer, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _keep_kernel(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's groups say which kernel its strategy used; this run's strategy may not be able to."""
    groups = [
        {**saved, **{name: own[name] for name in ("fused", "foreach") if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": groups}
