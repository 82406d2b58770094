"""Show what is logged: plain lines on stdout, warnings and errors on stderr."""

import io
import logging
import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO

from lockstep.process.errors import is_full
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact_text

# Metrics of which the lower one is better, as words of a name. Others are scores.
ERRORS = {"mae", "mse", "rmse", "mape", "nll", "ece", "brier", "perplexity", "ppl", "fid"}
ERRORS |= {"wer", "cer", "eer", "err", "nrmse", "rmsle", "msle", "smape", "medae", "bce"}
ERRORS |= {"crossentropy", "hinge", "huber", "hamming", "hausdorff", "lpips"}
# Names of metrics that are errors nearly always, and of those that are scores.
LIKELY_ERRORS = {"entropy", "kl", "distance", "divergence", "deviation"}
SCORES = {"acc", "accuracy", "f1", "auc", "auroc", "map", "iou", "miou", "dice", "precision"}
SCORES |= {"recall", "r2", "kappa", "psnr", "ssim"}
COLOURS = {"warning": "\033[33m", "error": "\033[31m"}
PLAIN = "\033[0m"
# Control characters but for line ends and tabs, marks that change the direction of writing, and
# lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
# The stage at the head of a metric's name, as projects write it.
STAGE = re.compile("(train(?:ing)?|val(?:id(?:ation)?)?|test(?:ing)?)([/_])")
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Console(logging.Handler):
    """Write to the current stdout and stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        # As in every handler: a wrong call of log.warning ends no training.
        try:
            text = printable(self.format(record))
        except Exception:
            self.handleError(record)
            return
        if record.exc_info:
            # A traceback may quote a request with credentials.
            text = redact_text(text)
        if record.levelno < logging.WARNING:
            print_line(text, sys.stdout)
            return

        label = "error" if record.levelno >= logging.ERROR else "warning"
        if sys.stderr.isatty():
            print_line(f"{COLOURS[label]}{label}:{PLAIN} {text}", sys.stderr)
        else:
            print_line(f"{label}: {text}", sys.stderr)


def printable(text: str) -> str:
    """Escape what could move the cursor or colour the terminal, as a file's name may."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_line(text: str, stream: TextIO, *, is_result: bool = False) -> None:
    """Print a line; a closed pipe (`… | head`) is not an error.

    Args:
        is_result: a full disk is an error.
    """
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError) as error:
        # Python would end with exit code 120 when it flushes the stream at its end.
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 1 if stream is sys.stdout else 2)
        if is_result and is_full(error):
            raise


def say(text: object) -> None:
    """Print a result of a script."""
    print_line(printable(str(text)), sys.stdout, is_result=True)


def set_up(*, verbose: bool = False, quiet: bool = False) -> None:
    """Show what Lockstep's and the user's modules log, and the warnings of libraries.

    `verbose` shows their debugging lines too, never those of libraries: botocore's hold signatures.
    `quiet` shows warnings and errors only, and wins over verbose.
    """
    # A name that the terminal cannot write is escaped.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    root = logging.getLogger()
    if not any(isinstance(handler, Console) for handler in root.handlers):
        root.addHandler(Console())

    level = logging.DEBUG if verbose else logging.INFO
    if quiet:
        level = logging.WARNING
    modules_of_user = [path.stem for path in (REPOSITORY / "src").glob("*")]
    for name in ("__main__", "lockstep", *modules_of_user):
        logging.getLogger(name).setLevel(level)


def duration(seconds: float) -> str:
    """Return the two largest parts: 6.7 s, 48 s, 4 min 12 s, 3 h 7 min, 2 d 4 h."""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 9.95:
        return f"{round(seconds, 1):g} s"

    left = round(seconds)
    parts = []
    for size, unit in UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def as_read(name: str, value: float) -> str:
    """Return a metric as the terminal shows it: accuracies in percent."""
    if name.startswith(("val/acc", "test/acc")):
        return f"{value:.2%}"
    return f"{value:.4g}"


def split_stage(name: str) -> tuple[str, str]:
    """Return the stage and the metric of `val/acc` or `validation_acc`; no stage if it has none.

    The stage is train, val or test.
    """
    match = STAGE.match(name)
    if not match:
        return "", name
    stage = next(stage for stage in ("train", "val", "test") if match[1].startswith(stage))
    return stage, name[match.end() :]


def is_metric_of(stage: str, name: str) -> bool:
    """Return whether a name is that of a metric of an evaluation, val or test."""
    # A value_loss, as in reinforcement learning, is no metric of the validation.
    return name.startswith(stage) and not name.startswith("value")


def is_lower_better(metric: str) -> bool:
    """Return whether a metric's name is that of a loss or an error: val/loss, val_rmse, nll."""
    name = metric.lower()
    if "loss" in name or "error" in name:
        return True
    return not (ERRORS | LIKELY_ERRORS).isdisjoint(re.split("[^a-z]+", name))


def mode_of(metric: str) -> str | None:
    """Return "min" or "max" if the last word of a metric's name leaves no doubt, else None."""
    name = metric.lower().removesuffix("_epoch").removesuffix("_step")
    last = re.split("[^a-z0-9]+", name)[-1]
    if last in ERRORS or last.endswith(("loss", "error")):
        return "min"
    return "max" if last in SCORES else None


def tested_name(monitor: str, metrics: Iterable[str] = ()) -> str:
    """Return the test metric that corresponds to a monitored one: test/mae for val/mae.

    A monitored metric of training, as train/loss, has test/acc.

    Args:
        metrics: names that were logged; one of the same metric in the test comes first.
    """
    stage, metric = split_stage(monitor)
    for name in metrics:
        if split_stage(name) == ("test", metric):
            return name
    if stage == "val":
        return STAGE.sub(lambda match: f"test{match[2]}", monitor, count=1)
    return "test/acc"
