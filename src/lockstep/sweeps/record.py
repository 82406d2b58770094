"""The record of a sweep: sweep.json in its folder, and the page that is made of it."""

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook.arms import ArmRun, Arms, arms_as_json
from lockstep.logbook.compare import caution_about, unfair_differences
from lockstep.logbook.folders import RecordedRun
from lockstep.logbook.sweep_page import SCHEMA_VERSION, SWEEP_FILE, write_sweep_page
from lockstep.process.files import utc_now, write_atomically
from lockstep.process.redact import redact_text
from lockstep.records.metric_names import metric_of_test
from lockstep.records.record import RunRecord, read_record, status_of
from lockstep.sweeps.ranking import Job

log = logging.getLogger(__name__)


def write_sweep(sweep_dir: Path, command: str, jobs: Sequence[Job], arms: Arms) -> str:
    """Write sweep.json and page.md; return the page's path from here.

    Args:
        arms: the arms of the jobs, in the same order.
    """
    record = {
        "schema_version": SCHEMA_VERSION,
        "sweep_id": sweep_dir.name,
        "command": redact_text(command),
        "finished_at": utc_now(),
        "metric": arms.metric,
        "test_metric": metric_of_test(arms.metric),
        "minimize": arms.minimize,
        "jobs": [
            _describe_job(sweep_dir, job, run) for job, run in zip(jobs, arms.runs, strict=True)
        ],
        **arms_as_json(arms),
    }
    caution = _caution_about(jobs, sweep_dir)
    if caution:
        log.warning(caution)
        record["caution"] = caution
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomically(sweep_dir / SWEEP_FILE, lambda file: file.write(text))
    return os.path.relpath(write_sweep_page(sweep_dir))


def _caution_about(jobs: Sequence[Job], sweep_dir: Path) -> str:
    """Return a sentence on what jobs with a value should share and do not, else ""."""
    folders = [job.run_folder(sweep_dir) for job in jobs if job.has_value]
    runs = [
        RecordedRun(folder.path, read_record(folder.record_path))
        for folder in folders
        if folder.record_path.exists()
    ]
    # A sweep may vary anything else.
    shared = ("the hardware", "the code")
    return caution_about([name for name in unfair_differences(runs) if name in shared])


def _describe_job(sweep_dir: Path, job: Job, run: ArmRun) -> dict[str, Any]:
    """Return what sweep.json says of a job."""
    path = job.run_folder(sweep_dir).record_path
    # A job that was refused has no folder.
    record = read_record(path) if path.exists() else RunRecord()
    status = status_of(record) if path.exists() else "refused"
    if job.pruned:
        status = "pruned"
    return {
        "number": job.number,
        "run_id": run.run_id,
        "uuid": record.uuid,
        "overrides": job.overrides,
        "arm": run.arm,
        "repeat": run.repeat,
        "status": status,
        "exit_code": job.exit_code,
        "value": _finite_or_none(job.value),
        "tested": _finite_or_none(job.tested),
        "fold_ratio": job.fold_ratio,
        "num_train": record.num_train,
        "num_val": record.num_val,
        "metrics": record.metrics,
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
