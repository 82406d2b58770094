"""benchmarks/scaling.md from results/scaling.json; scaling.py calls it."""

from typing import Any

from scaling_model import ASSUMED, INSIDE_GB_S


def page(result: dict[str, Any]) -> str:
    return "\n\n".join(
        [
            "# Beyond this machine: a model of step time",
            f"Written by `python benchmarks/scaling.py` on {result['date']} from `results/scaling.json`. What is "
            "measured is named so; everything about GPUs is a prediction of the formulas below.",
            FORMULAS,
            "## Fitted to 1, 2 and 4 ranks",
            fitted(result),
            "## Checked against published figures",
            checked(result),
            "## Predicted",
            assumptions(result),
            predicted(result["predictions"]),
        ]
    ) + "\n"  # fmt: skip


FORMULAS = """## The formulas

```
step      = compute + exposed + straggle
compute   = images per GPU × FLOP per image ÷ (MFU × peak)
ring      = max(2 (g−1)/g × bytes ÷ bandwidth in a node, 2 (m−1)/m × bytes ÷ bandwidth of a node's network)
            + 2 × latency × ⌈log2 N⌉                                     g GPUs in each of m nodes, N = g·m
exposed   = max(ring − overlap × h × compute, (1 − overlap) × ring)      h = 2/3 (DDP: backward), 1 (FSDP: both passes)
straggle  = compute × cv × sqrt(2 ln N)                                  the slowest of N ranks with normal noise
state     = 16 bytes × parameters (DDP), ÷ N (FSDP)                      fp32 weights, gradients, two moments of Adam
lost      = nodes × interruption rate × (restart + checkpoint interval ÷ 2)
```

Bytes: DDP sends fp32 gradients once around the ring. FSDP gathers 16-bit weights twice and reduces fp32 gradients: as
many bytes; in full fp32 it moves half as many again."""


def fitted(result: dict[str, Any]) -> str:
    if not result["fit_rows"]:
        return "Not measured yet: `python benchmarks/scaling.py` measures them and fits the model."
    lines = ["| strategy | ranks | images per rank | measured step | model | error |", "|---|---|---|---|---|---|"]
    for row in result["fit_rows"]:
        lines.append(
            f"| {row['strategy']} | {row['ranks']} | {row['per_rank_batch']} | {1000 * row['step_s']:.1f} ms | "
            f"{1000 * row['model_s']:.1f} ms | {row['error']:+.1%} |"
        )
    said = ", ".join(f"{value:.3g} {name}" for name, value in result["fitted"].items())
    worst = max(abs(row["error"]) for row in result["fit_rows"])
    return (
        f"Measured: vit_tiny_32 in CPU processes over gloo, one thread each, {result['fit_cores']} cores. On a CPU "
        "nothing overlaps and ranks beyond the cores share them, so a step is the sum of four terms, each times ranks "
        "per core:\n\n"
        + "\n".join(lines)
        + f"\n\nLeast squares: {said}. Largest error {worst:.0%}; a coefficient of 0 means that these runs cannot tell "
        "that term from the others."
    )


def checked(result: dict[str, Any]) -> str:
    fsdp, alexnet = result["published"]["fsdp"], result["published"]["alexnet"]
    memory = [row for row in result["checks"] if "needed_gb_s" in row]
    speed = [row for row in result["checks"] if "model_speedup" in row]
    lines = [
        f"**FSDP {fsdp['ddp_gb']} → {fsdp['fsdp_gb']} GB and {fsdp['ddp_it_s']} → {fsdp['fsdp_it_s']} it/s against "
        "DDP on an A100.** The source does not say how many GPUs there were. For each number the memory gives the "
        "sharded state and so the parameters, and the lost time the bandwidth at which what FSDP moves more (one pass "
        "of fp32) would be wholly exposed, which comes out the same for any number:",
        "",
        "| GPUs | sharded state | parameters | bandwidth needed |",
        "|---|---|---|---|",
        *(f"| {row['check'].split()[-2]} | {row['state_gb']} GB | {row['parameters_million']} million | "
          f"{row['needed_gb_s']} GB/s |" for row in memory),
        "",
        f"An A100's NVLink ring moves about {INSIDE_GB_S['p4d.24xlarge']:g} GB/s, PCIe 4 about 20: the figure lies "
        "between, so the formulas allow it but, with hardware and model unknown, it does not confirm them.",
        "",
        f"**AlexNet on 4 GPUs, {speed[0]['published_speedup']} ×** ({alexnet['one_gpu_min']} → "
        f"{alexnet['four_gpu_min']} minutes; a step takes {speed[0]['one_gpu_step_ms']} ms on one, "
        f"{speed[0]['published_step_ms']} ms on four):",
        "",
        "| rings at | model's step on four | model's speed-up |",
        "|---|---|---|",
        *(f"| {row['check'].split(' at ')[1]} | {row['model_step_ms']} ms | {row['model_speedup']} × |"
          for row in speed),
        "",
        "The model misses: in so long a step the ring hides behind the backward pass, so communication does not "
        "explain the loss. The source calls its runs bound by their loaders, which the model leaves out.",
    ]  # fmt: skip
    return "\n".join(lines)


def assumptions(result: dict[str, Any]) -> str:
    work = result["workload"]
    inside = ", ".join(f"{name} {value:g}" for name, value in INSIDE_GB_S.items())
    return (
        f"{work['model']} ({work['parameters'] / 1e6:.1f} M parameters, {work['flop_per_image'] / 1e9:g} GFLOP an "
        f"image), {work['per_gpu_batch']} images per GPU, an epoch of {work['images_per_epoch']:,} images "
        f"(ImageNet-1k). Assumed, not measured: MFU {ASSUMED['mfu']} of the 16-bit peak; rings see "
        f"{ASSUMED['network_efficiency']:.0%} of the network bandwidth; {1e6 * ASSUMED['latency_s']:.0f} µs a hop; "
        f"overlap {ASSUMED['overlap']}; noise of a rank's step {ASSUMED['step_cv']:.0%}; rings in a node at {inside} "
        f"GB/s; an interruption every {ASSUMED['node_hours_per_interruption']:g} node-hours on spot machines, "
        f"{ASSUMED['restart_s']:g} s to restart, a checkpoint every {ASSUMED['checkpoint_interval_s'] / 60:g} minutes; "
        "input and validation cost nothing. Peaks, networks and on-demand prices are those of `configs/hardware/`. "
        "The cost is of an epoch without interruptions; `lost` is the share to add on spot machines."
    )


def predicted(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| instance | GPUs | nodes | strategy | step | efficiency | images/s | epoch | $ an epoch | lost | state |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['instance']} | {row['gpus']} | {row['nodes']} | {row['strategy']} | {row['step_ms']} ms | "
            f"{row['efficiency']:.0%} | {row['images_per_s']:,} | {row['epoch_s']:,.0f} s | {row['usd_per_epoch']} | "
            f"{row['lost_to_spot']:.1%} | {row['state_gb']} GB |"
        )
    return "\n".join(lines)
