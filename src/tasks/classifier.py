"""Classification (task=classifier): one class for each image, with any net; exact counts in evaluation.

Between log points nothing here reads a value from the device: counts add up in tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.runs.errors import UserError
from lockstep.training.metrics import averaged_here, values_of
from lockstep.training.parameter_groups import GroupRules
from lockstep.training.task import Task

TOP5_FROM_CLASSES = 6
BINS = 15  # of confidence, equally wide (Guo et al. 2017)


class Counts:
    """The counts of one evaluation on this rank, on the device, in float64: counts stay exact up to 2**53.

    confusion: (classes²,) true × predicted.
    calibration: (BINS, 3) images, hits and confidence of the images whose confidence is in the bin.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.confusion = torch.zeros(num_classes * num_classes, dtype=torch.float64, device=device)
        self.calibration = torch.zeros(BINS, 3, dtype=torch.float64, device=device)

    def add(self, predicted: Tensor, labels: Tensor, probabilities: Tensor) -> None:
        """
        Args:
            predicted, labels: (B,) int64.
            probabilities: (B, num_classes).
        """
        hits, confidence = (predicted == labels).double(), probabilities.amax(1).double()
        self.confusion.index_add_(0, labels * self.num_classes + predicted, torch.ones_like(hits))
        bins = (confidence * BINS).ceil().clamp(1, BINS)  # as torchmetrics: a bin holds its upper end
        is_in = (bins[:, None] == torch.arange(1, BINS + 1, device=bins.device)).double()
        self.calibration += is_in.T @ torch.stack([torch.ones_like(hits), hits, confidence], dim=1)


class ImageClassifier(Task):
    """Train `net`; log val/… and test/… exactly, each image counted once over all ranks.

    Args:
        net: (B, C, H, W) float → (B, num_classes) logits.
        loss: (logits (B, classes), classes (B,) or shares (B, classes)) → (B,) or their mean; None: cross-entropy.
        metrics: torchmetrics of the user's own by the name that they are logged with.
        label_smoothing: 0 to 1, in the training loss only; of the default loss (others have their own).
        test_time_flip: evaluate on the mean logits of an image and its mirror image.
        optimizer, scheduler, rules: as of Task.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: partial[torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        *,
        num_classes: int,
        label_smoothing: float = 0.0,
        test_time_flip: bool = False,
        loss: nn.Module | None = None,
        metrics: dict[str, Metric] | None = None,
        rules: GroupRules | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler, rules)
        self.num_classes, self.test_time_flip = num_classes, test_time_flip
        self.loss = loss or nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.metrics = averaged_here(metrics or {}, num_classes)
        self.counts: Counts | None = None
        self.test_confusion: list[list[int]] | None = None  # [true][predicted] images of the test, over all ranks

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self.net(images)
        self.count_hits(logits, targets)
        return self.loss(logits, targets).mean()

    def count_hits(self, logits: Tensor, targets: Tensor) -> None:
        """Count the accuracy of a training step; of a mixed image the class with the largest share is right."""
        check_logits(logits, self.num_classes)
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        self.count(acc=logits.argmax(1) == labels)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.counts = Counts(self.num_classes, self.device)
        for metric in self.metrics.values():
            metric.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.predict_logits(images)
        best = logits.topk(min(5, self.num_classes), dim=1).indices
        hits = best == labels[:, None]
        self.count(acc=hits[:, 0], loss=losses_of_images(self.loss, logits.float(), labels))
        if self.num_classes >= TOP5_FROM_CLASSES:
            self.count(acc_top5=hits.any(1))
        self.counts.add(best[:, 0], labels, probabilities_of(self.loss, logits.float()))
        for metric in self.metrics.values():
            metric.update(logits, labels)

    test_step = validation_step

    def predict_logits(self, images: Tensor) -> Tensor:
        """Return (B, num_classes), with test_time_flip the mean over an image and its mirror image."""
        logits = self.net(images)
        check_logits(logits, self.num_classes)
        return (logits + self.net(images.flip(-1))) / 2 if self.test_time_flip else logits

    def predict_step(self, batch: Tensor | tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return (B, num_classes) probabilities by the loss; with loss=bce their sum is not 1."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return probabilities_of(self.loss, self.predict_logits(images))

    def evaluation_values(self, stage: str) -> dict[str, float]:
        """Compute the metrics; a validation without `metrics` has one collective and one synchronisation."""
        if not (totals := self.totals(stage)):  # limit_test_batches=0
            return {}
        values = {name: total / max(number, 1.0) for name, (total, number) in totals.items()}  # a dry run counts 0
        values[f"{stage}/correct"], values[f"{stage}/images"] = totals[f"{stage}/acc"]
        if self.metrics or stage == "test":
            total = self.trainer.strategy.reduce
            confusion = total(self.counts.confusion, reduce_op="sum").view(self.num_classes, self.num_classes)
            values |= values_of(self.metrics, confusion.sum(1), stage)
        if stage == "test":
            self.test_confusion = confusion.long().tolist()
            scores = scores_of(confusion, total(self.counts.calibration, reduce_op="sum"))
            values |= {f"test/{name}": value for name, value in scores.items()}
        return values


def scores_of(confusion: Tensor, calibration: Tensor) -> dict[str, float]:
    """Return f1_macro, balanced_acc and ece of exact counts, or nothing without images.

    f1_macro is the mean over the classes that occur or were predicted, balanced_acc the mean recall of those that
    occur, ece the expected calibration error: the mean distance of confidence and accuracy.

    Args:
        confusion: (classes, classes) true × predicted.
        calibration: (BINS, 3), as of Counts.
    """
    right, images, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    if not images.any():
        return {}
    return {
        "f1_macro": (2 * right / (images + predicted)).nanmean().item(),
        "balanced_acc": (right / images).nanmean().item(),
        "ece": ((calibration[:, 1] - calibration[:, 2]).abs().sum() / images.sum()).item(),
    }


def check_logits(logits: Any, num_classes: int) -> None:
    """
    Raises:
        UserError: the net does not give one number for each class and image.
    """
    if not isinstance(logits, Tensor):
        raise UserError(
            f"The model returns a {type(logits).__name__}: let its forward return the logits, one tensor (images, "
            f"{num_classes}), or compute a loss from the rest in a task of your own (docs/tasks.md)."
        )
    if logits.ndim != 2 or logits.shape[1] != num_classes:
        found = f"{logits.shape[1]} logits" if logits.ndim == 2 else f"outputs of the shape {tuple(logits.shape[1:])}"
        raise UserError(
            f"The model gives {found} for an image and the data have {num_classes} classes: "
            "let its last layer have num_classes outputs; its constructor gets this number."
        )


def losses_of_images(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> Tensor:
    """Return (B,), also of a loss that returns the mean of a batch, as torch's and timm's: by batches of one image."""
    if (found := loss(logits, targets)).ndim == 1:
        return found
    return torch.func.vmap(lambda row, target: loss(row[None], target[None]))(logits, targets)


def probabilities_of(loss: object, logits: Tensor) -> Tensor:
    """Return (B, classes), as the loss understands logits (B, classes)."""
    return loss.probabilities(logits) if hasattr(loss, "probabilities") else logits.softmax(1)
