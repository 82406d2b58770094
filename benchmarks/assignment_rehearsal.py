"""The assignment on null GPUs: `make assignment` on two nodes in small, and its largest batches on 1 to 8 devices.

    python benchmarks/assignment_rehearsal.py [--devices 1 2 4 8]

The flow computes values, with a small ViT; the searches are those of ViT-B/32, and compute nothing. Writes
benchmarks/results/assignment_rehearsal.json, where rows that are not measured this time stay, and
logbook/measurements/assignment_rehearsal.md. No time is in it: null GPUs (nullgpu/README.md) have no speed.
"""

import argparse
import csv
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/harness"), str(ROOT / "nullgpu")]
RESULTS = ROOT / "benchmarks/results/assignment_rehearsal.json"
PAGE = ROOT / "logbook/measurements/assignment_rehearsal.md"

STRATEGIES = ("ddp", "fsdp")
NODES, DEVICES, EPOCHS = 2, 2, 2
SMALL = [
    "model=vit_tiny_32", "model.depth=1", "model.embed_dim=24", "data=synthetic", "data.num_images=4000",
    "data.num_test_images=60", "data.image_size=32", "data.resize=32", "data.eval_batch_size=8",
    "trainer.num_threads=1", "trainer.memory_limit_gib=0.15", f"trainer.max_epochs={EPOCHS}",
]  # fmt: skip
GIB = 4
IMAGES = 300  # for each device: more than fit
LIMIT_S = 1500
HEAD = """# The assignment, rehearsed

Written by `benchmarks/assignment_rehearsal.py`; do not edit. **Null GPUs, not GPUs**: torch's CUDA code ran, no GPU
did, and no time is stated. [docs/assignment.md](../../docs/assignment.md) tells what the assignment is.

"""


def flow(folder: Path) -> dict[str, Any]:
    """`src/assignment.py` typed on each node, with a bucket; what it leaves."""
    from null_gpus import null_gpus
    from object_store import shared_store
    from ranks import free_port

    server = shared_store()
    place = ["--s3", f"s3://{server.new_bucket()}/runs", "--endpoint-url", server.endpoint_url, "--nodes", str(NODES)]
    place += ["--master", "127.0.0.1", "--port", str(free_port())]
    started = []
    for node in range(NODES):
        own = ["--node", str(node), "--logs", f"{folder}/node{node}/logs", "--logbook", f"{folder}/node{node}/logbook"]
        gpus = ",".join(str(node * DEVICES + index) for index in range(DEVICES))
        variables = null_gpus(devices=NODES * DEVICES) | server.environment()
        variables |= {"CUDA_VISIBLE_DEVICES": gpus, "LOCKSTEP_SECRET": "of these two nodes"}
        command = [sys.executable, str(ROOT / "src/assignment.py"), *place, *own, "--", *SMALL]
        with (folder / f"node{node}.txt").open("w") as file:
            started.append(subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait()
    assert codes == [0] * NODES, "\n".join((folder / f"node{node}.txt").read_text() for node in range(NODES))
    steps = [json.loads(path.read_text()) for path in sorted(folder.glob("node*/logs/assignment/*.json"))]
    pages = sorted(path.stem.partition("-")[0] for path in (folder / "node0/logbook").glob("*.md"))
    return {
        "nodes": NODES, "devices": DEVICES, "codes": codes, "steps": [list(done) for done in steps],
        "pages": pages, "reports": len([*folder.glob("node0/logbook/reports/*.html")]),
        "runs": {strategy: left_by(strategy, folder / "node0") for strategy in STRATEGIES},
    }  # fmt: skip


def left_by(strategy: str, node: Path) -> dict[str, Any]:
    from lockstep.runs.folder import RunFolder
    from lockstep.runs.record import read_record

    folder = RunFolder(node / "logs/train/runs" / f"assignment-{strategy}")
    record, page = read_record(folder.record), (node / f"logbook/vit_{strategy}.md").read_text()
    dumps = [(index, moment) for index in range(NODES) for moment in ("start", "peak", "end")]
    columns = [set(next(csv.reader(folder.hardware_samples(index).open()))) for index in range(NODES)]
    statistics = [f"gpu{index}/{what}" for index in range(DEVICES) for what in ("memory_gib", "utilisation_percent")]
    assert record.largest_batch is not None
    return {
        "status": record.status, "world_size": record.world_size, "epochs": EPOCHS,
        "per_device": record.largest_batch.per_device, "global": record.global_batch_size,
        "dumps": sum(folder.nvidia_smi(*dump).exists() for dump in dumps),
        "dumps_on_page": sum(f"nvidia-smi, node{index}-{moment}" in page for index, moment in dumps),
        "nodes_with_statistics": sum(own.issuperset(statistics) for own in columns),
        "tested_from_bucket": "Tested again from the bucket" in page,
    }  # fmt: skip


def largest(strategy: str, devices: int, folder: Path) -> dict[str, Any]:
    """The search of the recipe's net on made-up images of its size."""
    from lockstep.runs.folder import RunFolder
    from lockstep.runs.record import read_record
    from null_gpus import null_gpus

    words = [
        f"experiment=vit_{strategy}", "data=synthetic", "data.image_size=224", f"data.num_images={IMAGES * devices}",
        "data.num_val=16", "data.eval_batch_size=16", "data.device_cache_gib=0", "model.pretrained=false",
        "trainer.timeout_s=900", "test=false", f"paths.log_dir={folder}/{strategy}-{devices}",
    ]  # fmt: skip
    command = [sys.executable, str(ROOT / "src/find_batch_size.py"), *words]
    environment = null_gpus(devices=devices, memory_gib=GIB, compute=False, forgets=True)
    environment |= {"NULLGPU_NCCL_TIMEOUT_S": "900"}
    subprocess.run(command, env=environment, check=True, timeout=LIMIT_S)
    [run] = (folder / f"{strategy}-{devices}").glob("find_batch_size/runs/*")
    found = read_record(RunFolder(run).record).largest_batch
    assert found is not None
    return {
        "strategy": strategy, "devices": devices, "gib": GIB, "per_device": found.per_device, "global": found.global_,
        "probes": found.probes, "out_of_memory": found.out_of_memory, "bounded_by": found.bounded_by,
    }  # fmt: skip


def page(results: dict[str, Any]) -> str:
    return HEAD + (flow_table(results["flow"]) if "flow" in results else "") + batch_table(results["largest"])


def flow_table(seen: dict[str, Any]) -> str:
    each = f"{seen['devices']} null GPUs"
    text = f"`src/assignment.py` on {seen['nodes']} nodes of {each}, with a small ViT and a bucket:\n\n"
    text += "| node | exit code | steps that it did |\n|---:|---:|---|\n"
    for node, (code, steps) in enumerate(zip(seen["codes"], seen["steps"], strict=True)):
        text += f"| {node} | {code} | {', '.join(steps)} |\n"
    text += "\n| what node 0 has | " + " | ".join(seen["runs"]) + " |\n|---|" + "---|" * len(seen["runs"]) + "\n"
    for title, key, of in ROWS:
        cells = [str(run[key]) + (f" of {of}" if of else "") for run in seen["runs"].values()]
        text += f"| {title} | " + " | ".join(cells) + " |\n"
    return text + f"\nPages: {', '.join(seen['pages'])}; reports: {seen['reports']}.\n\n"


ROWS = (
    ("status", "status", ""),
    ("ranks", "world_size", ""),
    ("epochs", "epochs", ""),
    ("largest batch per device, as searched", "per_device", ""),
    ("global batch that trained", "global", ""),
    ("nvidia-smi dumps (start, peak, end of each node)", "dumps", "6"),
    ("of them on the page", "dumps_on_page", "6"),
    ("nodes with memory and utilisation of each device", "nodes_with_statistics", "2"),
    ("tested again from the bucket, same counts", "tested_from_bucket", ""),
)


def batch_table(rows: dict[str, dict[str, Any]]) -> str:
    text = f"What `data.global_batch_size=max` finds for ViT-B/32 at 224 pixels on devices of {GIB} GiB:"
    text += "\n\n| strategy | devices | per device | global | tries | of them out of memory | limited by |\n"
    text += "|---|---:|---:|---:|---:|---:|---|\n"
    for row in rows.values():
        keys = ("strategy", "devices", "per_device", "global", "probes", "out_of_memory", "bounded_by")
        text += "| " + " | ".join(str(row[key]) for key in keys) + " |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--no-flow", action="store_true", help="the searches alone")
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"largest": {}}
    with tempfile.TemporaryDirectory() as folder:
        if not given.no_flow:
            results["flow"] = flow(Path(folder))
            write(results)
        for devices, strategy in itertools.product(given.devices, STRATEGIES):
            row = largest(strategy, devices, Path(folder))
            results["largest"][f"{strategy}, {devices}"] = row
            print(row, flush=True)
            write(results)


def write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
