"""Measure one GPU in ten minutes: ceilings, a training step, data, strategies, memory, checkpoints.

    python benchmarks/gpu.py --out results --budget 560      # make bench-gpu
    python benchmarks/gpu.py --out results --only step,data
    python benchmarks/gpu.py --out results --small           # tiny nets, on a simulated GPU
    python benchmarks/gpu.py --out results --only cifar10 --cifar10 FOLDER --airbench SCRIPT

Each part runs in its own process under a time limit. Its figures are in OUT/gpu.json as soon as it
ends, so that a run that is cut short keeps them. Both sides of a ratio run in turns on the same
card. A ratio is the median over the rounds, and stands beside the smallest and the largest one. The
predictions for an H100 were written before any measurement. The script needs neither a network nor
git. A machine without internet access needs hydra-core, omegaconf and antlr4-python3-runtime.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import (
    REPOSITORY,
    folder_overrides,
    measure_in_turns,
    median,
    run_for_output,
    train_for_record,
)
from step_time import CachedLoader, time_run

NO_CHECKPOINTS = "callbacks.checkpoints=null"
CLASSES = 10
# ViT-B/32 takes so many floating-point operations for the forward and backward of an image.
FLOP_OF_IMAGE = 26.2e9
MIB = 2**20
GIB = 2**30
# Variables that tell the process of a part where generated images are kept, and what the options
# --cifar10 and --airbench name.
IMAGES = "GPU_BENCHMARK_IMAGES"
CIFAR10 = "GPU_BENCHMARK_CIFAR10"
AIRBENCH = "GPU_BENCHMARK_AIRBENCH"
# The time limits of a simulated GPU are longer by this factor.
TIMES_LONGER_IF_SMALL = 5
SHORTEST_PART_S = 5.0


@dataclass(frozen=True)
class Scale:
    """The sizes of the measurements, on a GPU or on a simulated one.

    Attributes:
        batch: the images of a step.
        small_batch: so few images that the GPU runs kernels faster than the host launches them.
        decoded_batch: the images of a step that decodes them; a thousand of 224 px take 150 MB.
        image_size: the side of an image in pixels.
        net: the options of the net that Lockstep trains.
        timm_options: the options of the same net in timm.
        product_side: the rows and columns of the matrices that measure the ceiling.
        product_s: the seconds of products that measure the sustained ceiling.
        copied_bytes: the bytes of the copy on the device.
        device_gib: the memory of a device to plan for.
        checkpoint_mib: the size of the weights and two moments.
        checkpoint_steps: the steps between two checkpoints.
        checkpoints: the number of checkpoints that are saved.
    """

    batch: int = 1024
    small_batch: int = 64
    decoded_batch: int = 256
    warmup: int = 5
    compiled_warmup: int = 12
    steps: int = 20
    rounds: int = 3
    image_size: int = 224
    net: tuple[str, ...] = ("model=vit", "model.pretrained=false")
    timm_options: Mapping[str, int] = field(default_factory=dict)
    product_side: int = 8192
    product_s: float = 10.0
    copied_bytes: int = 2**32
    device_gib: int = 40
    checkpoint_mib: int = 1050
    checkpoint_steps: int = 20
    checkpoints: int = 2


FULL = Scale()
TINY = Scale(
    batch=8,
    small_batch=4,
    decoded_batch=8,
    warmup=1,
    compiled_warmup=1,
    steps=2,
    rounds=2,
    image_size=32,
    net=("model=vit_tiny_32", "model.depth=2", "model.embed_dim=48"),
    timm_options={"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 4, "img_size": 32},
    product_side=64,
    product_s=0.01,
    copied_bytes=2**20,
    device_gib=1,
    checkpoint_mib=4,
    checkpoint_steps=2,
    checkpoints=1,
)
IS_SMALL = "--small" in sys.argv
SCALE = TINY if IS_SMALL else FULL
QUIET = (
    "test=false",
    "trainer.limit_val_batches=0",
    "trainer.log_every_n_steps=1000",
    "trainer.num_sanity_val_steps=0",
    "quiet=true",
)
PREDICTIONS = {
    "ceilings/copy_tb_per_s": "3.0",
    "ceilings/bf16_tflops": "798",
    "step/lockstep_over_bare": "≤ 1.02",
    "step/lockstep_images_per_s": "11,100 to 12,500",
    "step/share_of_ceiling": "0.36 to 0.41 (goal 0.45)",
    "data/stored_at_32_over_cached": "≤ 1.02",
    "data/stored_at_224_over_cached": "1.02 to 1.05",
    "synchronisations/bf16-mixed": "0",
    "synchronisations/16-mixed": "0 (goal), 1 a step from GradScaler",
    "strategies/fsdp_over_ddp_large": "< 1.1",
    "strategies/fsdp_over_ddp_small": "1.5 to 2.6",
    "compiled/over_eager": "0.8",
    "compiled/bf16_true_over_eager": "0.65",
    "compiled/fsdp_over_eager": "0.8",
    "memory/search_over_estimate": "0.95 to 1.05",
    "checkpoints/synchronous_over_copy": "5 to 20",
    "checkpoints/asynchronous_over_copy": "≤ 1.2",
    "cifar10/lockstep_over_airbench": "≤ 1.3",
}
Figures = dict[str, Any]


def main() -> None:
    options = read_options()
    if options.part:
        print("\n" + json.dumps(PARTS[options.part].measure(options.out)))
        return

    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.budget
    results: Figures = {"small": options.small, "parts": {}}
    with tempfile.TemporaryDirectory() as images:
        os.environ[IMAGES] = images
        for name, path in ((CIFAR10, options.cifar10), (AIRBENCH, options.airbench)):
            if path:
                os.environ[name] = str(Path(path).resolve())
        for name in options.only:
            results["parts"][name] = run_part(name, options.out, ends - time.monotonic())
            write_results(options.out, results)
            print_figures(name, results["parts"][name])
    failed = [name for name, figures in results["parts"].items() if "error" in figures]
    if failed:
        sys.exit(f"Not measured: {', '.join(failed)}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json")
    parser.add_argument("--budget", type=float, default=560, help="seconds for all parts together")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument(
        "--small", action="store_true", help="tiny nets and few steps; the figures mean nothing"
    )
    parser.add_argument("--cifar10", help="folder that holds cifar-10-batches-py")
    parser.add_argument(
        "--airbench", help="airbench94_muon.py of github.com/KellerJordan/cifar10-airbench"
    )
    # This script starts itself with this option, to measure one part.
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = set(options.only) - set(PARTS)
    if unknown:
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    return options


def run_part(name: str, out: Path, seconds_left: float) -> Figures:
    """Run one part in a process group of its own and return its figures, or how it failed."""
    limit_s = PARTS[name].limit_s
    if IS_SMALL:
        limit_s *= TIMES_LONGER_IF_SMALL
    limit_s = min(limit_s, seconds_left)
    if limit_s < SHORTEST_PART_S:
        return {"skipped": "no time left"}

    command = [sys.executable, __file__, "--part", name, "--out", str(out)]
    if IS_SMALL:
        command.append("--small")
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=REPOSITORY,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return {"error": f"stopped after {limit_s:.0f} s", "output": output[-2000:]}
    if process.returncode:
        return {"error": f"exit code {process.returncode}", "output": output[-2000:]}
    return {**json.loads(output.splitlines()[-1]), "seconds": round(time.monotonic() - began, 1)}


def write_results(out: Path, results: Figures) -> None:
    """Write gpu.json anew. The file is whole at any moment."""
    part = out / "gpu.json.part"
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(out / "gpu.json")


def print_figures(part: str, figures: Figures) -> None:
    for name, value in figures.items():
        line = f"{part:18} {name:36} {value}"
        if f"{part}/{name}" in PREDICTIONS:
            line += f"   predicted {PREDICTIONS[f'{part}/{name}']}"
        print(line, flush=True)


def measure_call_s(run: Callable[[], Any], count: int = 1) -> float:
    """Return the seconds of one call on the GPU, from `count` calls after a warm-up."""
    import torch

    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def compute_ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Return the median, the smallest and the largest of ours ÷ theirs over the rounds."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [median(ratios), round(min(ratios), 4), round(max(ratios), 4)]


def make_random_batches(batch: int) -> list[Any]:
    """Return four batches of noise in GPU memory: images [batch, 3, side, side] and labels."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, 3, SCALE.image_size, SCALE.image_size)
    images = [torch.randn(shape, device="cuda", generator=generator) for _ in range(4)]
    return [(part, torch.randint(CLASSES, (batch,), device="cuda")) for part in images]


def run_bare_loop(batch: int) -> float:
    """Train timm's net in a loop of plain PyTorch, in bf16; return seconds per step."""
    import timm
    import torch
    from torch.nn import functional as F

    net = timm.create_model(
        "vit_base_patch32_224", num_classes=CLASSES, **SCALE.timm_options
    ).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    batches = iter(CachedLoader(make_random_batches(batch), SCALE.warmup + SCALE.steps + 1))

    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()

    for _ in range(SCALE.warmup):
        step()
    return measure_call_s(step, SCALE.steps)


def run_lockstep(
    overrides: str,
    *,
    batch: int = SCALE.batch,
    cached: bool = True,
    watch: Any = None,
    warmup: int = SCALE.warmup,
    steps: int = SCALE.steps,
) -> float:
    """Train as `python src/train.py OVERRIDES` does; return seconds per step.

    Args:
        cached: replace the data by batches of noise in GPU memory.
        watch: as in `time_run`.
    """
    import torch

    all_steps = warmup + steps + 1
    if cached:
        images = 256 + 2 * batch
        stored_size = 32
    else:
        images = 256 + int(1.2 * all_steps * batch)
        stored_size = SCALE.image_size
    with tempfile.TemporaryDirectory() as scratch:
        run = [
            *SCALE.net,
            "data=synthetic",
            f"data.image_size={SCALE.image_size}",
            f"data.num_images={images}",
            f"data.stored_size={stored_size}",
            "data.num_test_images=40",
            f"data.global_batch_size={batch}",
            f"trainer.max_steps={all_steps}",
            *QUIET,
            *overrides.split(),
            *folder_overrides(scratch),
        ]
        if IMAGES in os.environ:
            run.append(f"paths.data_dir={os.environ[IMAGES]}")
        batches = make_random_batches(batch) if cached else None
        return time_run(run, warmup, steps, batches, watch, torch.cuda.synchronize)


def make_step_timer(overrides: str, **options: Any) -> Callable[[], float]:
    """Return a measurement for measure_in_turns: seconds per step of one training run."""
    return lambda: run_lockstep(f"{NO_CHECKPOINTS} {overrides}", **options)


def to_milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)


# --- parts


def measure_machine(out: Path) -> Figures:
    import torch

    fields = (
        "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,utilization.gpu,"
        "memory.used"
    )
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True)
    return {
        "nvidia_smi": answer.stdout.strip(),
        "device": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / GIB, 1),
    }


def measure_ceilings(out: Path) -> Figures:
    import torch

    side = SCALE.product_side
    a = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    burst = measure_call_s(lambda: a @ b, 20)
    sustained = measure_call_s(lambda: a @ b, max(1, int(SCALE.product_s / burst)))

    source = torch.empty(SCALE.copied_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = measure_call_s(lambda: target.copy_(source), 10)
    return {
        "copy_tb_per_s": round(2 * SCALE.copied_bytes / copy / 1e12, 2),
        "bf16_tflops": round(2 * side**3 / burst / 1e12, 1),
        "bf16_tflops_sustained": round(2 * side**3 / sustained / 1e12, 1),
    }


def measure_step(out: Path) -> Figures:
    """ViT-B/32 in bf16: a training step of Lockstep against a bare loop over timm's net."""
    bare, ours = measure_in_turns(
        SCALE.rounds, lambda: run_bare_loop(SCALE.batch), make_step_timer("trainer=gpu")
    )
    return {
        "bare_ms": to_milliseconds(median(bare)),
        "lockstep_ms": to_milliseconds(median(ours)),
        "lockstep_over_bare": compute_ratio(ours, bare),
        "lockstep_images_per_s": round(SCALE.batch / median(ours)),
        "share_of_ceiling": compute_share_of_ceiling(out, median(ours)),
    }


def compute_share_of_ceiling(out: Path, seconds: float) -> float | None:
    """Return the bf16 speed of a step of SCALE.batch images, as a share of the measured ceiling.

    It is None if the ceiling has not been measured.
    """
    path = out / "gpu.json"
    if not path.exists():
        return None
    ceiling = json.loads(path.read_text())["parts"].get("ceilings", {}).get("bf16_tflops")
    if not ceiling:
        return None
    return round(FLOP_OF_IMAGE / 1e12 * SCALE.batch / seconds / ceiling, 3)


def measure_data(out: Path) -> Figures:
    """Images that come from Lockstep's data path against batches that lie on the GPU."""
    figures = {}
    for stored, batch in ((32, SCALE.batch), (SCALE.image_size, SCALE.decoded_batch)):
        overrides = f"trainer=gpu data.stored_size={stored}"
        cached, decoded = measure_in_turns(
            2,
            make_step_timer(overrides, batch=batch),
            make_step_timer(overrides, batch=batch, cached=False),
        )
        figures[f"stored_at_{stored}_over_cached"] = compute_ratio(decoded, cached)
    return figures


class SynchronisationWatch:
    """Collect torch's warnings about calls for which the host waits."""

    def begin(self) -> None:
        import torch

        self.caught = warnings.catch_warnings(record=True)
        self.warnings = self.caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> None:
        import torch

        torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(None, None, None)

    def lines(self) -> Counter[str]:
        """Return how often each line of code has waited."""
        counts: Counter[str] = Counter()
        for warning in self.warnings:
            if "called a synchronizing" in str(warning.message):
                counts[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
        return counts


def measure_synchronisations(out: Path) -> Figures:
    """Synchronisations of host and GPU per step, between two rows of the log."""
    figures: Figures = {}
    for precision in ("bf16-mixed", "16-mixed"):
        watch = SynchronisationWatch()
        overrides = f"{NO_CHECKPOINTS} trainer=gpu trainer.precision={precision}"
        run_lockstep(overrides, batch=SCALE.small_batch, watch=watch)
        lines = watch.lines()
        figures[precision] = round(lines.total() / SCALE.steps, 2)
        figures[f"{precision}_lines"] = dict(lines.most_common(5))
    return figures


def measure_strategies(out: Path) -> Figures:
    """DDP and FSDP on one device, where only their overhead shows."""
    figures: Figures = {}
    for size, batch in (("small", SCALE.small_batch), ("large", SCALE.batch)):
        ddp, fsdp = measure_in_turns(
            2,
            make_step_timer("trainer=ddp trainer.devices=1", batch=batch),
            make_step_timer("trainer=fsdp trainer.devices=1", batch=batch),
        )
        figures[f"ddp_ms_{size}"] = to_milliseconds(median(ddp))
        figures[f"fsdp_ms_{size}"] = to_milliseconds(median(fsdp))
        figures[f"fsdp_over_ddp_{size}"] = compute_ratio(fsdp, ddp)
    return figures


def measure_compiled(out: Path) -> Figures:
    """torch.compile against eager: bf16-mixed, weights in bf16, FSDP, and CUDA graphs."""
    gpu = "trainer=gpu trainer.compile"
    fsdp = "trainer=fsdp trainer.devices=1 trainer.compile"
    variants = {
        "eager": (f"{gpu}=false", SCALE.batch),
        "compiled": (f"{gpu}=true", SCALE.batch),
        "bf16_true": (f"{gpu}=true trainer.precision=bf16-true", SCALE.batch),
        "fsdp": (f"{fsdp}=false", SCALE.batch),
        "fsdp_compiled": (f"{fsdp}=true", SCALE.batch),
        "eager_small": (f"{gpu}=false", SCALE.small_batch),
        "graphs_small": (f"{gpu}={{mode:reduce-overhead}}", SCALE.small_batch),
    }
    # The first run of a process also imports.
    run_lockstep(f"{NO_CHECKPOINTS} trainer=gpu", warmup=1, steps=1)
    figures: Figures = {}
    for name, (overrides, batch) in variants.items():
        began = time.perf_counter()
        seconds = run_lockstep(
            f"{NO_CHECKPOINTS} {overrides}", batch=batch, warmup=SCALE.compiled_warmup
        )
        figures[f"{name}_ms"] = to_milliseconds(seconds)
        # This time includes the compilation.
        figures[f"{name}_whole_s"] = round(time.perf_counter() - began, 1)

    pairs = {
        "": ("compiled", "eager"),
        "bf16_true_": ("bf16_true", "eager"),
        "fsdp_": ("fsdp_compiled", "fsdp"),
        "graphs_": ("graphs_small", "eager_small"),
    }
    for name, (a, b) in pairs.items():
        figures[f"{name}over_eager"] = round(figures[f"{a}_ms"] / figures[f"{b}_ms"], 3)
    for name in ("compiled", "bf16_true"):
        share = compute_share_of_ceiling(out, figures[f"{name}_ms"] / 1000)
        figures[f"{name}_share_of_ceiling"] = share
    return figures


def measure_memory(out: Path) -> Figures:
    """The largest batch that a search finds on a device of 40 GiB, against the estimate."""
    search = find_largest_batch()
    estimate = find_largest_batch("--estimate")
    return {
        "search": search,
        "estimate": estimate,
        "search_over_estimate": round(search / estimate, 3),
    }


def find_largest_batch(*flags: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "src/find_batch_size.py",
            *flags,
            *SCALE.net,
            "data=synthetic",
            f"data.image_size={SCALE.image_size}",
            "data.stored_size=32",
            "trainer=gpu",
            f"trainer.memory_limit_gib={SCALE.device_gib}",
            *folder_overrides(scratch),
            f"paths.data_dir={os.environ.get(IMAGES, scratch)}",
        ]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    match = re.search(r"largest batch (\d+)", done.stdout)
    if done.returncode or not match:
        raise RuntimeError(done.stdout + done.stderr)
    return int(match[1])


def measure_checkpoints(out: Path) -> Figures:
    """Seconds that training waits for a checkpoint, against a copy of its bytes to the host."""
    import torch

    steps = SCALE.checkpoints * SCALE.checkpoint_steps

    def seconds(overrides: str) -> float:
        epochs = f"trainer.limit_train_batches={SCALE.checkpoint_steps} trainer.max_epochs=9"
        step_s = run_lockstep(
            f"trainer=gpu {epochs} {overrides}", warmup=SCALE.checkpoint_steps // 2, steps=steps
        )
        return step_s * steps

    state = torch.empty(SCALE.checkpoint_mib * MIB, dtype=torch.uint8, device="cuda")
    copy = measure_call_s(state.cpu, 2)
    synchronous, asynchronous, without = measure_in_turns(
        1,
        lambda: seconds("callbacks.checkpoints.asynchronous=false"),
        lambda: seconds("callbacks.checkpoints.asynchronous=true"),
        lambda: seconds(NO_CHECKPOINTS),
    )
    figures = {"copy_s": round(copy, 3)}
    for name, measured in (("synchronous", synchronous), ("asynchronous", asynchronous)):
        stall = (median(measured) - median(without)) / SCALE.checkpoints
        figures[f"{name}_s"] = round(stall, 3)
        figures[f"{name}_over_copy"] = round(stall / copy, 2)
    return figures


def measure_cifar10(out: Path) -> Figures:
    """airbench's recipe: 200 steps of 2,000 images without evaluation, by us and by its script."""
    import torch

    if CIFAR10 not in os.environ or AIRBENCH not in os.environ:
        return {"skipped": "needs --cifar10 and --airbench"}
    root = Path(os.environ[CIFAR10])
    recipe = [
        "experiment=cifar10_speedrun",
        "trainer=gpu",
        f"data.root={root}",
        "data.global_batch_size=2000",
        "optimizer.lr=0.24",
        "optimizer.vector_lr=106",
        "trainer.max_epochs=8",
        "trainer.compile=false",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        record = train_for_record(scratch, recipe)
        overrides = [*recipe, *QUIET, NO_CHECKPOINTS, *folder_overrides(scratch)]
        # An epoch has 24 steps.
        seconds = time_run(overrides, 24, 144, None, None, torch.cuda.synchronize)
        rows = run_airbench(Path(scratch), root)
    theirs = median([float(row[6]) for row in rows if row[2] == "7"][1:])
    ours = 200 * seconds
    return {
        "lockstep_s": round(ours, 3),
        "airbench_s": theirs,
        "lockstep_over_airbench": round(ours / theirs, 3),
        "accuracy": record["metrics"]["test/acc"],
        "fit_s": round(record["fit_seconds"], 2),
        "airbench_accuracy": [float(row[5]) for row in rows if row[2] == "eval"][1:],
    }


def run_airbench(scratch: Path, root: Path) -> list[list[str]]:
    """Run airbench's script: a warm-up and three runs; return the cells of its table.

    It is not compiled, which would take minutes.
    """
    script = Path(os.environ[AIRBENCH]).read_text()
    script = script.replace("range(200)", "range(3)")
    script = script.replace('model.compile(mode="max-autotune")', "")
    (scratch / "airbench.py").write_text(script)
    (scratch / "cifar10").mkdir()
    (scratch / "cifar10" / "cifar-10-batches-py").symlink_to(root / "cifar-10-batches-py")
    printed = run_for_output([sys.executable, "airbench.py"], cwd=scratch)
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [list(map(str.strip, line.split("|"))) for line in lines]


class ProfilerWatch:
    """Run torch's profiler over the steps that are timed."""

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.profiler.start()

    def end(self) -> None:
        self.profiler.stop()


def measure_profile(out: Path) -> Figures:
    """The kernels that take the most time in a step of Lockstep."""
    steps = 3
    watch = ProfilerWatch()
    seconds = run_lockstep(f"{NO_CHECKPOINTS} trainer=gpu", watch=watch, steps=steps)
    # An operator may have several events.
    microseconds: Counter[str] = Counter()
    for event in watch.profiler.key_averages():
        microseconds[event.key] += event.self_device_time_total / steps
    return {
        "step_ms": to_milliseconds(seconds),
        "kernels_ms": round(microseconds.total() / 1000, 2),
        "by_operator_ms": {
            name: round(time / 1000, 2) for name, time in microseconds.most_common(15)
        },
    }


@dataclass(frozen=True)
class Part:
    """A part of the measurements.

    Args:
        measure: takes the folder of the results and returns figures.
        limit_s: the most seconds that it may take.
    """

    measure: Callable[[Path], Figures]
    limit_s: float


PARTS = {
    "machine": Part(measure_machine, 30),
    "ceilings": Part(measure_ceilings, 60),
    "step": Part(measure_step, 110),
    "synchronisations": Part(measure_synchronisations, 50),
    "data": Part(measure_data, 150),
    "strategies": Part(measure_strategies, 90),
    "checkpoints": Part(measure_checkpoints, 90),
    "compiled": Part(measure_compiled, 220),
    "memory": Part(measure_memory, 180),
    "profile": Part(measure_profile, 60),
    "cifar10": Part(measure_cifar10, 150),
}

if __name__ == "__main__":
    main()
