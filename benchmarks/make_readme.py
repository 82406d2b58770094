"""Writes benchmarks/README.md from the files in benchmarks/results/, and from nothing else.

python benchmarks/make_readme.py
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

NO_GOAL = "none"
WITHDRAWN = "withdrawn"  # met only by code that nothing but a CPU benchmark gained from, which is gone

# row, what is measured as the results name it, goal. A line without a result says so.
LINES = (
    (1, "ViT at batch 256: a step ÷ a bare loop's", "≤ 1.02"),
    (1, "tiny net: a step over a plain Lightning Trainer", WITHDRAWN),
    (2, "one process: values read from tensors per step between log points", "0"),
    (2, "two ranks: collectives per step beside the gradients'", "at most 1 in N steps"),
    (2, "one GPU: synchronisations by CUDA's sync debug mode", "0"),
    (3, "input path ÷ torchvision at 32 px", WITHDRAWN),
    (3, "input path ÷ torchvision at 224 px", WITHDRAWN),
    (3, "a GPU's step with real data ÷ with a cached batch", "≤ 1.02"),
    (4, "MNIST's example net to 99 % on MNIST, whole process ÷ PyTorch's example", "≤ 1/3"),
    (4, "MNIST's example net to 90 % on Fashion-MNIST, whole process ÷ PyTorch's example", "≤ 1/3"),
    (5, "AlexNet on CIFAR-10, images/s with validation ÷ the tutorial's recipe", "≥ 1.3"),
    (5, "the same on a GPU", "≥ 50"),
    (6, "cifar10_speedrun: test accuracy in 15 minutes on 2 cores", "≥ 90 %"),
    (6, "time to 94 % on a GPU ÷ airbench's public recipe", "≤ 1.3"),
    (7, "start: --help ÷ import torch", "≤ 0.3"),
    (7, "start: --cfg job ÷ import torch", "≤ 0.3"),
    (7, "start: first optimizer step ÷ bare imports", "≤ 1.3"),
    (7, "start: first step of two ranks ÷ of one", "≤ 1.2"),
    (8, "whole process ÷ the usual Hydra + Lightning template's", "≤ 0.8"),
    (8, "the same without imports", WITHDRAWN),
    (9, "ddp_sim images/s ÷ one process with two threads", "≥ 0.95"),
    (9, "fsdp_sim step ÷ ddp_sim step", WITHDRAWN),
    (10, "ViT-B/32 images/s on a GPU ÷ timm's training script", "≥ 1.2"),
    (10, "ViT-B/32 on a GPU ÷ the matrix product's roofline", "≥ 0.45"),
    (11, "peak memory of the quickstart's process ÷ a bare loop's", "≤ 1.05"),
    (11, "GPU memory of ViT-B/32 at batch 256 ÷ a bare loop's", "≤ 1.05"),
    (12, "growth: the steepest curve's exponent", "≤ 1 (linear)"),
    (13, "training waits for an asynchronous checkpoint of 350 MB ÷ one copy of its tensors", "≤ 1.2"),
    (13, "training waits for an asynchronous checkpoint of 1 GB ÷ one copy of its tensors", "≤ 1.2"),
    (14, "data in a bucket: its copy, bytes/s ÷ boto3's download_file of the same objects", "≥ 0.9"),
    (14, "data in a bucket: an epoch from the copy, images/s ÷ from a local folder", "≥ 0.98"),
    (14, "data in a bucket: images/s of a first epoch ÷ the better of litdata's and webdataset's", "≥ 1"),
    (14, "data in a bucket: images/s of a second epoch ÷ the better of litdata's and webdataset's", "≥ 1"),
    (
        14,
        "data in a bucket: speed to the first batch, nothing copied yet ÷ the better of litdata's and webdataset's",
        "≥ 1",
    ),
    (14, "data in a bucket: speed to the first batch, copied before ÷ the better of litdata's and webdataset's", "≥ 1"),
    (14, "data in a bucket: seconds to the first batch, copied beside the training ÷ copied first", "≤ 0.5"),
    (14, "data in a bucket: memory of a rank, many small objects in shards ÷ a tenth of them", "≤ 1.05"),
    (15, "whole process from JPEG files at 224 px, images/s ÷ timm's script", "≥ 1.5"),
    (15, "fine-tuning, test accuracy apart from timm's script, medians of the seeds", "within its spread"),
    (16, "ViT-B/32 at 224 px from JPEG files: a step's wait for images", "≤ 2 %"),
    (16, "EfficientNet-Lite0 at 224 px from JPEG files: a step's wait for images", "≤ 2 %"),
    (17, "first commands: GB that make install fetches", NO_GOAL),
    (17, "first commands: GB that its .venv takes", NO_GOAL),
    (17, "first commands: make install, nothing cached", NO_GOAL),
    (17, "first commands: make train in an installed clone", NO_GOAL),
)

HEAD = """# Benchmarks

`make bench` measures this table on the machine at hand; `python benchmarks/make_readme.py` writes this page from
`results/`, and no number is here that is not there. Both sides run as often as the command says (`--repetitions`,
several times unless it does), alternating; the figure is the median of the rounds' ratios. Peers are in `peers/`,
written as their own documentation shows them: fp32.

| | what | goal | measured | met | measured by | date |
|---|---|---|---|---|---|---|
"""


def page(results: Path = RESULTS) -> str:
    """Of the results in this folder."""
    found = measured(results)
    unknown = found.keys() - {what for _, what, _ in LINES}
    assert not unknown, f"results without a line here: {unknown}"
    text = HEAD + "".join(line(*each, found.get(each[1])) for each in LINES)
    return text + "\n" + details(found) + machines(results) + FOOT


def measured(results: Path) -> dict[str, dict[str, Any]]:
    """Goal by what it measures, each with the file's date, command and name."""
    found = {}
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        for goal in content.get("goals", []):
            written = {"command": content.get("command", f"python benchmarks/{path.stem}.py"), "file": path.name}
            found[goal["what"]] = {**goal, **written, "date": content.get("date", "")}
    return found


def line(row: int, what: str, goal: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"| {row} | {what} | {goal} | not measured | | | |\n"
    value = f"{found['measured']:g} {found['unit']}".strip()
    said = "" if goal in (WITHDRAWN, NO_GOAL) else "yes" if found["met"] else "**no**"
    link, command = f"[{value}](results/{found['file']})", f"`{found['command']}`"
    return f"| {row} | {what} | {goal} | {link} | {said} | {command} | {found['date']} |\n"


def details(found: dict[str, dict[str, Any]]) -> str:
    said = [
        f"- {row} · {what}: {found[what]['detail']}." for row, what, _ in LINES if found.get(what, {}).get("detail")
    ]
    return "\n".join(said) + "\n\n" if said else ""


def machines(results: Path) -> str:
    """Every machine that a result comes from, and which results."""
    names: dict[str, list[str]] = {}
    loads = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        machine = content.get("machine")
        if content.get("load_average"):
            loads.append(f"{path.stem} {content['load_average']:.1f}")
        if isinstance(machine, dict) and "versions" in machine:
            gpus = ", ".join(machine["gpus"]) or "no GPU"
            versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
            names.setdefault(f"{machine['cpu']}, {machine['cores']} cores, {gpus}; {versions}", []).append(path.stem)
    told = [f"Machine of {', '.join(files)}: {name}." for name, files in names.items()]
    told += (
        [f"Load average when each ended, above 1 per core where others worked: {', '.join(loads)}."] if loads else []
    )
    return "\n\n".join(told) + "\n\n"


MEASURED = "../logbook/measurements"
FOOT = f"""More: [parity.md]({MEASURED}/parity.md) (every strategy against one process),
[memory_per_rank.md]({MEASURED}/memory_per_rank.md), [batch_search.md]({MEASURED}/batch_search.md),
[faults.md](faults.md), [scaling.md](scaling.md) (a model of many nodes),
[fleet.md](fleet.md) (spot machines, simulated), and the other files in [results/](results).
"""


if __name__ == "__main__":
    (HERE / "README.md").write_text(page())
