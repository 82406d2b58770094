"""The direction of a metric, as its name tells it."""

import pytest

from lockstep.records.metric_names import is_lower_better


@pytest.mark.parametrize(
    "metric",
    [
        "val/loss",
        "val_loss",
        "val/loss_epoch",
        "val/rmse",
        "train/class_error",
        "val/nll",
        "fid",
        "val_top1_err",
        "val/cross_entropy",
        "val/hausdorff_distance",
        "val/NRMSE",
    ],
)
def test_losses_and_errors_are_better_when_lower(metric):
    assert is_lower_better(metric)


@pytest.mark.parametrize(
    "metric", ["val/acc", "val/f1_macro", "val/image_score", "precision", "val/kappa", "val/miou"]
)
def test_scores_are_better_when_higher(metric):
    assert not is_lower_better(metric)
