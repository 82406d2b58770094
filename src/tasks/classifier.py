"""Classification (task=classifier): one class for each image, with any net.

Evaluations count exactly. The counts add up in tensors, so that nothing here reads a value from the
device between log points.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lockstep.process.errors import UserError
from lockstep.training.metrics import compute_metrics, prepare_metrics, update_metrics
from lockstep.training.parameter_groups import GroupRules
from lockstep.training.task import Task

log = logging.getLogger(__name__)

TOP5_FROM_CLASSES = 6
# With more classes there is no confusion matrix. That of 21,841 classes would take 3.8 GB.
MAX_CLASSES_OF_CONFUSION = 2000
# An accuracy of 100 % is suspicious if at least so many images validate.
SUSPICIOUS_FROM_IMAGES = 20
# The number of equally wide bins of the confidence (Guo et al. 2017).
BINS = 15


class Counts:
    """The counts of one evaluation on this rank, in float64 on the device: exact up to 2**53.

    Attributes:
        right: (classes,) the correctly predicted images of each class.
        images: (classes,) all images of each class.
        predicted: (classes,) the images that are predicted as each class.
        calibration: (BINS, 3) the number of images with a confidence in the bin, the number of hits
            among them, and the sum of their confidences.
        confusion: (classes²,) true × predicted; None: it is not counted.
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
        # The upper end belongs to a bin, as in torchmetrics.
        bins = (confidence * BINS).ceil().clamp(1, BINS)
        is_in_bin = (bins[:, None] == torch.arange(1, BINS + 1, device=bins.device)).double()
        self.calibration += is_in_bin.T @ torch.stack([ones, hits, confidence], dim=1)


class TrainingSmoothing(nn.CrossEntropyLoss):
    """Cross-entropy that smooths labels in training alone, so that recipes are comparable."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)


class ImageClassifier(Task):
    """Train `net`. Log val/… and test/… exactly: each image counts once over all ranks.

    Args:
        net: a net from images (B, C, H, W) float to logits (B, num_classes).
        loss: a loss of logits (B, classes) and targets, which are classes (B,) or shares
            (B, classes). It returns (B,) or the mean. None: cross-entropy.
        metrics: the user's own torchmetrics by the names in the log.
        label_smoothing: 0 to 1, only in training and only in the default loss. Other losses have
            their own.
        test_time_flip: evaluate the mean logits of an image and its mirror image.
        optimizer, scheduler, rules: see Task.
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
        self.loss = loss or TrainingSmoothing(label_smoothing=label_smoothing)
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

        The right class of a mixed image is the one with the largest share.
        """
        check_logits(logits, self.num_classes)
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        self.count(acc=logits.argmax(1) == labels)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._start_counts(has_confusion=False)

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self._start_counts(has_confusion=self.num_classes <= MAX_CLASSES_OF_CONFUSION)

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
        """Return logits (B, num_classes), with test_time_flip the mean with the mirror image."""
        logits = self.net(images)
        check_logits(logits, self.num_classes)
        if self.test_time_flip:
            logits = (logits + self.net(images.flip(-1))) / 2
        return logits

    def predict_step(self, batch: Tensor | tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return probabilities by the loss, (B, num_classes). With loss=bce their sum is not 1."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return probabilities_of(self.loss, self.predict_logits(images))

    def evaluation_values(self, stage: str) -> dict[str, float]:
        """Compute the metrics. A validation without `metrics` needs one collective."""
        totals = self.pop_totals(stage)
        if not totals:
            # limit_test_batches=0
            return {}
        # The sums of a dry run are over no images.
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
        """Return the sum over the ranks. It is a collective, and `counts` do not change."""
        # Lightning's DDP would sum in place, and some counts are read twice.
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
        """Warn of an accuracy of 100 % after one epoch, which hardly any real data have."""
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
    """Return f1_macro, balanced_acc and ece of exact counts; {} without images.

    f1_macro is the mean F1 of the classes that occur or are predicted. balanced_acc is the mean
    recall of the classes that occur. ece is the expected calibration error, the mean distance of
    confidence and accuracy.

    Args:
        right, images, predicted: (classes,), see Counts.
        calibration: (BINS, 3), see Counts.
    """
    if not images.any():
        return {}
    return {
        "f1_macro": (2 * right / (images + predicted)).nanmean().item(),
        "balanced_acc": (right / images).nanmean().item(),
        "ece": ((calibration[:, 1] - calibration[:, 2]).abs().sum() / images.sum()).item(),
    }


def check_logits(logits: Any, num_classes: int) -> None:
    """Check that a net returns one number for each class and image.

    Raises:
        UserError: it returns something else.
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
    """Return the loss of each image, (B,).

    A loss that returns the mean of a batch, as those of torch and timm, is computed for batches of
    one image. If that is impossible, as for a loss that selects by a mask, each image gets the mean
    of the batch.
    """
    losses = loss(logits, targets)
    if losses.ndim == 1:
        return losses

    def loss_of_image(row: Tensor, target: Tensor) -> Tensor:
        return loss(row[None], target[None])

    try:
        return torch.func.vmap(loss_of_image)(logits, targets)
    except RuntimeError:
        # vmap refuses a loss whose shapes or branches depend on values.
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
    """Return the probabilities (B, classes) of logits (B, classes), as the loss defines them."""
    if hasattr(loss, "probabilities"):
        return loss.probabilities(logits)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(1)
