"""A fleet's histories on real processes: kill -9 at their times, resume, and the goodput beside the simulated one.

    python benchmarks/fleet_replay.py --seeds 5     # some minutes; writes into results/fleet.json and fleet.md

One small training is measured first without a history: its steps, what a checkpoint holds up, a kill and the restart
after it. Then it is played over each seed's interruptions, and the simulation is asked about the same.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet import PAGE, RESULT, page
from fleet_model import HOUR, History, Run, drawn, simulate
from measuring import REPOSITORY, provenance

sys.path.insert(0, str(REPOSITORY / "tests" / "harness"))
from runs import Started, start_door

BATCH, VALIDATED, INTERVAL_S, MEAN_S = 16, 64, 2.0, 8.0
WORDS = ["data=synthetic", f"data.num_val={VALIDATED}", "data.image_size=16", f"data.global_batch_size={BATCH}",
         "test=false", "model=small_cnn", "trainer=cpu", "trainer.num_threads=1", "trainer.max_epochs=1",
         "~callbacks.hardware", f"callbacks.checkpoints.every_minutes={INTERVAL_S / 60}"]  # fmt: skip


def log_steps(path: str) -> None:
    """Adds the wall clock after every optimizer step to a file, and the seconds that Checkpoints took after it."""
    from lockstep.callbacks.checkpoints import Checkpoints
    from lockstep.callbacks.training_log import TrainingLog

    file = open(path, "a", buffering=1)  # noqa: SIM115 as long as the process
    after_step, after_all = TrainingLog.on_train_batch_end, Checkpoints.on_train_batch_end

    def stepped(self: Any, *arguments: Any, **options: Any) -> Any:
        file.write(f"{time.time()} step\n")
        return after_step(self, *arguments, **options)

    def saved(self: Any, *arguments: Any, **options: Any) -> Any:
        began, found = time.perf_counter(), after_all(self, *arguments, **options)
        file.write(f"{time.perf_counter() - began} saved\n")
        return found

    TrainingLog.on_train_batch_end, Checkpoints.on_train_batch_end = stepped, saved


class Training:
    """One run over all its starts, below a folder of its own."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.log = folder, folder / "steps.txt"
        self.words = [*WORDS, f"data.num_images={steps * BATCH + VALIDATED}", "run_id=fleet", "resume=auto"]
        folder.mkdir(parents=True)
        self.began = time.time()

    def start(self) -> Started:
        before = functools.partial(log_steps, str(self.log))
        return start_door("train", *self.words, logs=self.folder, before=before)

    def steps(self) -> list[float]:
        """The time of each, over all starts."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [float(line.split()[0]) for line in lines if line.endswith("step")]

    def has_more_than(self, known: int) -> bool:
        return len(self.steps()) > known

    def checkpoints_s(self) -> list[float]:
        """The longest of all looks at the checkpoints, as many as intervals have gone by."""
        held = [float(line.split()[0]) for line in self.log.read_text().splitlines() if line.endswith("saved")]
        stamps = self.steps()
        return sorted(held)[-max(int((stamps[-1] - stamps[0]) / INTERVAL_S), 1) :]


def killed(started: Started) -> float:
    """The time of the kill."""
    at = time.time()
    started.process.kill()
    started.process.join()
    return at


def measured(folder: Path, steps: int) -> Run:
    """One run to its end: steps, checkpoints, end. Another that is killed again and again: start and restart."""
    whole = Training(folder / "whole", steps)
    assert whole.start().done(600).code == 0
    stamps = whole.steps()
    step_s = statistics.mean(sorted(b - a for a, b in zip(stamps, stamps[1:]))[: -len(whole.checkpoints_s())])
    ended_s = time.time() - stamps[-1]
    stopped = Training(folder / "stopped", steps)
    at, restarts = stopped.began, []
    for _ in range(4):
        started, known = stopped.start(), len(stopped.steps())
        started.wait_for(functools.partial(stopped.has_more_than, known))
        restarts.append(stopped.steps()[known] - at)
        time.sleep(1.5 * INTERVAL_S)
        at = killed(started)
    checkpoint_s, restart_s = statistics.median(whole.checkpoints_s()), statistics.median(restarts[1:])
    return Run(steps * step_s, checkpoint_s, restart_s, INTERVAL_S, restarts[0], ended_s)


def played(folder: Path, steps: int, history: History) -> tuple[float, int]:
    """(seconds from the first start to the end, kills) of a run that is killed at the history's times."""
    training, kills = Training(folder, steps), 0
    started = training.start()
    for taken_s in history.interruptions():
        started.process.join(max(training.began + taken_s - time.time(), 0.0))
        if not started.process.is_alive():
            break
        killed(started)
        kills, started = kills + 1, training.start()
    done = started.done(600)
    assert done.code == 0, done.output
    return time.time() - training.began, kills


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4000)
    given = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        run = measured(Path(scratch), given.steps)
        print(run, flush=True)
        for seed in range(given.seeds):
            history = drawn(seed, 1, MEAN_S / HOUR, 0.0, 1.0)
            seconds, kills = played(Path(scratch, str(seed)), given.steps, history)
            simulated = simulate(run, history)
            rows.append({"seed": seed, "kills": kills, "simulated_kills": simulated.interruptions,
                         "simulated": simulated.goodput, "measured": run.work_s / seconds})  # fmt: skip
            print(rows[-1], flush=True)
    ratios = [row["measured"] / row["simulated"] for row in rows]
    total = sum(row["measured"] for row in rows) / sum(row["simulated"] for row in rows)
    found = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "cores": provenance.available_cores(), "mean_s": MEAN_S,
             "run": asdict(run), "rows": rows, "ratio": total,
             "worst": max(ratios, key=lambda ratio: abs(ratio - 1))}  # fmt: skip
    result = {**json.loads(RESULT.read_text()), "replay": found}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page(result))
    print(f"measured ÷ simulated: {total:.3f}, worst {found['worst']:.3f}")
    return 0 if abs(total - 1) <= 0.1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
