"""Draw README's pictures from real runs.    python docs/make_pictures.py   (Debian's chromium for
the pages)

docs/pictures/terminal.svg is the output of `make train`, prove.svg that of a proof; page.png and
comparison.png are pages of the logbook.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from markdown_it import MarkdownIt
from PIL import Image
from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURES = REPOSITORY / "docs" / "pictures"
COMMAND = ["src/train.py", "experiment=quickstart"]
PROOF = ["src/prove.py", "experiment=quickstart"]
STYLE = """
body { font: 15px/1.5 sans-serif; color: #1f2328; background: #fff; width: 860px; margin: 24px auto; }
table { border-collapse: collapse; margin: 12px 0; display: block; overflow: hidden; }
td, th { border: 1px solid #d1d9e0; padding: 5px 12px; } tr:nth-child(2n) { background: #f6f8fa; }
code { background: #eff1f3; padding: 2px 5px; border-radius: 5px; font-size: 85%; }
pre code { display: block; padding: 12px; }
img { max-width: 100%; } h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: 6px; } a { color: #0969da; }
"""


def output_on_a_terminal(command: list[str]) -> str:
    """Return the output of the command on a terminal of 110 columns, in colour, without redrawn
    lines.
    """
    seen = bytearray()

    def read(handle: int) -> bytes:
        seen.extend(data := os.read(handle, 65536))
        return data

    os.environ.update(COLUMNS="110", LINES="40", TERM="xterm-256color")
    pty.spawn(command, read)
    lines = (
        re.sub(r"\x1b\[\d*[A-HJKf]|\x1b\[\?25[lh]", "", seen.decode())
        .replace("\r\n", "\n")
        .split("\n")
    )
    return "\n".join(line.rpartition("\r")[2] for line in lines).strip("\n")


def draw_terminal(command: list[str], output: str, picture: str) -> None:
    text = Text.from_ansi(f"$ python {' '.join(command)}\n{output}")
    text.highlight_regex("(?m)^equal", "green")
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=110, file=nowhere)
        console.print(text)
    console.save_svg(str(PICTURES / picture), title="Lockstep")


def draw_page(page: Path, picture: str) -> None:
    """Draw the upper part of a page of the logbook as a git host shows markdown."""
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(page.read_text())
    html = html.replace("✅", "<span style='color: #1a7f37'>✔</span>")  # every font has this sign
    copy = page.parent / ".picture.html"
    copy.write_text(f"<meta charset='utf-8'><style>{STYLE}</style>{html}")
    photograph(copy, picture)
    copy.unlink()


def photograph(html: Path, picture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        own = [
            f"--user-data-dir={folder}",
            f"--screenshot={PICTURES / picture}",
            "--window-size=940,1500",
        ]
        subprocess.run(["chromium", *options, *own, html.as_uri()], check=True, capture_output=True)
    with Image.open(PICTURES / picture) as image:
        image.convert("RGB").quantize(64).save(
            PICTURES / picture, optimize=True
        )  # needs a quarter of the bytes


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    folder, logbook = REPOSITORY / "logs" / "train" / "runs" / "first_run", REPOSITORY / "logbook"
    shutil.rmtree(folder, ignore_errors=True)
    train = output_on_a_terminal([sys.executable, *COMMAND, "run_id=first_run"])
    draw_terminal(COMMAND, train, "terminal.svg")
    shutil.rmtree(folder, ignore_errors=True)
    draw_terminal(PROOF, output_on_a_terminal([sys.executable, *PROOF]), "prove.svg")
    if shutil.which("chromium"):
        draw_page(logbook / "vit_cifar10-two-cores-ddp_sim" / "page.md", "page.png")
        draw_page(logbook / "ddp-beside-fsdp-26-epochs.md", "comparison.png")


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    main()
