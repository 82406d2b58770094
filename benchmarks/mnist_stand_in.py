"""Writes CIFAR-10 in grey, its middle 28×28 pixels, as MNIST's four files: for machines that cannot get MNIST.

    python benchmarks/mnist_stand_in.py CIFAR_ROOT FOLDER     # CIFAR_ROOT holds cifar-10-batches-py

50,000 training and 10,000 test images, harder than MNIST: the example's net reaches about two thirds, not 99 %.
"""

import struct
import sys
from pathlib import Path

import numpy as np
from measuring import REPOSITORY  # noqa: F401 puts src/ on the path

LUMA = np.array([0.299, 0.587, 0.114])


def write_stand_in(cifar_root: Path, folder: Path) -> Path:
    """The files lie in folder/MNIST/raw, where torchvision and our data module find them; returns `folder`."""
    from data.cifar10 import CIFAR10DataModule

    source = CIFAR10DataModule(root=cifar_root)
    source.identity()
    found = source.read(folder)
    grey = (found.images[:, 2:30, 2:30] @ LUMA).round().astype(np.uint8)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, part in (("train", slice(0, found.num_fit)), ("t10k", slice(found.num_fit, None))):
        for kind, array in (("images-idx3", grey[part]), ("labels-idx1", found.labels[part].astype(np.uint8))):
            head = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return folder


if __name__ == "__main__":
    write_stand_in(Path(sys.argv[1]), Path(sys.argv[2]))
