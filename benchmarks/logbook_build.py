"""How long the logbook takes for 10, 100 and 1,000 runs: a whole build, a rebuild without news, and one run that ends.

python benchmarks/logbook_build.py          writes benchmarks/results/logbook_build.json
"""

import json
import platform
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "harness")]


def measure(num_runs: int) -> dict[str, float]:
    """Seconds on the wall and of this process alone (cpu); each run has curves, hardware samples and a matrix."""
    from example_runs import write_run
    from lockstep.pages.build import build, keep_run
    from lockstep.pages.source import dump, read_source

    with tempfile.TemporaryDirectory() as scratch:
        root, logbook = Path(scratch), Path(scratch) / "logbook"
        folder = write_run(root / "runs", "run-0", epochs=40)
        build(logbook, [folder])
        source = read_source(logbook / "runs" / "run-0.json")
        for i in range(1, num_runs):
            source["run_id"] = f"run-{i}"
            source["record"]["started_at"] = f"2026-01-{1 + i // 60:02d}T10:{i % 60:02d}:00Z"
            source["record"]["experiment"] = f"experiment_{i % 10}"
            (logbook / "runs" / f"run-{i}.json").write_text(dump(source))
        seconds = {"num_runs": num_runs}
        for name, work in (
            ("build", lambda: build(logbook)),
            ("rebuild_without_news", lambda: build(logbook)),
            ("one_run_ends", lambda: keep_run(write_run(root / "runs", "run-last", epochs=40), logbook)),
        ):
            start, used = time.perf_counter(), time.process_time()
            work()
            seconds[f"{name}_s"] = round(time.perf_counter() - start, 3)
            seconds[f"{name}_cpu_s"] = round(time.process_time() - used, 3)
        sizes = [path.stat().st_size for path in logbook.rglob("*") if path.is_file()]
        return {**seconds, "files": len(sizes), "megabytes": round(sum(sizes) / 1e6, 1)}


def main() -> None:
    import os

    rows = [measure(num_runs) for num_runs in (10, 100, 1000)]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.platform()}
    result = HERE / "results" / "logbook_build.json"
    result.parent.mkdir(exist_ok=True)
    result.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
