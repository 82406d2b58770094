"""Classification (task=classifier): one class for each image, with any net.

Evaluations count exactly. Between log points nothing here reads a value from the device: counts add
up in tensors.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.process.errors import UserError
from lockstep.training.metrics import compute_metrics, prepare_metrics, update_metrics
from lockstep.training.parameter_groups import GroupRules
from lockstep.training.task import Task

log = logging.getLogger(__name__)

TOP5_FROM_CLASSES = 6
# Classes with a confusion matrix: one of 21,841 classes would take 3.8 GB.
MOST_CONFUSED = 2000
SUSPICIOUS_FROM_IMAGES = 20  # that validate
BINS = 15  # of confidence, equally wide (Guo et al. 2017)


class Counts:
    """The counts of one evaluation on this rank, on the device, in float64: exact up to 2**53.

    Attributes:
        right, images, predicted: (classes,) images of each class that are recognised, that there
            are, and that were taken for it.
        calibration: (BINS, 3) images, hits and confidence of the images whose confidence is in the
            bin.
        confusion: (classes²,) true × predicted; None where it is not asked for.
    """

    def __init__(self, num_classes: int, device: torch.device, *, has_confusion: bool) -> None:
        self.num_classes = num_classes
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.right = zeros(num_classes)
        self.images = zeros(num_classes)
        self.predicted = zeros(num_classes)
        self.calibration = zeros(BINS, 3)
        self.confusion = zeros(num_classes * num_classes) if has_confusion else None

    def add(self, predicted: Tensor, labels: Tensor, probabilities: Tensor) -> None:
        """Add a batch.

        Args:
            predicted, labels: (B,) int64.
            probabilities: (B, num_classes).
        """
        hits = (predicted == labels).double()
        confidence = probabilities.amax(1).double()
        ones = torch.ones_like(hits)
        self.right.index_add_(0, labels, hits)
        self.images.index_add_(0, labels, ones)
        self.predicted.index_add_(0, predicted, ones)
        if self.confusion is not None:
            self.confusion.index_add_(0, labels * self.num_classes + predicted, ones)
        # A bin has its upper end, as in torchmetrics.
        bins = (confidence * BINS).ceil().clamp(1, BINS)
        is_in_bin = (bins[:, None] == torch.arange(1, BINS + 1, device=bins.device)).double()
        self.calibration += is_in_bin.T @ torch.stack([ones, hits, confidence], dim=1)


class ImageClassifier(Task):
    """Train `net`; log val/… and test/… exactly, each image counted once over all ranks.

    Args:
        net: (B, C, H, W) float → (B, num_classes) logits.
        loss: (logits (B, classes), classes (B,) or shares (B, classes)) → (B,) or their mean; None:
            cross-entropy.
        metrics: torchmetrics of the user's own by the name that they are logged with.
        label_smoothing: 0 to 1, in the training loss only; of the default loss (others have their
            own).
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
        if num_classes < 2:
            raise UserError(
                "The data have a single class, and a classifier needs two or more: let data.root= "
                "be the folder whose folders are the classes, or data.label_column= the column "
                "that tells them apart."
            )
        self.num_classes = num_classes
        self.test_time_flip = test_time_flip
        self.loss = loss or nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.metrics = prepare_metrics(metrics or {}, num_classes)
        self.counts: Counts | None = None
        # [true][predicted] images of the test, over all ranks
        self.test_confusion: list[list[int]] | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self.net(images)
        self.count_hits(logits, targets)
        return self.loss(logits, targets).mean()

    def count_hits(self, logits: Tensor, targets: Tensor) -> None:
        """Count the accuracy of a training step.

        Of a mixed image the class with the largest share is right.
        """
        check_logits(logits, self.num_classes)
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        self.count(acc=logits.argmax(1) == labels)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._start_counts(has_confusion=False)

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self._start_counts(has_confusion=self.num_classes <= MOST_CONFUSED)

    def _start_counts(self, *, has_confusion: bool) -> None:
        self.counts = Counts(self.num_classes, self.device, has_confusion=has_confusion)
        for metric in self.metrics.values():
            metric.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.predict_logits(images)
        top_classes = logits.topk(min(5, self.num_classes), dim=1).indices
        hits = top_classes == labels[:, None]
        losses = losses_of_images(self.loss, logits.float(), labels)
        probabilities = probabilities_of(self.loss, logits.float())
        self.count(acc=hits[:, 0], loss=losses)
        if self.num_classes >= TOP5_FROM_CLASSES:
            self.count(acc_top5=hits.any(1))
        self.counts.add(top_classes[:, 0], labels, probabilities)
        update_metrics(self.metrics, logits, labels)
        return {"losses": losses, "predictions": probabilities}

    test_step = validation_step

    def predict_logits(self, images: Tensor) -> Tensor:
        """Return (B, num_classes), with test_time_flip the mean over an image and its mirror."""
        logits = self.net(images)
        check_logits(logits, self.num_classes)
        if self.test_time_flip:
            logits = (logits + self.net(images.flip(-1))) / 2
        return logits

    def predict_step(self, batch: Tensor | tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return (B, num_classes) probabilities by the loss; with loss=bce their sum is not 1."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return probabilities_of(self.loss, self.predict_logits(images))

    def evaluation_values(self, stage: str) -> dict[str, float]:
        """Compute the metrics. A validation without `metrics` has one collective."""
        totals = self.pop_totals(stage)
        if not totals:
            # limit_test_batches=0
            return {}
        # A dry run counts no images.
        values = {name: total / max(number, 1.0) for name, (total, number) in totals.items()}
        values[f"{stage}/correct"], values[f"{stage}/images"] = totals[f"{stage}/acc"]
        if stage == "val":
            self._warn_of_first_epoch(values)
        if self.metrics:
            values |= compute_metrics(self.metrics, self._total(self.counts.images), stage)
        if stage == "test":
            values |= {f"test/{name}": score for name, score in self._test_scores().items()}
        return values

    def _total(self, counts: Tensor) -> Tensor:
        """Return the sum over the ranks; a collective that leaves `counts` as they are."""
        # Lightning's DDP sums in place, and some counts are read twice.
        return self.trainer.strategy.reduce(counts.clone(), reduce_op="sum")

    def _test_scores(self) -> dict[str, float]:
        counts = self.counts
        if counts.confusion is not None:
            confusion = self._total(counts.confusion).view(self.num_classes, self.num_classes)
            self.test_confusion = confusion.long().tolist()
        return scores_of_counts(
            self._total(counts.right),
            self._total(counts.images),
            self._total(counts.predicted),
            self._total(counts.calibration),
        )

    def _warn_of_first_epoch(self, values: dict[str, float]) -> None:
        """Warn of an accuracy that hardly any real data have after one epoch."""
        trainer = self.trainer
        is_first = trainer.state.fn == "fit" and trainer.current_epoch == 0
        is_perfect = values["val/correct"] == values["val/images"] >= SUSPICIOUS_FROM_IMAGES
        if self.num_classes < 3 or not is_first or not is_perfect:
            return
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        log.warning(
            f"val/acc is 100 % in the first epoch, on {self.num_classes} classes. If the images of "
            "a class come from one camera, scene or file format, a net need not see what they "
            "show: keep what belongs together in one split with data.group=."
        )


def scores_of(confusion: Tensor, calibration: Tensor) -> dict[str, float]:
    """Return the scores of a confusion matrix (classes, classes), true × predicted."""
    images = confusion.sum(1)
    return scores_of_counts(confusion.diagonal(), images, confusion.sum(0), calibration)


def scores_of_counts(
    right: Tensor, images: Tensor, predicted: Tensor, calibration: Tensor
) -> dict[str, float]:
    """Return f1_macro, balanced_acc and ece of exact counts, or nothing without images.

    f1_macro is the mean over the classes that occur or were predicted, balanced_acc the mean recall
    of those that occur, ece the expected calibration error: the mean distance of confidence and
    accuracy.

    Args:
        right, images, predicted: (classes,), as of Counts.
        calibration: (BINS, 3), as of Counts.
    """
    if not images.any():
        return {}
    return {
        "f1_macro": (2 * right / (images + predicted)).nanmean().item(),
        "balanced_acc": (right / images).nanmean().item(),
        "ece": ((calibration[:, 1] - calibration[:, 2]).abs().sum() / images.sum()).item(),
    }


def check_logits(logits: Any, num_classes: int) -> None:
    """Check that a net gives one number for each class and image.

    Raises:
        UserError: it gives something else.
    """
    if not isinstance(logits, Tensor):
        raise UserError(
            f"The model returns a {type(logits).__name__}: let its forward return the logits, one "
            f"tensor (images, {num_classes}), or compute a loss from the rest in a task of your "
            "own (docs/tasks.md)."
        )
    if logits.ndim != 2 or logits.shape[1] != num_classes:
        outputs = f"outputs of the shape {tuple(logits.shape[1:])}"
        if logits.ndim == 2:
            outputs = f"{logits.shape[1]} logits"
        raise UserError(
            f"The model gives {outputs} for an image and the data have {num_classes} classes: "
            "let its last layer have num_classes outputs; its constructor gets this number."
        )


def losses_of_images(
    loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor
) -> Tensor:
    """Return (B,), the loss of each image.

    A loss that returns the mean of a batch, as torch's and timm's, is computed for batches of one
    image. If it cannot, because it selects by a mask, each image counts with the mean of the batch.
    """
    losses = loss(logits, targets)
    if losses.ndim == 1:
        return losses

    def loss_of_image(row: Tensor, target: Tensor) -> Tensor:
        return loss(row[None], target[None])

    try:
        return torch.func.vmap(loss_of_image)(logits, targets)
    except RuntimeError:
        # vmap refuses shapes and branches that depend on values.
        _warn_of_batch_means(type(loss).__name__)
        return losses.expand(len(logits))


@rank_zero_only
@cache
def _warn_of_batch_means(name: str) -> None:
    log.warning(
        f"{name} has no loss of a single image, so val/loss and test/loss are means over batches: "
        "they depend on the batch size. Let it return one value for each image to have exact ones."
    )


def probabilities_of(loss: object, logits: Tensor) -> Tensor:
    """Return the probabilities (B, classes) of logits (B, classes) as the loss defines them."""
    return loss.probabilities(logits) if hasattr(loss, "probabilities") else logits.softmax(1)
