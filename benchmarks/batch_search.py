"""Tables of the batch search: found against every batch tried, DDP against FSDP, against Lightning's finder.

    python benchmarks/batch_search.py                  CPU ranks that play a small device (--exhaustive: 20 minutes)
    python benchmarks/batch_search.py --gpu            vit_base_patch32_224 on this machine's GPU

Writes benchmarks/results/batch_search.json, where rows that are not measured this time stay, and
logbook/measurements/batch_search.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "harness")]
RESULTS, PAGE = (
    ROOT / "benchmarks" / "results" / "batch_search.json",
    ROOT / "logbook" / "measurements" / "batch_search.md",
)

GIB = 2**30
DATA = ["data=synthetic", "data.num_images=6000", "data.num_test_images=100", "data.eval_batch_size=32"]
MODELS = {  # options, GiB of the device played
    "vit_tiny_32": (["model=vit_tiny_32"], 0.3),
    "small_cnn": (["model=small_cnn"], 0.1),
    "alexnet": (["model=alexnet", "data.image_size=64", "optimizer=sgd"], 0.86),
    "alexnet_bn": (["model=alexnet_bn", "data.image_size=127", "optimizer=sgd"], 0.95),
    "vit_base_patch32": (["model=vit", "model.pretrained=false", "data.image_size=64"], 2.0),
}
RANKS = {"cpu": 1, "ddp_sim": 2, "fsdp_sim": 2}
ON_GPU = [
    "data=synthetic", "data.num_images=60000", "data.stored_size=32", "data.image_size=224", "model=vit",
    "model.pretrained=false",
]  # fmt: skip
HEAD = """# Largest batch

Written by `python benchmarks/batch_search.py --exhaustive`; do not edit. CPU ranks play devices with little memory
(`trainer.memory_limit_gib`: bytes of live tensors as torch's MemTracker counts them). *Most* is the largest batch that
stays within the limit when each one from just below the found to where it would be 5 % too small is run without a
limit. *Prediction error* is that of the line through the two small probes, as a share of the limit.
"""


def search(options: list[str], folder: Path, ranks: int) -> dict[str, Any]:
    from lockstep.batch_size.sessions import find_largest
    from lockstep.distributed.cluster import Cluster
    from memory_runs import composed

    config = composed(options, folder)
    cluster = Cluster("none", 1, ranks, 0, None if ranks > 1 else 0, "127.0.0.1", None)
    return find_largest(config, cluster, dict(os.environ)).record()


def most(options: list[str], folder: Path, ranks: int, found: int, limit_gib: float) -> int:
    """Try every batch from just below the found to where it would be 5 % too small, on ranks without a limit."""
    from memory_runs import composed, peaks

    batches = list(range(max(1, found - 2), int(found / 0.95) + 2))
    measured = peaks(composed(options, folder), folder, ranks, batches)
    largest = [max(max(rank[i].values()) for rank in measured) for i in range(len(batches))]
    return max((b for b, size in zip(batches, largest, strict=True) if size <= limit_gib * GIB), default=0)


def simulated(model: str, trainer: str, exhaustive: bool) -> dict[str, Any]:
    options, limit = MODELS[model]
    every = [*DATA, *options, f"trainer={trainer}"]
    limited = [*every, f"trainer.memory_limit_gib={limit}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = search(limited, folder, RANKS[trainer])
        best = most(every, folder, RANKS[trainer], fields["per_device"], limit) if exhaustive else None
        theirs = in_own_process(limited) if exhaustive and trainer == "cpu" else {}
    return {"model": model, "trainer": trainer, **fields, "most": best, **theirs}


def in_own_process(options: list[str]) -> dict[str, Any]:
    """Lightning's finder with a whole process's start in its seconds, as ours has those of its children."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--lightning", *options]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        return {"lightning_error": answer.stderr.strip().splitlines()[-1][:200]}
    fields = json.loads(answer.stdout.strip().splitlines()[-1])
    return {**fields, "lightning_seconds": round(time.perf_counter() - began, 2)}


def lightning_finder(options: list[str]) -> dict[str, Any]:
    """Lightning's BatchSizeFinder (binary search, as it is by default) in one process: what it returns, and its runs.

    On the CPU our tracker's limit says that memory is out in the words that Lightning listens for.
    """
    import torch
    from lightning.pytorch.tuner import Tuner
    from lightning.pytorch.tuner import batch_size_scaling as scaling

    from lockstep.batch_size.memory import OutOfTrackedMemory, TrackedBytes, untracked
    from lockstep.distributed.cluster import Cluster
    from lockstep.training import build as assemble
    from memory_runs import composed

    class InItsWords(TrackedBytes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except OutOfTrackedMemory as error:
                raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: {error}") from None

    with tempfile.TemporaryDirectory() as name:
        config, cluster = composed(options, Path(name)), Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)
        config["data"]["global_batch_size"] = 8
        device = torch.device("cuda", 0) if config["trainer"]["accelerator"] == "gpu" else torch.device("cpu")
        data = assemble.build_data(config, cluster, device)
        tried: list[int] = []
        make = data.train_dataloader
        data.train_dataloader = lambda: tried.append(data.global_batch_size) or make()

        def run() -> int:
            module = assemble.build_module(config, assemble.data_facts(data))
            trainer = assemble.build_trainer(config, cluster, [], [], Path(name))
            finder = {"mode": "binsearch", "batch_arg_name": "global_batch_size", "init_val": 8}
            return int(Tuner(trainer).scale_batch_size(module, datamodule=data, **finder) or 0)

        if device.type == "cuda":
            size = run()
        else:
            meter, try_batch = InItsWords(), scaling._try_loop_run

            def within_the_limit(*arguments: Any) -> None:
                meter.limit = int(config["trainer"]["memory_limit_gib"] * GIB)
                try:
                    try_batch(*arguments)
                finally:
                    meter.limit = None  # what it restores after its search is not held against it

            scaling._try_loop_run = within_the_limit
            with meter, untracked(data, meter):
                size = run()
    return {"lightning_batch": size, "lightning_probes": len(dict.fromkeys(tried))}


def page(rows: dict[str, dict[str, Any]]) -> str:
    lines = [HEAD]
    lines += ["| model | trainer | limit GiB | largest | most | probes | out of memory | s | peak GiB | prediction |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    lines += [row(fields) for fields in rows.values()]
    checked = [fields for fields in rows.values() if fields.get("most") is not None]
    if checked:
        lines += ["", *goals(checked)]
    lines += ["", *fsdp_against_ddp(rows), "", *against_lightning(rows)]
    return "\n".join(lines) + "\n"


def row(fields: dict[str, Any]) -> str:
    error = fields["prediction_error"]
    cells = [fields["model"], fields["trainer"], f"{fields['limit_gib']:.3g}", fields["per_device"]]
    cells += ["–" if fields["most"] is None else fields["most"], fields["probes"], fields["out_of_memory"]]
    cells += [f"{fields['seconds']:.0f}", f"{fields['peak_memory_gib']:.3f}"]
    return "| " + " | ".join(str(cell) for cell in [*cells, "–" if error is None else f"{error:+.2%}"]) + " |"


def goals(rows: list[dict[str, Any]]) -> list[str]:
    above = sum(fields["per_device"] > fields["most"] for fields in rows)
    below = max(1 - fields["per_device"] / max(fields["most"], 1) for fields in rows)
    probes = max(fields["probes"] for fields in rows)
    ran_out = max(fields["out_of_memory"] for fields in rows)
    found = [
        ("rows above the true maximum", "0", str(above), above == 0),
        ("below the true maximum, at most", "5 %", f"{below:.1%}", below <= 0.05),
        ("probes, at most", "6", str(probes), probes <= 6),
        ("out of memory, at most", "2", str(ran_out), ran_out <= 2),
    ]
    lines = ["| goal, over all rows tried exhaustively | wanted | measured | |", "|---|---|---|---|"]
    return lines + [f"| {' | '.join(goal[:3])} | {'holds' if goal[3] else 'not reached'} |" for goal in found]


def fsdp_against_ddp(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["Under the same limit, two ranks:", "", "| model | ddp_sim | fsdp_sim | FSDP's over DDP's |"]
    lines.append("|---|---|---|---|")
    for model in MODELS:
        ddp, fsdp = (rows.get(f"{model} {trainer}") for trainer in ("ddp_sim", "fsdp_sim"))
        if ddp and fsdp:
            ratio = fsdp["per_device"] / ddp["per_device"]
            lines.append(f"| {model} | {ddp['per_device']} | {fsdp['per_device']} | {ratio:.2f} × |")
    return lines


def against_lightning(rows: dict[str, dict[str, Any]]) -> list[str]:
    compared = [fields for fields in rows.values() if "lightning_batch" in fields]
    lines = [
        "Lightning's BatchSizeFinder (binary search, first batch 8 like ours, otherwise as it is by default) in one "
        "process, whose start is in its seconds as that of our children is in ours. It refuses several ranks.",
        "", "| model | ours | s | Lightning's | batches tried | s | ours takes |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for fields in compared:
        ratio = fields["seconds"] / fields["lightning_seconds"]
        cells = [fields["model"], fields["per_device"], f"{fields['seconds']:.0f}", fields["lightning_batch"]]
        cells += [fields["lightning_probes"], f"{fields['lightning_seconds']:.0f}", f"{ratio:.2f} ×"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    slow = [f["model"] for f in compared if f["seconds"] > 0.5 * f["lightning_seconds"]]
    lines += ["", f"Goal at most half its time: {'not reached for ' + ', '.join(slow) if slow else 'holds'}."]
    return lines if compared else []


def measure(arguments: argparse.Namespace) -> None:
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    cases = [(model, trainer) for model in arguments.models for trainer in arguments.trainers]
    if arguments.gpu:
        cases = [("vit_base_patch32_224", "gpu"), ("vit_base_patch32_224", "fsdp")]
    for model, trainer in cases:
        if arguments.gpu:
            options = [*ON_GPU, f"trainer={trainer}", *(["trainer.devices=1"] if trainer == "fsdp" else [])]
            with tempfile.TemporaryDirectory() as name:
                found = search(options, Path(name), 1)
            theirs = in_own_process(options) if trainer == "gpu" else {}
            fields = {"model": model, "trainer": trainer, **found, "most": None, **theirs}
        else:
            fields = simulated(model, trainer, arguments.exhaustive)
        print(row(fields), {k: v for k, v in fields.items() if k.startswith("lightning")} or "", flush=True)
        rows[f"{model} {trainer}"] = fields
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--trainers", nargs="*", default=list(RANKS), choices=list(RANKS))
    parser.add_argument("--exhaustive", action="store_true", help="try every batch above the found; Lightning's too")
    measure(parser.parse_args())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--lightning"]:
        print(json.dumps(lightning_finder(sys.argv[2:])))
    else:
        main()
