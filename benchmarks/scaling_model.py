"""Step time, memory and cost over many GPUs as formulas with stated assumptions; scaling.py writes them down."""

import math
from typing import Any

import yaml
from measuring import REPOSITORY

WORKLOAD = {
    "model": "vit_base_patch32_224", "parameters": 88.2e6, "flop_per_image": 26.2e9, "per_gpu_batch": 64,
    "images_per_epoch": 1_281_167,
}  # fmt: skip
ASSUMED = {
    "mfu": 0.35,  # of the 16-bit peak, compute alone
    "network_efficiency": 0.7,  # of the stated network bandwidth that a ring sees
    "latency_s": 30e-6,  # of one hop between nodes
    "overlap": 0.9,  # of the backward pass (DDP) or of both passes (FSDP) that can hide communication
    "step_cv": 0.01,  # standard deviation of a rank's step ÷ its mean
    "node_hours_per_interruption": 200.0,
    "restart_s": 120.0,
    "checkpoint_interval_s": 600.0,
}
INSIDE_GB_S = {"g4dn.12xlarge": 6.0, "g5.12xlarge": 10.0, "p4d.24xlarge": 230.0, "p5.48xlarge": 350.0}  # ring, per GPU
INSTANCES = ("g4dn.xlarge", "g4dn.12xlarge", "g5.12xlarge", "p4d.24xlarge", "p5.48xlarge")
GPUS = (8, 32, 128, 512, 1024)
CHECKS = {
    "fsdp": {"ddp_gb": 23.1, "fsdp_gb": 9.6, "ddp_it_s": 4.31, "fsdp_it_s": 3.19},
    "alexnet": {"one_gpu_min": 41.8, "four_gpu_min": 14.6, "epochs": 100, "images": 45_000, "batch": 256,
                "parameters": 57.0e6},
}  # fmt: skip


def ring_seconds(size: float, gpus_per_node: int, nodes: int, inside: float, outside: float, latency: float) -> float:
    """One all-reduce of `size` bytes as rings: within the nodes, then between them; half of it is an all-gather."""
    g, m = gpus_per_node, nodes
    within = 2 * (g - 1) / g * size / inside if g > 1 else 0.0
    between = 2 * (m - 1) / m * size / outside if m > 1 else 0.0
    return max(within, between) + 2 * latency * math.ceil(math.log2(max(2, g * m)))


def step(hardware: dict[str, Any], gpus: int, strategy: str) -> dict[str, float]:
    """Seconds of a step, of its parts, and GB of weights, gradients and Adam's state on each GPU."""
    w, a = WORKLOAD, ASSUMED
    peak = max(hardware["peak_tflops"].get("bfloat16") or 0, hardware["peak_tflops"].get("float16") or 0) * 1e12
    compute = w["per_gpu_batch"] * w["flop_per_image"] / (a["mfu"] * peak)
    g = min(gpus, hardware["gpus"])
    nodes = gpus // g
    inside = INSIDE_GB_S.get(hardware["name"], 6.0) * 1e9
    outside = a["network_efficiency"] * hardware["network_gbit_s"] / 8 * 1e9
    # DDP: fp32 gradients once around. FSDP: 16-bit weights gathered twice, fp32 gradients reduced: as many bytes.
    size = 4 * w["parameters"]
    communication = ring_seconds(size, g, nodes, inside, outside, a["latency_s"])
    hidden = a["overlap"] * (compute if strategy == "fsdp" else 2 / 3 * compute)
    exposed = max(communication - hidden, communication * (1 - a["overlap"]))
    straggle = compute * a["step_cv"] * math.sqrt(2 * math.log(gpus))
    state = 16 * w["parameters"] / (gpus if strategy == "fsdp" else 1)
    return {"compute": compute, "communication": communication, "exposed": exposed, "straggle": straggle,
            "seconds": compute + exposed + straggle, "nodes": nodes, "state_gb": state / 1e9}  # fmt: skip


def lost_to_restarts(nodes: int) -> float:
    """Share of the time that interruptions of any node cost: the restart, and half a checkpoint interval done again."""
    per_second = nodes / (3600 * ASSUMED["node_hours_per_interruption"])
    return min(1.0, per_second * (ASSUMED["restart_s"] + ASSUMED["checkpoint_interval_s"] / 2))


def predictions() -> list[dict[str, Any]]:
    rows = []
    for name in INSTANCES:
        hardware = yaml.safe_load((REPOSITORY / "configs" / "hardware" / f"{name}.yaml").read_text())
        for gpus in GPUS:
            for strategy in ("ddp", "fsdp"):
                found = step(hardware, gpus, strategy)
                steps = WORKLOAD["images_per_epoch"] / (gpus * WORKLOAD["per_gpu_batch"])
                seconds = steps * found["seconds"]
                lost = lost_to_restarts(int(found["nodes"]))
                hours = found["nodes"] * seconds / 3600
                rows.append(
                    {
                        "instance": name, "gpus": gpus, "nodes": int(found["nodes"]), "strategy": strategy,
                        "step_ms": round(1000 * found["seconds"], 1),
                        "efficiency": round(found["compute"] / found["seconds"], 3),
                        "images_per_s": round(gpus * WORKLOAD["per_gpu_batch"] / found["seconds"]),
                        "epoch_s": round(seconds, 1), "usd_per_epoch": round(hours * hardware["price_per_hour_usd"], 2),
                        "lost_to_spot": round(lost, 4), "state_gb": round(found["state_gb"], 3),
                    }
                )  # fmt: skip
    return rows


def published_checks() -> list[dict[str, Any]]:
    """What the formulas say where somebody has measured."""
    fsdp, alexnet = CHECKS["fsdp"], CHECKS["alexnet"]
    rows = []
    for n in (2, 4, 8):  # the source names the GPU, not how many there were
        sharded = (fsdp["ddp_gb"] - fsdp["fsdp_gb"]) / (1 - 1 / n)  # 23.1 = state + rest, 9.6 = state / n + rest
        extra = 1 / fsdp["fsdp_it_s"] - 1 / fsdp["ddp_it_s"]
        parameters = sharded / 16
        moved = 4 * parameters * (n - 1) / n  # GB of fp32 that FSDP moves more than DDP: three passes, not two
        rows.append(
            {"check": f"FSDP against DDP on {n} A100", "state_gb": round(sharded, 1),
             "parameters_million": round(1000 * parameters), "needed_gb_s": round(moved / extra, 1)}
        )  # fmt: skip
    steps = alexnet["images"] / alexnet["batch"]
    one = 60 * alexnet["one_gpu_min"] / alexnet["epochs"] / steps
    four = 60 * alexnet["four_gpu_min"] / alexnet["epochs"] / (steps / 4)
    size = 4 * alexnet["parameters"]
    for inside in (6e9, 12e9, 230e9):
        ring = ring_seconds(size, 4, 1, inside, 1.0, 0.0)
        exposed = max(ring - ASSUMED["overlap"] * 2 / 3 * one, ring * (1 - ASSUMED["overlap"]))
        rows.append(
            {"check": f"AlexNet on 4 GPUs, rings at {inside / 1e9:g} GB/s",
             "published_speedup": round(alexnet["one_gpu_min"] / alexnet["four_gpu_min"], 2),
             "model_speedup": round(4 * one / (one + exposed), 2), "one_gpu_step_ms": round(1000 * one, 1),
             "published_step_ms": round(1000 * four, 1), "model_step_ms": round(1000 * (one + exposed), 1)}
        )  # fmt: skip
    return rows
