"""Read the name of a metric: its stage, the better direction, and how its values are shown."""

import re
from collections.abc import Iterable

# A lower value is better for metrics with these words in their names.
LOWER_IS_BETTER = {"mae", "mse", "rmse", "mape", "nll", "ece", "brier", "perplexity", "ppl", "fid"}
LOWER_IS_BETTER |= {"wer", "cer", "eer", "err", "nrmse", "rmsle", "msle", "smape", "medae", "bce"}
LOWER_IS_BETTER |= {"crossentropy", "hinge", "huber", "hamming", "hausdorff", "lpips"}
# With these words a lower value is nearly always better.
MOSTLY_LOWER_IS_BETTER = {"entropy", "kl", "distance", "divergence", "deviation"}
HIGHER_IS_BETTER = {"acc", "accuracy", "f1", "auc", "auroc", "map", "iou", "miou", "dice"}
HIGHER_IS_BETTER |= {"precision", "recall", "r2", "kappa", "psnr", "ssim"}
# The stage at the head of a metric's name, as projects write it.
STAGE = re.compile("(train(?:ing)?|val(?:id(?:ation)?)?|test(?:ing)?)([/_])")


def format_metric(name: str, value: float) -> str:
    """Return a metric as the terminal shows it: accuracies in percent."""
    if name.startswith(("val/acc", "test/acc")):
        return f"{value:.2%}"
    return f"{value:.4g}"


def split_stage(name: str) -> tuple[str, str]:
    """Return the stage and the metric of a name, as val and acc for `validation_acc`.

    The stage is train, val, test or "".
    """
    match = STAGE.match(name)
    if not match:
        return "", name
    stage = next(stage for stage in ("train", "val", "test") if match[1].startswith(stage))
    return stage, name[match.end() :]


def is_metric_of(stage: str, name: str) -> bool:
    """Return whether a metric belongs to a stage, val or test."""
    # The value_loss of reinforcement learning does not belong to validation.
    return name.startswith(stage) and not name.startswith("value")


def is_lower_better(metric: str) -> bool:
    """Return whether any word of a metric's name means a loss or an error, as in val_top1_err.

    It decides if no mode is given. `better_direction` checks a mode that is given.
    """
    name = metric.lower()
    if "loss" in name or "error" in name:
        return True
    return not (LOWER_IS_BETTER | MOSTLY_LOWER_IS_BETTER).isdisjoint(re.split("[^a-z]+", name))


def better_direction(metric: str) -> str | None:
    """Return "min" or "max" if the last word of a metric's name leaves no doubt, else None."""
    name = metric.lower().removesuffix("_epoch").removesuffix("_step")
    last = re.split("[^a-z0-9]+", name)[-1]
    if last in LOWER_IS_BETTER or last.endswith(("loss", "error")):
        return "min"
    return "max" if last in HIGHER_IS_BETTER else None


def metric_of_test(monitor: str, metrics: Iterable[str] = ()) -> str:
    """Return the test metric that corresponds to a monitored metric, as test/mae for val/mae.

    It is test/acc for a metric of training, as train/loss.

    Args:
        metrics: the logged names. If the same metric was logged in the test, its name is returned.
    """
    stage, metric = split_stage(monitor)
    for name in metrics:
        if split_stage(name) == ("test", metric):
            return name
    if stage == "val":
        return STAGE.sub(lambda match: f"test{match[2]}", monitor, count=1)
    return "test/acc"
