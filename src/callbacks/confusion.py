"""The confusion matrix of a test as numbers and as a picture, and the accuracy of each class."""

import csv
from typing import Any

from torch import Tensor

from run_files import RunFolder, write_atomically


def write_confusion(confusion: Tensor, class_names: list[str], folder: RunFolder) -> dict[str, float]:
    """Write confusion_matrix.csv and .png into the run folder; returns accuracy per class.

    Args:
        confusion: (classes, classes) exact counts, rows true, columns predicted.
    """
    rows = confusion.tolist()

    def write(file: Any) -> None:
        writer = csv.writer(file)
        writer.writerow(["true \\ predicted", *class_names])
        writer.writerows([name, *row] for name, row in zip(class_names, rows, strict=True))

    write_atomically(folder.confusion_matrix, write)
    _draw(confusion, class_names, folder)
    return {name: row[i] / max(sum(row), 1) for i, (name, row) in enumerate(zip(class_names, rows, strict=True))}


def _draw(confusion: Tensor, class_names: list[str], folder: RunFolder) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shares = confusion.double() / confusion.sum(1, keepdim=True).clamp(min=1)
    size = min(3 + 0.45 * len(class_names), 24)
    figure = Figure(figsize=(size, size), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if len(class_names) <= 40:
        axes.set_xticks(range(len(class_names)), class_names, rotation=60, ha="right")
        axes.set_yticks(range(len(class_names)), class_names)
    if len(class_names) <= 20:
        for i, row in enumerate(confusion.tolist()):
            for j, count in enumerate(row):
                if count:
                    color = "white" if shares[i, j] > 0.5 else "black"
                    axes.text(j, i, count, ha="center", va="center", fontsize=7, color=color)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    accuracy = confusion.diag().sum().item() / max(confusion.sum().item(), 1)
    axes.set_title(f"test accuracy {accuracy:.2%}", fontsize=10)
    write_atomically(folder.confusion_matrix_image, lambda file: figure.savefig(file, format="png"), binary=True)
