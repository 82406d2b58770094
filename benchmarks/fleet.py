"""What a training costs on machines that are taken away, before they are rented: an event simulation.

    python benchmarks/fleet.py                       # the stated fleet, and its replay's result if there is one
    python benchmarks/fleet.py --run logs/train/runs/ID/run.json --epochs 90 --nodes 4 --instance g5.12xlarge
    python benchmarks/fleet.py --interruptions taken.csv --prices prices.csv    # at_h · at_h,usd_per_hour; hours from 0

Without --run the step, checkpoint and restart times are those stated below. It writes results/fleet.json and fleet.md.
benchmarks/fleet_replay.py plays the same seeds with real processes, and adds what it saw.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from fleet_model import (
    HOUR,
    BadHistory,
    History,
    Run,
    best_interval,
    daly,
    daly_seconds,
    drawn,
    mean_goodput,
    read_history,
    simulate,
    young,
)
from measuring import HERE, REPOSITORY, save
from scaling_model import ASSUMED, WORKLOAD, step

RESULT, PAGE = HERE / "results" / "fleet.json", HERE / "fleet.md"
SEEDS = 1000
STATED = {"epochs": 300, "nodes": 8, "instance": "g4dn.12xlarge", "checkpoint_s": 15.0, "spot_share_of_price": 0.4}
RANGE = [0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0]  # of Daly's interval


def stated_run(given: argparse.Namespace, gpu: dict[str, Any]) -> Run:
    """ViT-B/32 on ImageNet as the scaling model has it; checkpoint and restart are assumptions."""
    seconds = step(gpu, given.nodes * gpu["gpus"], "ddp")["seconds"]
    steps = WORKLOAD["images_per_epoch"] / (given.nodes * gpu["gpus"] * WORKLOAD["per_gpu_batch"])
    return Run(given.epochs * steps * seconds, STATED["checkpoint_s"], ASSUMED["restart_s"], 1.0)


def run_of_record(path: Path, epochs: int, wait_s: float) -> Run:
    """What a run's record measured: a step, a checkpoint (one at each epoch's end), and what each start costs.

    The last is what its goodput leaves of the wall clock, over its starts: start-up, validation, time until it was
    started again. `wait_s` comes to it for a machine in place of a lost one.

    Raises:
        BadHistory: the record says too little.
    """
    from lockstep.runs.errors import UserError
    from lockstep.runs.record import read_record

    try:
        record = read_record(path)
    except UserError as error:
        raise BadHistory(str(error)) from None
    step_s, steps, wall = record.throughput.step_seconds.mean, record.steps, record.goodput.wall
    if not (step_s and steps and wall and record.epochs and record.checkpoint_stall_s):
        raise BadHistory(
            f"{path} has no step times, goodput or checkpoint_stall_s: name a run that trained for an epoch."
        )
    resumed = (record.restarts[-1].resumed_step or 0) if record.restarts else 0
    checkpoint_s = record.checkpoint_stall_s / max(round((steps - resumed) * record.epochs / steps), 1)
    lost_s = step_s * sum(restart.lost_steps or 0 for restart in record.restarts)
    other_s = steps * step_s / wall - steps * step_s - lost_s - record.epochs * checkpoint_s
    restart_s = max(other_s, 0.0) / (1 + len(record.restarts))
    return Run(epochs * steps / record.epochs * step_s, checkpoint_s, restart_s + wait_s, 1.0, restart_s)


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    found = {f"p{percent}": ordered[round(percent / 100 * (len(ordered) - 1))] for percent in (5, 50, 95)}
    return {**found, "mean": statistics.fmean(values)}


def figures(run: Run, histories: list[History], nodes: int) -> dict[str, dict[str, float]]:
    """{what: {p5, p50, p95, mean}} over the histories."""
    outcomes = [asdict(simulate(run, history, nodes)) for history in histories]
    return {name: quantiles([outcome[name] for outcome in outcomes]) for name in outcomes[0]}


def intervals(run: Run, histories: list[History], mean_s: float) -> list[dict[str, float]]:
    """Goodput by interval, beside what Daly's expectation says."""
    rows = []
    for share in RANGE:
        each = replace(run, interval_s=share * daly(run.checkpoint_s, mean_s))
        expected = run.work_s / daly_seconds(each, mean_s)
        rows.append({"interval_s": each.interval_s, "goodput": mean_goodput(each, histories), "daly": expected})
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run.json of a run")
    parser.add_argument("--wait-s", type=float, default=0.0, help="for a new machine, beside the record's restart")
    parser.add_argument("--epochs", type=int, default=STATED["epochs"])
    parser.add_argument("--nodes", type=int, default=STATED["nodes"])
    parser.add_argument("--instance", default=STATED["instance"], help="a file of configs/hardware")
    parser.add_argument("--node-hours", type=float, default=ASSUMED["node_hours_per_interruption"])
    parser.add_argument("--interruptions", type=Path, help="CSV with a column at_h")
    parser.add_argument("--prices", type=Path, help="CSV with columns at_h, usd_per_hour")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args(argv)
    gpu = yaml.safe_load((REPOSITORY / "configs" / "hardware" / f"{given.instance}.yaml").read_text())
    spot_usd = STATED["spot_share_of_price"] * gpu["price_per_hour_usd"]
    try:
        run = run_of_record(given.run, given.epochs, given.wait_s) if given.run else stated_run(given, gpu)
        histories, mean_s = histories_of(given, spot_usd, run)
        best_s = best_interval(run, histories, [share * daly(run.checkpoint_s, mean_s) for share in RANGE])
        rows = intervals(run, histories, mean_s)
        noticed = figures(replace(run, interval_s=best_s, saves_on_notice=True), histories, given.nodes)
        usual = figures(replace(run, interval_s=ASSUMED["checkpoint_interval_s"]), histories, given.nodes)
        best = figures(replace(run, interval_s=best_s), histories, given.nodes)
    except BadHistory as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    mean_usd = statistics.fmean(each.usd(each.length_s) / each.length_s * HOUR for each in histories)
    steady_usd = given.nodes * gpu["price_per_hour_usd"] * run.work_s / HOUR
    content = {
        "run": {**asdict(run), "source": "a run's record" if given.run else "stated"},
        "fleet": {"nodes": given.nodes, "instance": given.instance, "epochs": given.epochs, "mean_s": mean_s,
                  "seeds": len(histories), "spot_usd_per_hour": mean_usd, "on_demand_usd": steady_usd,
                  "on_demand_hours": run.work_s / HOUR, "usual_interval_s": ASSUMED["checkpoint_interval_s"]},
        "best_interval_s": best_s, "young_s": young(run.checkpoint_s, mean_s), "daly_s": daly(run.checkpoint_s, mean_s),
        "intervals": rows, "best": best, "usual": usual, "noticed": noticed,
        "replay": json.loads(RESULT.read_text()).get("replay") if RESULT.exists() else None,
    }  # fmt: skip
    save("fleet", [], **content)
    PAGE.write_text(page(json.loads(RESULT.read_text())))
    print(PAGE.read_text())
    return 0


def histories_of(given: argparse.Namespace, spot_usd: float, run: Run) -> tuple[list[History], float]:
    """(histories, mean seconds between interruptions of any node); of files one history, begun at other hours."""
    if given.interruptions:
        whole = read_history(given.interruptions, given.prices, spot_usd)
        return [whole.begun_at(number / given.seeds) for number in range(given.seeds)], whole.mean_s
    hours = max(20 * run.work_s / HOUR, 24.0)
    made = [drawn(seed, given.nodes, given.node_hours, spot_usd, hours) for seed in range(given.seeds)]
    return made, given.node_hours * HOUR / given.nodes


def page(result: dict[str, Any]) -> str:
    """fleet.md from results/fleet.json."""
    run, fleet = result["run"], result["fleet"]
    return "\n\n".join(
        [
            "# A fleet before it is rented",
            f"Written by `{result['command']}` on {result['date']} from `results/fleet.json`: an event simulation "
            "(`fleet_model.py`), not a measurement but where it says so.",
            f"{fleet['epochs']} epochs on {fleet['nodes']} × {fleet['instance']}, {fleet['seeds']} histories: one "
            f"interruption of any node every {fleet['mean_s'] / HOUR:.1f} h in the mean, a machine at about "
            f"{fleet['spot_usd_per_hour']:.2f} $ an hour, all paid for while they wait for each other. Times "
            f"({run['source']}): {run['work_s'] / HOUR:.2f} h of steps, {run['checkpoint_s']:.3g} s a checkpoint, "
            f"{run['restart_s']:.3g} s a restart. Never interrupted, at the price on demand: "
            f"{fleet['on_demand_hours']:.2f} h, {fleet['on_demand_usd']:.0f} $.",
            "Drawn by seed unless files are given: interruptions at a constant rate, a price that wanders hour by hour "
            "around its mean. An interruption of one node stops all; what was not saved is done again.",
            costs(result),
            "## How often to save",
            f"Best of those tried: every {result['best_interval_s']:.0f} s of steps. Young's formula says "
            f"{result['young_s']:.0f} s, Daly's {result['daly_s']:.0f} s.",
            interval_table(result["intervals"]),
            "## The same seeds on real processes",
            replayed(result["replay"]),
        ]
    ) + "\n"  # fmt: skip


def costs(result: dict[str, Any]) -> str:
    rows = {
        f"every {result['best_interval_s']:.0f} s": result["best"],
        f"every {result['fleet']['usual_interval_s']:.0f} s": result["usual"],
        f"every {result['best_interval_s']:.0f} s, and on each notice": result["noticed"],
    }
    lines = ["| checkpoints | hours | $ | goodput | interruptions |", "|---|---|---|---|---|"]
    for name, found in rows.items():
        cells = [spread(found["hours"], ".2f"), spread(found["usd"], ".0f"), spread(found["goodput"], ".3f")]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['interruptions']['mean']:.2f} |")
    return "\n".join([*lines, "", "Median, in brackets the 5th and 95th of a hundred; of interruptions the mean."])


def spread(found: dict[str, float], form: str) -> str:
    return f"{found['p50']:{form}} ({found['p5']:{form}} – {found['p95']:{form}})"


def interval_table(rows: list[dict[str, float]]) -> str:
    lines = ["| every | goodput | Daly's expectation |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {row['interval_s']:.0f} s | {row['goodput']:.4f} | {row['daly']:.4f} |" for row in rows)]
    )


def replayed(found: dict[str, Any] | None) -> str:
    if found is None:
        return "Not replayed yet: `python benchmarks/fleet_replay.py`."
    run = found["run"]
    lines = ["| seed | kills, simulated | real | goodput, simulated | measured | ratio |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        kills, ratio = f"{row['simulated_kills']} | {row['kills']}", row["measured"] / row["simulated"]
        lines.append(f"| {row['seed']} | {kills} | {row['simulated']:.3f} | {row['measured']:.3f} | {ratio:.3f} |")
    return (
        f"Measured on {found['date']}, {found['cores']} cores: a small training ({run['work_s']:.1f} s of steps, a "
        f"checkpoint every {run['interval_s']:.1f} s holds it up for {1000 * run['checkpoint_s']:.0f} ms, "
        f"{run['restart_s']:.2f} s from a kill to the next step; medians of runs without a history), killed by "
        f"kill -9 at the history's times, every {found['mean_s']:.0f} s in the mean, and resumed.\n\n"
        + "\n".join(lines)
        + f"\n\nOver all seeds: {found['ratio']:.3f} × the simulated goodput; the worst seed {found['worst']:.3f} ×. "
        "Where the kills differ, the one run ended before an interruption that the other met."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
