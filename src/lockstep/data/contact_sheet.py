"""Write a PNG of many small pictures with captions."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.data.decoding import get_size, to_pillow
from lockstep.process.files import write_atomically
from lockstep.process.output import escape_unprintable

# The side of a picture in a contact sheet, in pixels.
TILE = 128
# A small contact sheet may be kept in git. It has the most colours that fit into this size.
SMALL_BYTES = 80_000
COLOURS = (256, 64, 16)


class Tile(NamedTuple):
    """Pictures that stand side by side, with a caption.

    Attributes:
        lines: the lines of the caption.
        colour: the colour of the first line.
    """

    pictures: list[Any]
    lines: list[str]
    colour: str = "black"


def write_contact_sheet(
    path: Path,
    tiles: Sequence[Tile],
    columns: int,
    *,
    is_small: bool = False,
) -> None:
    """Write a PNG of pictures with captions.

    Args:
        is_small: reduce the colours until the file has at most SMALL_BYTES.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(11)
    width = TILE * max(len(pictures) for pictures, _, _ in tiles) + 8
    height = TILE + 12 + 14 * max(2, *(len(lines) for _, lines, _ in tiles))
    num_columns = min(columns, len(tiles))
    num_rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (num_columns * width + 8, num_rows * height + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (pictures, lines, colour) in enumerate(tiles):
        x = 8 + i % columns * width
        y = 8 + i // columns * height
        for k, picture in enumerate(pictures):
            sheet.paste(_make_thumbnail(picture), (x + k * TILE, y))
        for k, line in enumerate(lines):
            text = _shorten_to_width(escape_unprintable(line), TILE * len(pictures), font)
            fill = "#777777" if k else colour
            draw.text((x, y + TILE + 2 + 14 * k), text, fill, font)
    data = _encode_small_png(sheet) if is_small else _encode_png(sheet)
    write_atomically(path, lambda file: file.write(data), binary=True)


def _shorten_to_width(text: str, width: int, font: Any) -> str:
    """Return a text that is at most `width` pixels wide."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def _encode_png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def _encode_small_png(picture: Any) -> bytes:
    """Return a PNG of at most SMALL_BYTES, or with the fewest colours if that is impossible."""
    from PIL.Image import Dither

    data = b""
    for colours in COLOURS:
        data = _encode_png(picture.quantize(colours, dither=Dither.NONE))
        if len(data) <= SMALL_BYTES:
            break
    return data


def _make_thumbnail(picture: Any) -> Any:
    """Return a picture padded to TILE × TILE pixels. The pixels of a small one stay sharp."""
    from PIL import Image, ImageOps

    is_small = max(get_size(picture)) < TILE
    resampling = Image.Resampling.NEAREST if is_small else Image.Resampling.BILINEAR
    picture = to_pillow(picture).convert("RGB")
    return ImageOps.pad(picture, (TILE, TILE), resampling, color="white")
