"""Torchmetrics of the user: tried before training, and averaged without absent classes."""

import logging
import warnings
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision

from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)
log_once = cache(log.info)

OVER_PRESENT_CLASSES = (MulticlassAUROC, MulticlassAveragePrecision)  # their macro average takes an absent class as 0


def averaged_here(metrics: Mapping[str, Metric], num_classes: int) -> nn.ModuleDict:
    """Try metrics on made-up logits; let those whose macro average counts absent classes give a value per class.

    Raises:
        UserError: a class is no torchmetrics metric of logits and classes that gives one number.
    """
    for name, metric in metrics.items():
        try:
            metric.update(torch.eye(num_classes), torch.arange(num_classes))
            float(metric.compute())
            metric.reset()
        except Exception as error:  # whatever a class makes of what it was not made for
            raise UserError(
                f"metrics.{name} gives no number for logits (B, {num_classes}) and classes (B,) "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): take a multiclass metric of "
                "torchmetrics with an average."
            ) from error
        if isinstance(metric, OVER_PRESENT_CLASSES) and metric.average == "macro":
            metric.average = "none"
    return nn.ModuleDict(metrics)


def values_of(metrics: nn.ModuleDict, images_of_class: Tensor, stage: str) -> dict[str, float]:
    """Compute each metric, of one value per class the mean over the classes that have images; a collective.

    Args:
        images_of_class: (classes,) images of all ranks together.
    """
    present, values = images_of_class > 0, {}
    absent = ", ".join(map(str, (~present).nonzero().flatten().tolist()))
    for name, metric in metrics.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(No positive samples|No negative samples|was `nan`).*")
            value = metric.compute()
        if value.ndim and absent:
            log_once(f"{stage}/{name} leaves out classes {absent}, which have no image.")
        if not value.ndim or present.sum() > 1:  # of one class alone there is no such score
            values[f"{stage}/{name}"] = float(value[present].mean() if value.ndim else value)
    return values
