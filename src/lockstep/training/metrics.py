"""Torchmetrics of the user, tried before training.

Metrics that count an absent class as 0 are averaged without that class.
"""

import logging
import warnings
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
    MulticlassHingeLoss,
    MulticlassPrecisionRecallCurve,
)

from lockstep.process.errors import UserError

log = logging.getLogger(__name__)
log_once = cache(log.info)

# The macro average of these counts an absent class as 0.
COUNT_ABSENT_AS_ZERO = (MulticlassAUROC, MulticlassAveragePrecision)
# These mistake logits that all lie in [0, 1] for probabilities. AUROC and average precision
# are subclasses of the curve.
PROBABILITY_METRICS = (
    MulticlassPrecisionRecallCurve,
    MulticlassCalibrationError,
    MulticlassHingeLoss,
)
# torchmetrics warns of classes without images, which are left out below.
WARNINGS_OF_ABSENT_CLASSES = ".*(No positive samples|No negative samples|was `nan`).*"


def prepare_metrics(metrics: Mapping[str, Metric], num_classes: int) -> nn.ModuleDict:
    """Try metrics on made-up logits, and return them.

    A metric whose macro average counts absent classes gives a value for each class from here on.

    Raises:
        UserError: a metric does not give one number for logits and classes.
    """
    for name, metric in metrics.items():
        _try_metric(name, metric, num_classes)
        if isinstance(metric, COUNT_ABSENT_AS_ZERO) and metric.average == "macro":
            # torchmetrics reads it in `compute` alone.
            metric.average = "none"
    return nn.ModuleDict(metrics)


def _try_metric(name: str, metric: Metric, num_classes: int) -> None:
    # A class may raise anything on arguments that it was not made for.
    try:
        metric.update(torch.eye(num_classes), torch.arange(num_classes))
        float(metric.compute())
        metric.reset()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"metrics.{name} gives no number for logits (B, {num_classes}) and classes (B,) "
            f"({type(error).__name__}: {reason}): take a multiclass metric of "
            "torchmetrics with an average."
        ) from error


def update_metrics(metrics: nn.ModuleDict, logits: Tensor, labels: Tensor) -> None:
    """Add a batch of logits (B, classes) and classes (B,) to each metric."""
    for metric in metrics.values():
        scores = logits.softmax(1) if isinstance(metric, PROBABILITY_METRICS) else logits
        metric.update(scores, labels)


def compute_metrics(
    metrics: nn.ModuleDict, images_of_class: Tensor, stage: str
) -> dict[str, float]:
    """Compute each metric, averaged over the classes that have images; a collective.

    Args:
        images_of_class: (classes,) images of all ranks together.
    """
    is_present = images_of_class > 0
    absent_classes = ", ".join(map(str, (~is_present).nonzero().flatten().tolist()))

    values = {}
    for metric_name, metric in metrics.items():
        name = f"{stage}/{metric_name}"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", WARNINGS_OF_ABSENT_CLASSES)
            score = metric.compute()

        # Metrics with an average give one number, those of `prepare_metrics` one for each class.
        if score.ndim == 0:
            values[name] = float(score)
        elif is_present.sum() > 1:
            if absent_classes:
                log_once(f"{name} leaves out classes {absent_classes}, which have no image.")
            values[name] = float(score[is_present].mean())
        else:
            log_once(
                f"{name} has no value: it needs images of two classes, and classes "
                f"{absent_classes} have none."
            )
    return values
