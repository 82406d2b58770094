"""Host-device synchronisations per step between log points: values read from tensors, and collectives.

    python benchmarks/syncs.py

On one process, and on two ranks of ddp_sim. On the CPU nothing waits for a device, so what would wait on a GPU is
counted: every .item(), .tolist(), float(), bool() and .cpu() in forty steps that hold no log point.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import HERE, goal_row, output_of, places, save

COUNT = [sys.executable, str(HERE / "sync_count.py")]
WORDS = ["model=small_cnn", "data=synthetic", "data.image_size=8", "data.num_images=8320", "data.num_val=640",
         "data.global_batch_size=64", "trainer.max_epochs=1", "trainer.log_every_n_steps=50", "test=false"]  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        one, two = counted(Path(scratch), "trainer=cpu"), counted(Path(scratch), "trainer=ddp_sim")
    gradients = two["steps"]  # the net is smaller than one of DDP's buckets: one all-reduce a step
    extra = sum(two["collectives"].values()) - gradients
    reads = max(reads_of(one), reads_of(two) - 2 * extra)  # a vote among the ranks reads its result
    save(
        "syncs",
        [
            goal_row(2, "one process: values read from tensors per step between log points", "0",
                     reads_of(one) / one["steps"], reads_of(one) == 0, unit="a step"),
            goal_row(2, "two ranks: collectives per step beside the gradients'", "at most 1 in N steps",
                     extra / two["steps"], extra <= 1 and reads <= 0, unit="a step",
                     detail=f"{extra} in {two['steps']} steps: the vote on interruption, about once a second"),
        ],
        one_process=one, two_ranks=two,
    )  # fmt: skip


def reads_of(told: dict[str, Any]) -> int:
    return max(sum(told["reads"].values()), told["local_scalar_dense"])


def counted(scratch: Path, trainer: str) -> dict[str, Any]:
    said = output_of([*COUNT, *WORDS, trainer, *places(scratch)])
    found = re.search(r"between_log_points (\{.*\})", said)
    assert found, said
    return json.loads(found.group(1))


if __name__ == "__main__":
    main()
