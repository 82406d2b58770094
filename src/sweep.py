"""One job of a sweep: a fresh child process with its own run id, folder and record.

In the sweep's own process the ranks of one job would leave their environment to the next, and each rank would
start the whole sweep again.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from run_files import RunFolder, read_record


def run_job(cfg: Any, codes: list[int]) -> float | None:
    """Run the job that Hydra has composed; returns the optimised metric, nan where the job failed.

    Args:
        codes: collects the jobs' exit codes for the sweep's own.
    """
    sweep_dir = Path(str(cfg.hydra.sweep.dir)).resolve()
    run_id = f"{sweep_dir.name}_{cfg.hydra.job.num}"
    own = ("run_id=", "sweep_dir=")
    overrides = [word for word in cfg.hydra.overrides.task if not word.lstrip("+").startswith(own)]
    command = [
        sys.executable,
        str(Path(sys.argv[0]).resolve()),
        *overrides,
        f"run_id={run_id}",
        f"sweep_dir={sweep_dir}",
    ]
    print(f"\njob {cfg.hydra.job.num}: {' '.join(overrides)}", flush=True)
    code = run_child(command)
    codes.append(code if code >= 0 else 128 - code)
    record = RunFolder(sweep_dir / run_id).record
    metrics = read_record(record).get("metrics", {}) if record.exists() else {}
    value = metrics.get(f"{cfg.optimized_metric}_best", metrics.get(cfg.optimized_metric))
    return float(value) if code == 0 and value is not None else float("nan")


def run_child(command: list[str]) -> int:
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode
