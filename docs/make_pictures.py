"""Draw the pictures of the documentation from real runs.

    python docs/make_pictures.py

docs/pictures/terminal.svg is the output of `make train`, prove.svg that of a proof. page.png and
comparison.png are pages of the logbook, logbook.png and logbook-dark.png its list. These need
Debian's chromium; without it they stay as they are.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from PIL import Image
from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURES = REPOSITORY / "docs" / "pictures"
COMMAND = ["src/train.py", "experiment=quickstart"]
PROOF = ["src/prove.py", "experiment=quickstart"]
CHROMIUM = "chromium"
COLUMNS = 110  # of the terminal
WIDTH = 940  # pixels
HEIGHT = 1500  # pixels
LIST_HEIGHT = 990  # pixels
COLOURS = 64  # A picture of so few needs a quarter of the bytes.


@dataclass(frozen=True)
class Theme:
    """The colours in which a git host shows a page."""

    text: str
    background: str
    border: str
    even_row: str
    code: str
    link: str
    tick: str


LIGHT = Theme("#1f2328", "#fff", "#d1d9e0", "#f6f8fa", "#eff1f3", "#0969da", "#1a7f37")
DARK = Theme("#f0f6fc", "#0d1117", "#3d444d", "#151b23", "#262c36", "#4493f8", "#3fb950")


def style_of(theme: Theme) -> str:
    border = f"1px solid {theme.border}"
    return f"""
body {{ font: 15px/1.5 sans-serif; color: {theme.text}; background: {theme.background}; }}
body {{ width: 860px; margin: 24px auto; }}
table {{ border-collapse: collapse; margin: 12px 0; display: block; overflow: hidden; }}
td, th {{ border: {border}; padding: 5px 12px; }}
tr:nth-child(2n) {{ background: {theme.even_row}; }}
code {{ background: {theme.code}; padding: 2px 5px; border-radius: 5px; font-size: 85%; }}
pre code {{ display: block; padding: 12px; }}
img {{ max-width: 100%; }}
h1, h2 {{ border-bottom: {border}; padding-bottom: 6px; }}
a {{ color: {theme.link}; }}
"""


def output_on_a_terminal(command: list[str]) -> str:
    """Return the output of a command on a terminal, in colour, without redrawn lines."""
    output = bytearray()

    def read(handle: int) -> bytes:
        data = os.read(handle, 65536)
        output.extend(data)
        return data

    os.environ.update(COLUMNS=str(COLUMNS), LINES="40", TERM="xterm-256color")
    pty.spawn(command, read)
    without_moves = re.sub(r"\x1b\[\d*[A-HJKf]|\x1b\[\?25[lh]", "", output.decode())
    lines = without_moves.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines).strip("\n")


def draw_terminal(command: list[str], output: str, picture: str) -> None:
    text = Text.from_ansi(f"$ python {' '.join(command)}\n{output}")
    text.highlight_regex("(?m)^equal", "green")
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(text)
    console.save_svg(str(PICTURES / picture), title="Lockstep")


def draw_page(page: Path, picture: str, theme: Theme = LIGHT, height: int = HEIGHT) -> None:
    """Draw the upper part of a page of the logbook as a git host shows markdown."""
    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(page.read_text())
    # Every font has this sign.
    body = body.replace("✅", f"<span style='color: {theme.tick}'>✔</span>")
    # The copy lies beside the page, because the page shows pictures beside it.
    copy = page.parent / ".picture.html"
    copy.write_text(f"<meta charset='utf-8'><style>{style_of(theme)}</style>{body}")
    try:
        photograph(copy, PICTURES / picture, height)
    finally:
        copy.unlink()


def photograph(page: Path, picture: Path, height: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--hide-scrollbars", f"--user-data-dir={profile}"]
        command += [f"--screenshot={picture}", f"--window-size={WIDTH},{height}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def draw_outputs() -> None:
    folder = REPOSITORY / "logs" / "train" / "runs" / "first_run"
    shutil.rmtree(folder, ignore_errors=True)
    output = output_on_a_terminal([sys.executable, *COMMAND, "run_id=first_run"])
    draw_terminal(COMMAND, output, "terminal.svg")
    shutil.rmtree(folder, ignore_errors=True)
    draw_terminal(PROOF, output_on_a_terminal([sys.executable, *PROOF]), "prove.svg")


def draw_logbook() -> None:
    logbook = REPOSITORY / "logbook"
    draw_page(logbook / "vit_tiny-ddp_sim" / "page.md", "page.png")
    draw_page(logbook / "ddp-beside-fsdp-26-epochs.md", "comparison.png")
    draw_page(logbook / "README.md", "logbook.png", LIGHT, LIST_HEIGHT)
    draw_page(logbook / "README.md", "logbook-dark.png", DARK, LIST_HEIGHT)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    draw_outputs()
    if shutil.which(CHROMIUM):
        draw_logbook()
    else:
        print("The pages were not drawn: apt-get install --no-install-recommends chromium.")


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    main()
