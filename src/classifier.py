"""The LightningModule: any net, an optimizer, a schedule; exact counts in evaluation.

Between log points nothing here reads a value from the device: counts add up in tensors.
"""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.runs.scores import BINS, ExactCounts, summary
from lockstep.training.checks import check_logits
from lockstep.training.losses import losses_of_images, probabilities_of
from lockstep.training.metrics import averaged_here, values_of
from lockstep.training.parameter_groups import GroupRules, parameter_groups

TOP5_FROM_CLASSES = 6
FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)  # of torch 2.14's fused optimizers those that take DTensors


class Counts:
    """Sums of one evaluation on this rank, on the device, in float64: counts stay exact up to 2**53.

    sums: (4,) images, top-1 hits, top-5 hits, loss. confusion: (classes²,) true × predicted.
    calibration: (BINS, 3) images, hits and confidence of the images whose confidence is in the bin.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.confusion = torch.zeros(num_classes * num_classes, dtype=torch.float64, device=device)
        self.calibration = torch.zeros(BINS, 3, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor, probabilities: Tensor) -> None:
        """
        Args:
            logits, probabilities: (B, num_classes).
            labels: (B,) int64, -1 where the image is only padding.
            losses: (B,), whatever where it is padding.
        """
        real = labels >= 0
        best = logits.topk(min(5, self.num_classes), dim=1).indices
        hits = (best == labels[:, None]) & real[:, None]
        loss = torch.where(real, losses.double(), 0.0)
        self.sums += torch.stack([real.sum().double(), hits[:, 0].sum().double(), hits.sum().double(), loss.sum()])
        cells = torch.where(real, labels * self.num_classes + best[:, 0], 0)
        self.confusion.index_add_(0, cells, real.double())
        confidence = probabilities.amax(1).double()
        bins = (confidence * BINS).ceil().clamp(1, BINS)  # as torchmetrics: a bin holds its upper end
        is_in = (bins[:, None] == torch.arange(1, BINS + 1, device=bins.device)).double()
        self.calibration += is_in.T @ torch.stack([real.double(), hits[:, 0].double(), confidence * real], dim=1)


class ImageClassifier(pl.LightningModule):
    """Training of `net`; logs val/… and test/… exactly, each image counted once over all ranks.

    Args:
        net: (B, C, H, W) float → (B, num_classes) logits.
        optimizer: partial that takes the parameters (named ones where it has `takes_named_parameters`).
        rules: learning rates and weight decay of parts of the net; by default the optimizer's own for all.
        scheduler: partial called with (optimizer, total_steps=, steps_per_epoch=), stepped every optimizer step.
        loss: (logits (B, classes), classes (B,) or shares (B, classes)) → (B,) or their mean; None: cross-entropy.
        metrics: torchmetrics of the user's own by the name that they are logged with.
        label_smoothing: 0 to 1, in the training loss only; of the default loss (others have their own).
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
        loss: nn.Module | None = None,
        metrics: dict[str, Metric] | None = None,
    ) -> None:
        super().__init__()
        self.rules = rules or GroupRules()
        self.net = net
        self.optimizer_factory, self.scheduler_factory = optimizer, scheduler
        self.num_classes, self.test_time_flip = num_classes, test_time_flip
        self.loss = loss or nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.metrics = averaged_here(metrics or {})
        self.train_counts: Tensor | None = None  # (2,) hits and images of this epoch on this rank
        self.counts: Counts | None = None
        self.test_counts: ExactCounts | None = None

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self.net(images)
        check_logits(logits, self.num_classes)
        self._count_hits(logits.detach(), targets)
        return self.loss(logits, targets).mean()

    def _count_hits(self, logits: Tensor, targets: Tensor) -> None:
        """Of mixed images a hit is the class with the largest share."""
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        hits = (logits.argmax(1) == labels).sum()
        counts = torch.stack([hits, torch.full_like(hits, len(labels))])
        self.train_counts = counts if self.train_counts is None else self.train_counts + counts

    def take_train_counts(self) -> Tensor:
        """(2,) int64: hits and images of this rank since the last call, still on the device."""
        taken, self.train_counts = self.train_counts, None
        return torch.zeros(2, dtype=torch.int64, device=self.device) if taken is None else taken

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what all ranks have counted in this epoch; a collective."""
        if self.train_counts is not None:
            checkpoint["train_counts"] = self.trainer.strategy.reduce(self.train_counts, reduce_op="sum").tolist()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "train_counts" in checkpoint and self.trainer.is_global_zero:
            self.train_counts = torch.tensor(checkpoint["train_counts"], device=self.trainer.strategy.root_device)

    def on_validation_epoch_start(self) -> None:
        self.counts = Counts(self.num_classes, self.device)
        for metric in self.metrics.values():
            metric.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        check_logits(logits, self.num_classes)
        if self.test_time_flip:
            logits = (logits + self.net(images.flip(-1))) / 2
        losses = losses_of_images(self.loss, logits.float(), labels.clamp(min=0))
        self.counts.add(logits, labels, losses, probabilities_of(self.loss, logits.float()))
        for metric in self.metrics.values():
            metric.update(logits[labels >= 0], labels[labels >= 0])

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._log(self._counted("val"))

    def on_test_epoch_end(self) -> None:
        values, total = self._counted("test"), self.trainer.strategy.reduce
        confusion = total(self.counts.confusion, reduce_op="sum").view(self.num_classes, self.num_classes)
        self.test_counts = ExactCounts(
            confusion.long().tolist(), total(self.counts.calibration, reduce_op="sum").tolist()
        )
        scores = summary(self.test_counts.confusion, self.test_counts.calibration)
        self._log({**values, **{f"test/{name}": value for name, value in scores.items()}})

    def _counted(self, stage: str) -> dict[str, float]:
        """One collective and one host-device synchronisation per evaluation, beside those of `metrics`."""
        images, top1, top5, loss = self.trainer.strategy.reduce(self.counts.sums, reduce_op="sum").tolist()
        if images == 0:
            return {}
        values = {f"{stage}/acc": top1 / images, f"{stage}/loss": loss / images}
        if self.num_classes >= TOP5_FROM_CLASSES:
            values[f"{stage}/acc_top5"] = top5 / images
        if self.metrics:
            labels = self.counts.confusion.view(self.num_classes, self.num_classes).sum(1)
            values |= values_of(self.metrics, self.trainer.strategy.reduce(labels, reduce_op="sum"), stage)
        return {**values, f"{stage}/correct": top1, f"{stage}/images": images}

    def _log(self, values: dict[str, float]) -> None:
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
        if hasattr(self.optimizer_factory.func, "takes_named_parameters"):
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
