"""The confusion matrix of a test as numbers and as a picture, and the accuracy of each class."""

import csv
from typing import Any

from torch import Tensor

from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder

COUNTED_CLASSES, NAMED_CLASSES, MAX_NAME = 20, 40, 24  # what there is room for in the picture
MATRIX_SIDE = 900  # pixels, where the cells hold no counts
LOW, HIGH = 255.0, (8.0, 48.0, 107.0)  # from white to blue


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
    """Each row's shares as blues; names up to 40 classes, counts up to 20."""
    from PIL import Image, ImageDraw, ImageFont

    classes = len(class_names)
    cell = max(38, 200 // classes) if classes <= COUNTED_CLASSES else max(MATRIX_SIDE // classes, 1)
    side = cell * classes
    font, small = ImageFont.load_default(14), ImageFont.load_default(11)
    names = [name[:MAX_NAME] for name in class_names] if classes <= NAMED_CLASSES else []
    margin = 34 + max((int(font.getlength(name)) for name in names), default=0)  # for names and an axis title
    picture = Image.new("RGB", (margin + side + 16, 32 + side + margin), "white")
    draw = ImageDraw.Draw(picture)

    def upright(text: str, right: int, top: int) -> None:
        """Text that reads upwards, its right edge and top edge where asked."""
        label = Image.new("RGB", (int(font.getlength(text)) + 1, 18), "white")
        ImageDraw.Draw(label).text((0, 0), text, fill="black", font=font)
        label = label.rotate(90, expand=True)
        picture.paste(label, (right - label.width, top))

    counts = confusion.double()
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).unsqueeze(2)
    pixels = (LOW + shares.new_tensor(HIGH).sub(LOW) * shares).round().byte().numpy()
    matrix = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
    left, top = margin, 32
    picture.paste(matrix, (left, top))
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline="#777777")
    middle = left + side // 2
    accuracy = confusion.diag().sum().item() / max(confusion.sum().item(), 1)
    draw.text((middle, 16), f"test accuracy {accuracy:.2%}", fill="black", font=font, anchor="mm")
    draw.text((middle, picture.height - 4), "predicted", fill="black", font=font, anchor="md")
    upright("true", 20, top + side // 2 - 14)
    for i, name in enumerate(names):
        draw.text((left - 5, top + cell * i + cell // 2), name, fill="black", font=font, anchor="rm")
        upright(name, left + cell * i + cell // 2 + 9, top + side + 5)
    if classes <= COUNTED_CLASSES:
        for i, row in enumerate(confusion.tolist()):
            for j, count in enumerate(row):
                if count:
                    place = left + cell * j + cell // 2, top + cell * i + cell // 2
                    draw.text(
                        place, str(count), fill="white" if shares[i, j] > 0.5 else "black", font=small, anchor="mm"
                    )
    write_atomically(folder.confusion_matrix_image, lambda file: picture.save(file, format="PNG"), binary=True)
