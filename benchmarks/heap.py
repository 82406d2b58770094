"""What it brings a training on a CPU that freed memory stays with the process (src/heap.py), and what it costs.

    python benchmarks/heap.py

Whole runs of `python src/train.py` on made-up images, in turns with the same runs under glibc's default, which
MALLOC_MMAP_MAX_=65536 asks for: images/s, and resident bytes at their highest as the kernel counts them.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

from measuring import TRAIN, in_turns, median, paired_ratio, peak_mib, places, save

NETS = {
    "vit_tiny_32": ["model=vit_tiny_32", "data.global_batch_size=256", "data.num_images=2560", "data.num_val=256"],
    "airbench": ["model=airbench", "data.global_batch_size=1000", "data.num_images=9000", "data.num_val=1000"],
    "alexnet": ["model=alexnet", "data.image_size=64", "data.global_batch_size=256", "data.num_images=2560",
                "data.num_val=256"],
}  # fmt: skip
COMMON = ["data=synthetic", "trainer=cpu", "trainer.max_epochs=1", "trainer.limit_val_batches=0", "test=false"]
DEFAULT = {"MALLOC_MMAP_MAX_": "65536"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    nets = {}
    with tempfile.TemporaryDirectory() as scratch:
        for net, words in NETS.items():
            mib: dict[str, list[float]] = {"kept": [], "default": []}
            kept, default = in_turns(
                repetitions,
                partial(images_per_s, scratch, words, {}, mib["kept"]),
                partial(images_per_s, scratch, words, DEFAULT, mib["default"]),
            )
            nets[net] = {
                "speed": paired_ratio(kept, default),
                "memory": paired_ratio(mib["kept"], mib["default"]),
                "images_per_s": {"kept": median(kept, 1), "default": median(default, 1)},
                "peak_mib": {side: median(values, 0) for side, values in mib.items()},
            }
            print(f"{net}: {nets[net]['speed']} × images/s, {nets[net]['memory']} × memory", flush=True)
    save("heap", [], nets=nets)


def images_per_s(scratch: str, words: list[str], environment: dict[str, str], mib: list[float]) -> float:
    """Of one run; its peak memory goes to `mib`."""
    run_id = f"bench{time.time_ns()}"
    command = [*TRAIN, *COMMON, *words, *places(scratch), f"run_id={run_id}"]
    mib.append(peak_mib(command, environment))
    record = json.loads((Path(scratch) / "log" / "train" / "runs" / run_id / "run.json").read_text())
    return record["images_per_s"]


if __name__ == "__main__":
    main()
