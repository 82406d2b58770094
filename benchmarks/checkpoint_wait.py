"""Seconds that training waits for an asynchronous checkpoint, against one copy of the same tensors in memory.

    python benchmarks/checkpoint_wait.py

ViT-B/32: with plain SGD its checkpoint has 350 MB, with Adam 1 GB. After each step of one run both are done in turn,
while nothing of the former checkpoint is being written any more. One thread.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from typing import Any

from measuring import goal_row, median, output_of, paired_ratio, places, save

SIZES = {"350 MB": ["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"], "1 GB": ["optimizer=adam"]}
GOAL = 1.2
ROUNDS = 10  # and one before them, which nobody counts
WORDS = ["model=vit", "model.pretrained=false", "data=synthetic", "data.image_size=224", "data.num_images=40",
         "data.num_test_images=4", "data.num_val=4", "data.global_batch_size=2", "data.eval_batch_size=4",
         "trainer=cpu", "trainer.num_threads=1", "trainer.max_epochs=1", "scheduler=none", "test=false",
         "callbacks.checkpoints.asynchronous=true"]  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    goals, figures = [], {}
    for size, words in SIZES.items():
        figures[size] = told = measured(words)
        ratio = paired_ratio(told["waits_s"], told["copies_s"])
        detail = (
            f"a checkpoint of {told['bytes'] / 1e6:.0f} MB, in the median of {ROUNDS}: {median(told['waits_s'], 3)} s, "
            f"a copy {median(told['copies_s'], 3)} s; written by then {median(told['writes_s'], 2)} s later"
        )
        what = f"training waits for an asynchronous checkpoint of {size} ÷ one copy of its tensors"
        goals.append(goal_row(13, what, f"≤ {GOAL}", ratio, ratio <= GOAL, detail=detail))
    save("checkpoint_wait", goals, sizes=figures)


def measured(words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        said = output_of([sys.executable, __file__, "--inside", *WORDS, *words, *places(scratch)])
    found = re.search(r"waited (\{.*\})", said)
    assert found, said
    return json.loads(found.group(1))


def train_and_measure(argv: list[str]) -> int:
    import train
    from lockstep.callbacks.checkpoints import Checkpoints

    told: dict[str, list[float]] = {"copies_s": [], "waits_s": [], "writes_s": []}

    def both(self: Checkpoints, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step > ROUNDS + 1:
            return
        turns = [lambda: copied(module, trainer, told), lambda: checkpointed(self, trainer, told)]
        for turn in turns[:: 1 if trainer.global_step % 2 else -1]:
            turn()
        if trainer.global_step == ROUNDS + 1:
            num_bytes = next(self.folder.glob("last-*.ckpt")).stat().st_size
            print(
                "waited", json.dumps({"bytes": num_bytes} | {name: each[1:] for name, each in told.items()}), flush=True
            )

    Checkpoints.on_train_batch_end = both  # type: ignore[method-assign, assignment]
    return train.main(argv)


def copied(module: Any, trainer: Any, told: dict[str, list[float]]) -> None:
    state = trainer.optimizers[0].state_dict()["state"].values()
    tensors = [
        *module.state_dict().values(),
        *(value for each in state for value in each.values() if value is not None),
    ]
    started = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors]
    told["copies_s"].append(time.perf_counter() - started)
    del copies


def checkpointed(checkpoints: Any, trainer: Any, told: dict[str, list[float]]) -> None:
    started = time.perf_counter()
    checkpoints.save_last(trainer)
    told["waits_s"].append(time.perf_counter() - started)
    checkpoints.writes.wait()
    told["writes_s"].append(time.perf_counter() - started)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(train_and_measure(sys.argv[2:]))
    main()
