"""Compare the seconds of a training step with those of a bare PyTorch loop.

    python benchmarks/step_time.py                 # a ViT and a tiny net
    python benchmarks/step_time.py --only tiny
    python benchmarks/step_time.py --only memory   # with and without the memory that glibc keeps

Both sides get the same net, the same optimizer and the same batches, which lie in memory. Ours is a
whole run, built as `python src/train.py` builds it, with its callbacks, loggers and record. Each
measurement is one epoch; the first steps do not count.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any

from measuring import build_goal_row, folder_overrides, measure_in_turns, median, paired_ratio, save

TINY = ["model=small_cnn", "data=digits", "data.global_batch_size=64"]
VIT = ["model=vit_tiny_32", "data=synthetic", "data.global_batch_size=256"]
# Each part has its overrides, its steps and its rounds.
PARTS = {"tiny": (TINY, 700, 9), "vit": (VIT, 3, 3)}
VIT_LIMIT = 1.02
CACHED_BATCHES = 16
LIMITS = ["trainer=cpu", "trainer.max_epochs=1", "test=false", "trainer.limit_val_batches=0"]
ALEXNET = ["model=alexnet", "data=synthetic", "data.image_size=64", "data.global_batch_size=128"]
MEMORY_STEPS = 5
MEMORY_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[*PARTS, "memory"])
    only = parser.parse_args().only
    figures = {name: measure(*part) for name, part in PARTS.items() if only in (None, name)}
    if only in (None, "memory"):
        figures["memory"] = measure_memory()
    goals = []
    if "tiny" in figures:
        tiny = figures["tiny"]
        detail = f"bare loop {tiny['bare_ms']}, ours {tiny['ours_ms']} ms"
        what = "tiny net: a step over a bare loop's"
        goals.append(build_goal_row(what, "", tiny["over_bare_ms"], unit="ms", detail=detail))
    if "vit" in figures:
        ratio = figures["vit"]["over_bare"]
        what = "ViT at batch 256: a step ÷ a bare loop's"
        detail = "vit_tiny_32, cached batches"
        goals.append(
            build_goal_row(what, f"≤ {VIT_LIMIT}", ratio, ratio <= VIT_LIMIT, detail=detail)
        )
    if "memory" in figures:
        memory = figures["memory"]
        peaks = f"peak {memory['without_peak_mib']} MiB without, {memory['kept_peak_mib']} MiB with"
        what = "AlexNet on the CPU: a step with kept memory ÷ without"
        goals.append(build_goal_row(what, "", memory["kept_over_without"], detail=peaks))
    save("step_time", goals, **figures)


def measure(overrides: list[str], steps: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        sides = Sides(overrides, steps, scratch)
        bare, ours = measure_in_turns(rounds, sides.run_bare, sides.run_ours)
    bare_ms = [round(1000 * seconds, 3) for seconds in bare]
    ours_ms = [round(1000 * seconds, 3) for seconds in ours]
    return {
        "bare_ms": median(bare_ms),
        "ours_ms": median(ours_ms),
        "over_bare_ms": median([1000 * (a - b) for a, b in zip(ours, bare, strict=True)]),
        "over_bare": paired_ratio(ours, bare, 4),
        "steps": steps,
        "all_ms": {"bare": bare_ms, "ours": ours_ms},
    }


def measure_memory() -> dict[str, Any]:
    """Compare steps of AlexNet on the CPU with and without `keep_freed_memory`.

    Each measurement is a process of its own, because what glibc keeps cannot be undone.
    """

    def measure_without() -> float:
        seconds, mebibytes = call_in_new_process(train_alexnet, False)
        peaks["without"].append(mebibytes)
        return seconds

    def measure_kept() -> float:
        seconds, mebibytes = call_in_new_process(train_alexnet, True)
        peaks["kept"].append(mebibytes)
        return seconds

    peaks: dict[str, list[float]] = {"without": [], "kept": []}
    without_s, kept_s = measure_in_turns(MEMORY_ROUNDS, measure_without, measure_kept)
    return {
        "kept_over_without": paired_ratio(kept_s, without_s, 4),
        "without_s": median(without_s),
        "kept_s": median(kept_s),
        "without_peak_mib": median(peaks["without"]),
        "kept_peak_mib": median(peaks["kept"]),
        "steps": MEMORY_STEPS,
    }


def call_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def train_alexnet(keeps_memory: bool) -> tuple[float, float]:
    """Return the seconds of a step and the peak of the process's memory in MiB."""
    from lockstep.runs import join

    if not keeps_memory:
        join.keep_freed_memory = lambda: None
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [*ALEXNET, *LIMITS, *folder_overrides(scratch)]
        seconds = time_run(overrides, 2, MEMORY_STEPS, [])
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Sides:
    """Make the same steps in two ways; each returns the seconds per step."""

    def __init__(self, overrides: list[str], steps: int, scratch: str) -> None:
        self.overrides = [*overrides, *LIMITS, *folder_overrides(scratch)]
        self.steps = steps
        self.warmup = max(2, steps // 20)
        self.batches: list[Any] = []

    def run_ours(self) -> float:
        return time_run(self.overrides, self.warmup, self.steps, self.batches)

    def run_bare(self) -> float:
        from torch.nn import functional as F

        from lockstep.config.compose import compose, plain
        from lockstep.training.build_module import build_module

        if not self.batches:
            self.run_ours()
        channels, size = self.batches[0][0].shape[1:3]
        config = plain(compose("train", self.overrides))
        module = build_module(config, {"num_classes": 10, "image_size": size, "channels": channels})
        net = module.net.train()
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        # One kernel steps all parameters, as in our run, because the optimizer is not measured here.
        optimizer = module.optimizer_factory(trained, fused=True)
        for number, (images, labels) in enumerate(
            CachedLoader(self.batches, self.steps + self.warmup)
        ):
            if number == self.warmup:
                started = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
        return (time.perf_counter() - started) / self.steps


def time_run(
    overrides: list[str],
    warmup: int,
    steps: int,
    batches: list[Any] | None,
    watch: Any = None,
    synchronize: Callable[[], Any] = lambda: None,
) -> float:
    """Train as `python src/train.py` does, in this process; return seconds per step.

    Args:
        batches: these replace the batches of the data. An empty list is filled with the first
            batches of the data. None leaves the data as they are.
        watch: an object whose `begin()` is called after the warm-up and whose `end()` after the
            last step.
        synchronize: waits for the device.
    """
    import lightning.pytorch as pl

    from lockstep.config.compose import compose, whole_config
    from lockstep.ranks.find import find_ranks
    from lockstep.runs.opening import open_run
    from lockstep.training.build import build

    class Clock(pl.Callback):
        seconds = 0.0

        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == warmup:
                synchronize()
                if watch:
                    watch.begin()
                self.began = time.perf_counter()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == warmup + steps:
                if watch:
                    watch.end()
                synchronize()
                self.seconds = (time.perf_counter() - self.began) / steps

    clock = Clock()
    cfg = compose("train", [*overrides, f"run_id=bench{time.time_ns()}"])
    config = {**whole_config(cfg), "logger": {}}
    with open_run(config, find_ranks(config)) as run:
        trainer, module, data = build(run)
        trainer.callbacks.append(clock)
        if batches is not None:
            replace_batches(data, batches, warmup + steps + 1)
        trainer.fit(module, datamodule=data)
    if run.exit_code:
        raise RuntimeError(f"train.py {' '.join(overrides)} failed")
    return clock.seconds


def replace_batches(data: Any, batches: list[Any], length: int) -> None:
    """Let a data module give `length` of `batches`; fill an empty list with its first batches."""
    if not batches:
        for batch in islice(data.train_dataloader(), CACHED_BATCHES):
            images, labels = data.on_after_batch_transfer(batch, 0)
            batches.append((images.clone(), labels.clone()))
    data.train_dataloader = partial(CachedLoader, batches, length)
    data.on_after_batch_transfer = _unchanged


def _unchanged(batch: Any, dataloader_idx: int) -> Any:
    return batch


class CachedLoader:
    """Give the same few batches again and again, with the state that checkpoints ask for."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.batches = batches
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return islice(cycle(self.batches), self.length)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "global_batches": self.length}


if __name__ == "__main__":
    main()
