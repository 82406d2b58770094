"""A rehearsal's findings → lines to read, and whether all of it held. Imports no torch."""

from dataclasses import dataclass

from lockstep.rehearsal.faults import shown
from lockstep.rehearsal.starts import Started
from lockstep.rehearsal.words import STEPS, Rehearsal
from lockstep.runs.config import Config

MIB_OF_GIB = 1024
RUNTIME_GIB = 0.6  # assumed for CUDA's context and NCCL beside torch's allocator
GROWTH_MIB = 1.0 / 16  # of one step, from which on it counts
PEAK_OF = {"16-mixed": "float16", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-true": "float16"}


@dataclass(frozen=True)
class Line:
    """One line of the report; `held` is None where it is information only."""

    held: bool | None
    text: str

    def __str__(self) -> str:
        word = {True: "ok    ", False: "FAILED", None: "      "}[self.held]
        return f"{word}  {self.text}"


def of_start(what: str, started: Started) -> Line:
    """Whether a start came to its end, or what failed and where."""
    if started.fault:
        return Line(False, f"{what}: {started.fault.sentence()}")
    return Line(True, what)


def of_gradients(rehearsal: Rehearsal, started: Started) -> list[Line]:
    """A line for each parameter that got no gradient in the first step, on any rank; under DDP's
    find_unused_parameters=true the user knows."""
    left = dict(pair for notes in started.watched for pair in notes["without_gradient"])
    if not left:
        return [Line(True, "every trained parameter has a gradient")] if started.watched else []
    known = (rehearsal.config["trainer"]["strategy"] or {}).get("find_unused_parameters")
    held = None if known else False
    return [Line(held, f"no gradient for {name}: {_shown(where)}") for name, where in left.items()]


def of_syncs(started: Started) -> list[Line]:
    """A line for each line of code at which the host waits for the device in every step."""
    every = {where: count for where, count in started.syncs.items() if count >= STEPS}
    if not every:
        return [Line(True, "no host-device synchronisation in a step")]
    return [Line(False, f"host waits for device {n // STEPS} × a step: {where}") for where, n in every.items()]


def of_memory(rehearsal: Rehearsal, started: Started) -> list[Line]:
    """Peak of torch's allocator on each device beside what the machine's has, and whether it grows with the steps."""
    limit = float(rehearsal.config["hardware"]["gpu_memory_gib"])
    peaks = [mib / MIB_OF_GIB for notes in started.watched for mib in notes["peak_mib"]]
    if not peaks:
        return []
    words = ", ".join(f"{peak:.2f}" for peak in peaks)
    fits = max(peaks) + RUNTIME_GIB <= limit
    per_device = rehearsal.batch.per_device
    lines = [
        Line(
            fits,
            f"estimated peak memory of each rank at {per_device} images a device: {words} GiB "
            f"(and about {RUNTIME_GIB} for CUDA) of {limit:g} GiB",
        )
    ]
    growth = max((_growth(notes["held_mib"]) for notes in started.watched), default=0.0)
    if growth > GROWTH_MIB:
        lines.append(Line(False, f"memory grows by {growth:.2f} MiB a step: something keeps tensors of every step"))
    return lines


def of_kept(started: Started) -> list[Line]:
    """A line for each list that holds more of a GPU's tensors after every step."""
    kept = dict.fromkeys(where for notes in started.watched for where in notes["kept"])
    return [Line(False, f"a list keeps a tensor of every step: {_shown(where)}") for where in kept]


def _growth(held: list[float]) -> float:
    """MiB that the last step added, where the step before it added as much: the first one makes optimizer state."""
    if len(held) < STEPS:
        return 0.0
    return min(held[-1] - held[-2], held[-2] - held[-3])


def of_checkpoint(num_bytes: int, gbit_s: float) -> list[Line]:
    """Size of the last checkpoint and the time to a bucket.

    Args:
        num_bytes: on disk.
        gbit_s: stated bandwidth.
    """
    seconds = num_bytes * 8 / (gbit_s * 1e9)
    size = f"{num_bytes / 2**20:.1f} MiB"
    return [Line(None, f"checkpoint {size}; estimated {seconds:.1f} s to a bucket at {gbit_s:g} Gbit/s (assumed)")]


def of_cost(rehearsal: Rehearsal, started: Started, mfu: float) -> list[Line]:
    """Hours and dollars of the whole training from the table of the machine and an assumed MFU; none where a number
    is missing."""
    hardware, record = rehearsal.config["hardware"], started.record
    gflops = (record.get("throughput") or {}).get("gflops_per_image")
    peaks: Config = hardware.get("peak_tflops") or {}
    dtype = PEAK_OF.get(str(record.get("precision")), "tf32" if peaks.get("tf32") else "float32")
    peak, images = peaks.get(dtype), _images(rehearsal, record)
    epochs = rehearsal.config["trainer"]["max_epochs"]
    if not gflops or not peak or not images or rehearsal.config["trainer"]["max_steps"] != -1:
        return []
    gpus = max(rehearsal.world_size, rehearsal.devices)
    hours = gflops * 1e9 * images * epochs / (gpus * peak * 1e12 * mfu) / 3600
    machines = -(-gpus // hardware["gpus"])
    words = f"estimated {_hours(hours)} of training at {mfu:.0%} MFU (assumed) of {peak:g} {dtype} TFLOPS × {gpus}"
    if price := hardware.get("price_per_hour_usd"):
        total = hours * machines * price
        words += f", {total:.2f} $ at {price:g} $/h × {machines} (list price of the table, to be checked)"
    return [Line(None, words)]


def _images(rehearsal: Rehearsal, record: Config) -> float | None:
    if rehearsal.num_images is None:
        return record.get("num_train")
    data = rehearsal.config["data"]
    share = 1 / folds if (folds := data.get("num_folds")) else data.get("val_fraction", 0.1)
    return rehearsal.num_images - (rehearsal.num_images * share if data.get("num_val") is None else data["num_val"])


def _hours(hours: float) -> str:
    return f"{hours:.2f} h" if hours >= 0.1 else f"{hours * 60:.0f} min" if hours >= 1 / 60 else "less than a minute"


def _shown(where: str | None) -> str:
    if where is None:
        return "no line of yours"
    path, _, line = where.rpartition(":")
    return f"{shown(path)}:{line}"
