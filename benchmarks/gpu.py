"""Measure one GPU in ten minutes: ceilings, a training step, data, strategies, memory, checkpoints.

    python benchmarks/gpu.py --out results --budget 560      # make bench-gpu
    python benchmarks/gpu.py --out results --only step,data
    python benchmarks/gpu.py --out results --small           # tiny nets, few steps: a dry run on a
    simulated GPU python benchmarks/gpu.py --out results --only cifar10 --cifar10 FOLDER --airbench
    airbench94_muon.py

Each part runs in a process of its own under a time limit. Its figures are in OUT/gpu.json as soon
as it ends, so that a run that is cut short keeps them. Both sides of a ratio run in turns on the
same card; a ratio is the median over the rounds, beside the smallest and the largest. The
predictions for an H100 were written before any measurement. Needs neither a network nor git.
Without internet access bring hydra-core, omegaconf and antlr4-python3-runtime.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import REPOSITORY, in_turns, median, output_of, places, run_record
from step_time import Cached, timed_run

SMALL = "--small" in sys.argv
BATCH = 8 if SMALL else 1024
SMALL_BATCH = 4 if SMALL else 64  # the host launches kernels more slowly than the GPU runs them
WARMUP, STEPS = (1, 2) if SMALL else (5, 20)
ROUNDS = 2 if SMALL else 3
SIZE = 32 if SMALL else 224
CLASSES = 10
NET = (
    "model=vit_tiny_32 model.depth=2 model.embed_dim=48"
    if SMALL
    else "model=vit model.pretrained=false"
)
QUIET = "test=false trainer.limit_val_batches=0 trainer.log_every_n_steps=1000 trainer.num_sanity_val_steps=0 quiet=true"
NO_CHECKPOINTS = "callbacks.checkpoints=null"
IMAGES = "GPU_BENCHMARK_IMAGES"  # the environment's name of the folder where the parts keep generated images
CIFAR10, AIRBENCH = "GPU_BENCHMARK_CIFAR10", "GPU_BENCHMARK_AIRBENCH"  # of --cifar10 and --airbench
PREDICTIONS = {
    "ceilings/copy_tb_per_s": "3.0", "ceilings/bf16_tflops": "798", "step/lockstep_over_bare": "≤ 1.02",
    "step/lockstep_images_per_s": "11,100 to 12,500", "step/share_of_ceiling": "0.36 to 0.41 (goal 0.45)",
    "data/stored_at_32_over_cached": "≤ 1.02", "data/stored_at_224_over_cached": "1.02 to 1.05",
    "synchronisations/bf16-mixed": "0", "synchronisations/16-mixed": "0 (goal), 1 a step from GradScaler",
    "strategies/fsdp_over_ddp_large": "< 1.1", "strategies/fsdp_over_ddp_small": "1.5 to 2.6",
    "compiled/over_eager": "0.8", "compiled/bf16_true_over_eager": "0.65", "compiled/fsdp_over_eager": "0.8",
    "memory/search_over_estimate": "0.95 to 1.05",
    "checkpoints/synchronous_over_copy": "5 to 20", "checkpoints/asynchronous_over_copy": "≤ 1.2",
    "cifar10/lockstep_over_airbench": "≤ 1.3",
}  # fmt: skip


def main() -> None:
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
    parser.add_argument(
        "--part", help=argparse.SUPPRESS
    )  # one part, in the process that is measured
    options = parser.parse_args()
    if options.part:
        print("\n" + json.dumps(PARTS[options.part][0](options.out)))
        return
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.budget
    results: dict[str, Any] = {"small": options.small, "parts": {}}
    with tempfile.TemporaryDirectory() as images:
        os.environ[IMAGES] = images  # generated once
        given = {CIFAR10: options.cifar10, AIRBENCH: options.airbench}
        os.environ |= {name: str(Path(path).resolve()) for name, path in given.items() if path}
        for name in chosen:
            limit_s = min(
                PARTS[name][1] * (5 if SMALL else 1), ends - time.monotonic()
            )  # a simulated GPU is slow
            results["parts"][name] = (
                run_part(name, options.out, limit_s) if limit_s > 5 else {"skipped": "no time left"}
            )
            part = options.out / "gpu.json.part"
            part.write_text(json.dumps(results, indent=1) + "\n")
            part.replace(options.out / "gpu.json")
            for figure, value in results["parts"][name].items():
                predicted = PREDICTIONS.get(f"{name}/{figure}")
                print(
                    f"{name:18} {figure:36} {value}"
                    + (f"   predicted {predicted}" if predicted else ""),
                    flush=True,
                )
    if failed := [name for name, figures in results["parts"].items() if "error" in figures]:
        sys.exit(f"Not measured: {', '.join(failed)}")


def run_part(name: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Run one part in a process group of its own and return its figures, or how it failed."""
    command = [
        sys.executable,
        __file__,
        "--part",
        name,
        "--out",
        str(out),
        *(["--small"] if SMALL else []),
    ]
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
        return {
            "error": f"stopped after {limit_s:.0f} s",
            "output": process.communicate()[0][-2000:],
        }
    if process.returncode:
        return {"error": f"exit code {process.returncode}", "output": output[-2000:]}
    return {**json.loads(output.splitlines()[-1]), "seconds": round(time.monotonic() - began, 1)}


def per_step(run: Callable[[], Any], count: int = 1) -> float:
    """Return the seconds of one call on the GPU, from `count` calls after a warm-up."""
    import torch

    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Return the median, the smallest and the largest of ours ÷ theirs over the rounds."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [median(ratios), round(min(ratios), 4), round(max(ratios), 4)]


def random_batches(batch: int) -> list[Any]:
    """Return four batches of noise in GPU memory: images of shape [batch, 3, SIZE, SIZE] and
    labels.
    """
    import torch

    made, shape = torch.Generator("cuda").manual_seed(0), (batch, 3, SIZE, SIZE)
    images = [torch.randn(shape, device="cuda", generator=made) for _ in range(4)]
    return [(each, torch.randint(CLASSES, (batch,), device="cuda")) for each in images]


def bare_loop(batch: int) -> float:
    """Train timm's net in a loop of plain PyTorch, in bf16; return seconds per step."""
    import timm
    import torch
    from torch.nn import functional as F

    own = (
        {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 4, "img_size": SIZE}
        if SMALL
        else {}
    )
    net = timm.create_model("vit_base_patch32_224", num_classes=CLASSES, **own).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    batches = iter(Cached(random_batches(batch), WARMUP + STEPS + 1))

    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    return per_step(step, STEPS)


def lockstep_run(
    words: str, *, batch: int = BATCH, cached: bool = True, watch: Any = None, warmup: int = WARMUP, steps: int = STEPS
) -> float:  # fmt: skip
    """Train as `python src/train.py WORDS` does; return seconds per step.

    Args:
        cached: replace the data by batches of noise in GPU memory.
        watch: as of `timed_run`.
    """
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        total = warmup + steps + 1
        count, size = (256 + 2 * batch, 32) if cached else (256 + int(1.2 * total * batch), SIZE)
        overrides = [*NET.split(), "data=synthetic", f"data.image_size={SIZE}", f"data.num_images={count}",
                     f"data.stored_size={size}", "data.num_test_images=40", f"data.global_batch_size={batch}",
                     f"trainer.max_steps={total}", *QUIET.split(), *words.split(), *places(scratch)]  # fmt: skip
        if IMAGES in os.environ:
            overrides += [f"paths.data_dir={os.environ[IMAGES]}"]
        batches = random_batches(batch) if cached else None
        return timed_run(overrides, warmup, steps, batches, watch, torch.cuda.synchronize)


def seconds_of(words: str, **options: Any) -> Callable[[], float]:
    """Return a measurement for in_turns: seconds per step of one training run."""
    return lambda: lockstep_run(f"{NO_CHECKPOINTS} {words}", **options)


def machine(out: Path) -> dict[str, Any]:
    import torch

    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,utilization.gpu,memory.used"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True)
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    return {
        "nvidia_smi": asked.stdout.strip(), "device": torch.cuda.get_device_name(), "cores": os.cpu_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())), **versions,
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
    }  # fmt: skip


def ceilings(out: Path) -> dict[str, Any]:
    import torch

    side, size = (64, 2**20) if SMALL else (8192, 2**32)
    seconds = 0.01 if SMALL else 10.0
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    burst = per_step(lambda: a @ b, 20)
    sustained = per_step(lambda: a @ b, max(1, int(seconds / burst)))
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in "st")
    copy = per_step(lambda: target.copy_(source), 10)
    return {
        "copy_tb_per_s": round(2 * size / copy / 1e12, 2), "bf16_tflops": round(2 * side**3 / burst / 1e12, 1),
        "bf16_tflops_sustained": round(2 * side**3 / sustained / 1e12, 1),
    }  # fmt: skip


def step(out: Path) -> dict[str, Any]:
    """ViT-B/32 in bf16: a training step of Lockstep against a bare loop over timm's net."""
    bare, ours = in_turns(ROUNDS, lambda: bare_loop(BATCH), seconds_of("trainer=gpu"))
    return {
        "bare_ms": round(1000 * median(bare), 2), "lockstep_ms": round(1000 * median(ours), 2),
        "lockstep_over_bare": ratio(ours, bare), "lockstep_images_per_s": round(BATCH / median(ours)),
        "share_of_ceiling": share_of_ceiling(out, median(ours)),
    }  # fmt: skip


def share_of_ceiling(out: Path, seconds: float) -> float | None:
    """Return the share of the measured bf16 products that a step of BATCH images does.

    None if they are not known.
    """
    measured = (
        json.loads((out / "gpu.json").read_text())["parts"] if (out / "gpu.json").exists() else {}
    )
    ceiling = measured.get("ceilings", {}).get("bf16_tflops")
    return ceiling and round(
        26.2e-3 * BATCH / seconds / ceiling, 3
    )  # 26.2 GFLOP per image, forward and backward


def data(out: Path) -> dict[str, Any]:
    """Images that come from Lockstep's data path against batches that lie on the GPU."""
    found = {}
    for stored, batch in (
        (32, BATCH),
        (SIZE, 8 if SMALL else 256),
    ):  # a thousand images of 224 px take 150 MB
        words = f"trainer=gpu data.stored_size={stored}"
        cached, own = in_turns(
            2, seconds_of(words, batch=batch), seconds_of(words, batch=batch, cached=False)
        )
        found[f"stored_at_{stored}_over_cached"] = ratio(own, cached)
    return found


def synchronisations(out: Path) -> dict[str, Any]:
    """Synchronisations of host and GPU per step, between two rows of the log."""
    import torch

    class Watch:
        def begin(self) -> None:
            self.caught = warnings.catch_warnings(record=True)
            self.seen = self.caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

        def end(self) -> None:
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)

    found: dict[str, Any] = {}
    for precision in ("bf16-mixed", "16-mixed"):
        watch = Watch()
        lockstep_run(
            f"{NO_CHECKPOINTS} trainer=gpu trainer.precision={precision}",
            batch=SMALL_BATCH,
            watch=watch,
        )
        told = (one for one in watch.seen if "called a synchronizing" in str(one.message))
        lines = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in told)
        found[precision] = round(sum(lines.values()) / STEPS, 2)
        found[f"{precision}_lines"] = dict(lines.most_common(5))
    return found


def strategies(out: Path) -> dict[str, Any]:
    """DDP and FSDP on one device, where only their overhead shows."""
    found: dict[str, Any] = {}
    for size, batch in (("small", SMALL_BATCH), ("large", BATCH)):
        names = ("ddp", "fsdp")
        measures = [seconds_of(f"trainer={name} trainer.devices=1", batch=batch) for name in names]
        seconds = dict(zip(names, in_turns(2, *measures), strict=True))
        found |= {
            f"{name}_ms_{size}": round(1000 * median(values), 2) for name, values in seconds.items()
        }
        found[f"fsdp_over_ddp_{size}"] = ratio(seconds["fsdp"], seconds["ddp"])
    return found


def compiled(out: Path) -> dict[str, Any]:
    """torch.compile against eager: in bf16-mixed, with weights in bf16, under FSDP, and with CUDA
    graphs.
    """
    gpu, fsdp = "trainer=gpu trainer.compile", "trainer=fsdp trainer.devices=1 trainer.compile"
    variants = {
        "eager": (f"{gpu}=false", BATCH), "compiled": (f"{gpu}=true", BATCH),
        "bf16_true": (f"{gpu}=true trainer.precision=bf16-true", BATCH), "fsdp": (f"{fsdp}=false", BATCH),
        "fsdp_compiled": (f"{fsdp}=true", BATCH), "eager_small": (f"{gpu}=false", SMALL_BATCH),
        "graphs_small": (f"{gpu}={{mode:reduce-overhead}}", SMALL_BATCH),
    }  # fmt: skip
    lockstep_run(
        f"{NO_CHECKPOINTS} trainer=gpu", warmup=1, steps=1
    )  # the first run of a process imports
    found: dict[str, Any] = {}
    for name, (words, batch) in variants.items():
        began = time.perf_counter()
        seconds = lockstep_run(
            f"{NO_CHECKPOINTS} {words}", batch=batch, warmup=WARMUP if SMALL else 12
        )
        found[f"{name}_ms"] = round(1000 * seconds, 2)
        found[f"{name}_whole_s"] = round(time.perf_counter() - began, 1)  # with the compilation
    pairs = {"": ("compiled", "eager"), "bf16_true_": ("bf16_true", "eager"), "fsdp_": ("fsdp_compiled", "fsdp"),
             "graphs_": ("graphs_small", "eager_small")}  # fmt: skip
    ratios = {
        f"{name}over_eager": round(found[f"{a}_ms"] / found[f"{b}_ms"], 3)
        for name, (a, b) in pairs.items()
    }
    shares = {f"{name}_share_of_ceiling": share_of_ceiling(out, found[f"{name}_ms"] / 1000)
              for name in ("compiled", "bf16_true")}  # fmt: skip
    return {**found, **ratios, **shares}


def memory(out: Path) -> dict[str, Any]:
    """The largest batch that a search finds on a device of 40 GiB, against the estimate."""
    largest: dict[str, int] = {}
    for how in ("search", "estimate"):
        words = [
            *NET.split(),
            "data=synthetic",
            f"data.image_size={SIZE}",
            "data.stored_size=32",
            "trainer=gpu",
        ]
        words += [f"trainer.memory_limit_gib={1 if SMALL else 40}"]
        with tempfile.TemporaryDirectory() as scratch:
            command = [
                sys.executable,
                "src/find_batch_size.py",
                *(["--estimate"] if how == "estimate" else []),
            ]
            command += [
                *words,
                *places(scratch),
                f"paths.data_dir={os.environ.get(IMAGES, scratch)}",
            ]
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        said = re.search(r"largest batch (\d+)", done.stdout)
        if done.returncode or not said:
            raise RuntimeError(done.stdout + done.stderr)
        largest[how] = int(said[1])
    return {**largest, "search_over_estimate": round(largest["search"] / largest["estimate"], 3)}


def checkpoints(out: Path) -> dict[str, Any]:
    """Seconds that training waits for a checkpoint, against a copy of the same bytes to the
    host.
    """
    import torch

    length, saves = (
        (2, 1) if SMALL else (20, 2)
    )  # batches of an epoch, and saves between the first and the last step
    own = f"trainer=gpu trainer.limit_train_batches={length} trainer.max_epochs=9"
    options = {"warmup": length // 2, "steps": saves * length}

    def steps(words: str) -> float:
        return lockstep_run(f"{own} {words}", **options) * options["steps"]

    state = torch.empty(
        (4 if SMALL else 1050) * 2**20, dtype=torch.uint8, device="cuda"
    )  # weights and two moments
    copy = per_step(state.cpu, 2)
    kinds = (
        "callbacks.checkpoints.asynchronous=false",
        "callbacks.checkpoints.asynchronous=true",
        NO_CHECKPOINTS,
    )
    synchronous, asynchronous, without = in_turns(1, *(lambda own=own: steps(own) for own in kinds))
    kinds_of = {"synchronous": synchronous, "asynchronous": asynchronous}
    stalls = {
        name: (median(seconds) - median(without)) / saves for name, seconds in kinds_of.items()
    }
    return {
        "copy_s": round(copy, 3), **{f"{name}_s": round(value, 3) for name, value in stalls.items()},
        **{f"{name}_over_copy": round(value / copy, 2) for name, value in stalls.items()},
    }  # fmt: skip


def cifar10(out: Path) -> dict[str, Any]:
    """airbench's recipe, 200 steps of 2,000 images without evaluation: our seconds against those of
    its own script.
    """
    import torch

    if not (CIFAR10 in os.environ and AIRBENCH in os.environ):
        return {"skipped": "needs --cifar10 and --airbench"}
    root, script = Path(os.environ[CIFAR10]), Path(os.environ[AIRBENCH]).read_text()
    recipe = ["experiment=cifar10_speedrun", "trainer=gpu", f"data.root={root}", "data.global_batch_size=2000",
              "optimizer.lr=0.24", "optimizer.vector_lr=106", "trainer.max_epochs=8",
              "trainer.compile=false"]  # fmt: skip
    # A warm-up and three runs; its compilation would take minutes
    script = script.replace("range(200)", "range(3)").replace(
        'model.compile(mode="max-autotune")', ""
    )
    with tempfile.TemporaryDirectory() as scratch:
        record = run_record(scratch, recipe)
        words = [*recipe, *QUIET.split(), NO_CHECKPOINTS, *places(scratch)]
        ours = 200 * timed_run(
            words, 24, 144, None, None, torch.cuda.synchronize
        )  # 24 steps are an epoch
        Path(scratch, "cifar10").mkdir()
        Path(scratch, "cifar10", "cifar-10-batches-py").symlink_to(root / "cifar-10-batches-py")
        Path(scratch, "airbench.py").write_text(script)
        printed = output_of([sys.executable, "airbench.py"], cwd=Path(scratch))
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in printed.splitlines()
        if line.startswith("|")
    ]
    theirs = median([float(row[6]) for row in rows if row[2] == "7"][1:])
    return {
        "lockstep_s": round(ours, 3), "airbench_s": theirs, "lockstep_over_airbench": round(ours / theirs, 3),
        "accuracy": record["metrics"]["test/acc"], "fit_s": round(record["fit_seconds"], 2),
        "airbench_accuracy": [float(row[5]) for row in rows if row[2] == "eval"][1:],
    }  # fmt: skip


def profile(out: Path) -> dict[str, Any]:
    """The kernels that take the most time in a step of Lockstep."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    class Watch:
        def begin(self) -> None:
            self.profiler = profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profiler.start()

        def end(self) -> None:
            self.profiler.stop()

    watch = Watch()
    seconds = lockstep_run(f"{NO_CHECKPOINTS} trainer=gpu", watch=watch, steps=3)
    events = sorted(watch.profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / 3 / 1000
    return {
        "step_ms": round(1000 * seconds, 2), "kernels_ms": round(busy, 2),
        "by_operator_ms": {e.key: round(e.self_device_time_total / 3 / 1000, 2) for e in events[:15]},
    }  # fmt: skip


PARTS: dict[str, tuple[Callable[[Path], dict[str, Any]], float]] = {  # with the most seconds that each may take
    "machine": (machine, 30), "ceilings": (ceilings, 60), "step": (step, 110),
    "synchronisations": (synchronisations, 50), "data": (data, 150), "strategies": (strategies, 90),
    "checkpoints": (checkpoints, 90), "compiled": (compiled, 220), "memory": (memory, 180), "profile": (profile, 60),
    "cifar10": (cifar10, 150),
}  # fmt: skip

if __name__ == "__main__":
    main()
