"""Which images the MNIST benchmarks run on: MNIST's files, or Fashion-MNIST's in their place."""

import argparse
import gzip
from pathlib import Path

from measuring import REPOSITORY  # noqa: F401 puts src/ on the path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--root", type=Path, help="MNIST in torchvision's layout (FOLDER/MNIST/raw)")
    chosen.add_argument(
        "--fashion-root", type=Path, help="Fashion-MNIST's four .gz files, e.g. /usr/share/datasets/fashion-mnist"
    )


def images_of(arguments: argparse.Namespace, scratch: Path) -> tuple[Path, list[str], str]:
    """(folder in torchvision's layout of MNIST, our options for it, its name); Fashion-MNIST is unpacked there."""
    if arguments.root is not None:
        root = arguments.root.resolve()
        return root, [f"data.root={root}"], "MNIST"
    raw = scratch / "fashion" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    packed = sorted(arguments.fashion_root.resolve().glob("*-ubyte.gz"))
    if len(packed) != 4:
        raise SystemExit(f"{arguments.fashion_root} holds {len(packed)} of Fashion-MNIST's four .gz files.")
    for path in packed:
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    root = scratch / "fashion"
    return root, ["data=fashion_mnist", f"data.root={root}"], "Fashion-MNIST"
