"""Faults between two hosts: kill -9 and resume, a cable that is cut for a while, a cable that loses and delays."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import host_faults
from campaign import Clock, Row, Task, piece, spread
from hosts import Host, cut, mend, missing, two_hosts
from kill_hooks import PHASES, Plan
from kills import DDP, KILLS_PER_RUN, TINY, Kills, history, reference_of
from lockstep.runs.folder import RunFolder
from lossy_cable import LossyCable

DOOR = f"""
import json, os, sys
from pathlib import Path
sys.path.insert(1, {str(Path(__file__).parent)!r})
if "LOCKSTEP_SUPERVISOR" in os.environ and "KILL_PLAN" in os.environ:  # a rank; the supervisor imports no torch
    from kill_hooks import Plan, plant
    plant(Plan(**json.loads(os.environ["KILL_PLAN"]), source=str(Path(__file__).resolve().parent)))
from train import main
sys.exit(main(sys.argv[1:]))
"""
ACROSS = [*DDP, *TINY, "trainer.devices=1", "trainer.num_nodes=2"]


def start_on_both(hosts: tuple[Host, Host], name: str, plan: Plan) -> list[int]:
    """The same command on both; their exit codes once both have ended."""
    facts = {key: getattr(plan, key) for key in ("folder", "start", "phase", "event", "rank", "target", "number")}
    running = [
        host.start([".venv/bin/python", "src/train_under_fire.py", *ACROSS, f"run_id={name}", "resume=auto"], name,
                   MASTER_ADDR=hosts[0].address, MASTER_PORT="29500", NODE_RANK=str(index), KILL_PLAN=json.dumps(facts))
        for index, host in enumerate(hosts)
    ]  # fmt: skip
    codes = [process.wait(180) for process in running]
    deadline = time.monotonic() + 10
    while any(host.pids_of(name) for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.05)
    return codes


@piece("kills-hosts", 20, missing)
def kills_hosts(task: Task) -> list[Row]:
    kills = Kills(reference_of([*DDP, *TINY], task.folder / "one-host"))
    clock = Clock()
    with two_hosts(task.folder) as hosts:
        for host in hosts:
            (host.project / "src/train_under_fire.py").write_text(DOOR)
        while len(kills.killed) < task.count and not task.over():
            name, start, here = f"run{kills.runs}", 0, 0
            marks = task.folder / f"{name}-marks"
            while True:
                start += 1
                plan = Plan(str(marks), start)
                if here < KILLS_PER_RUN and len(kills.killed) < task.count and not task.over():
                    number = len(kills.killed)
                    phase, rank = PHASES[number % len(PHASES)], task.chance.randrange(2)
                    target = "supervisor" if task.chance.random() < 0.33 else f"rank {rank}"
                    event = 1 + task.chance.randrange(kills.reference.counts[rank][phase])
                    plan = Plan(str(marks), start, phase, event, rank, target)
                codes = start_on_both(hosts, name, plan)
                mark = marks / f"killed-{start}.json"
                if mark.exists():
                    here += 1
                    if history(marks):
                        kills.killed.append({"phase": plan.phase, "target": plan.target})
                        kills.ended_s.append(round(time.time() - mark.stat().st_mtime, 1))
                elif codes == [0, 0]:
                    break
                else:
                    output = "\n".join(host.output(name)[-600:] for host in hosts)
                    kills.wrong.append(f"{name}, start {start}: exit codes {codes}: {output}")
                    break
            kills.check(name, RunFolder(hosts[0].project / "logs/train/runs" / name), marks)
            task.say(f"{len(kills.killed)} kills, {kills.runs} runs, {len(kills.wrong)} wrong")
            if len(kills.wrong) > 5:
                break
    return [kills.row("kills-hosts", "the same for two hosts, one command on each", clock)]


def goes_on(run: Any, seconds: float) -> list[str]:
    """Whether a run takes steps in the next seconds, and stops in order when it is asked to."""
    before = _newest_step(run)
    deadline = time.monotonic() + seconds
    while _newest_step(run) <= before and time.monotonic() < deadline and not run._ended():
        time.sleep(0.1)
    wrong = [] if _newest_step(run) > before else [f"no step within {seconds} s: {run.said()[-400:]}"]
    if not run._ended():
        seen = run.see("", "", lambda: os.kill(run.pid(1, True), signal.SIGTERM), 60)
        wrong += [] if seen.codes == [75, 75] else [f"exit codes {seen.codes}: {seen.last_lines}"]
    return wrong


def _newest_step(run: Any) -> int:
    return max((int(p.name[9:17]) for p in run.path.glob("checkpoints/last-step*.ckpt.json")), default=0)


def ends_named(seen: host_faults.Seen, limit_s: float) -> list[str]:
    """The run ended in time, and somebody says which rank, on which host, in which phase."""
    wrong = [] if seen.seconds <= limit_s else [f"took {seen.seconds} s"]
    error = (seen.record or {}).get("error") or {}
    if {"rank", "host", "phase"} - error.keys() or 75 in seen.codes or 0 in seen.codes:
        wrong.append(f"exit codes {seen.codes}, error {error}, {seen.last_lines}")
    return wrong + ([f"left {seen.left_behind}"] if seen.left_behind else [])


@piece("cable", 3, missing)
def cable(task: Task) -> list[Row]:
    """Cut for 20 s and for 60 s, with a time limit of 40 s."""
    rows, limit_s = [], 40.0
    with two_hosts(task.folder) as hosts:
        for seconds in (20.0, 60.0):
            clock, wrong, took = Clock(), [], []
            for number in range(task.count):
                run = host_faults.Run(hosts, f"cut-{seconds:.0f}-{number}")
                run.start(f"trainer.timeout_s={limit_s:.0f}", "trainer.max_epochs=100000").wait_for_training()
                try:
                    if seconds < limit_s:
                        cut(hosts[1])
                        time.sleep(seconds)
                        mend(hosts[1])
                        wrong += goes_on(run, 60)
                    else:
                        seen = run.see("", "", lambda: cut(hosts[1]), seconds)
                        took.append(seen.seconds)
                        wrong += ends_named(seen, limit_s + 10)
                finally:
                    mend(hosts[1])
            what = f"cable cut for {seconds:.0f} s, `trainer.timeout_s={limit_s:.0f}`"
            seen_words = f"ended {spread(took)} s later, naming rank, host and phase" if took else "the run went on"
            rows.append(Row("cable", what, task.count, seen_words, clock.seconds, wrong))
            task.say(f"{what}: {wrong or 'fine'}")
    return rows


@piece("lossy", 2, missing)
def lossy(task: Task) -> list[Row]:
    """30 % of all frames lost and the others half a second late, while it trains; it goes on, or ends in time."""
    clock, wrong, outcomes, limit_s = Clock(), [], [], 40.0
    with two_hosts(task.folder) as hosts, LossyCable(*hosts, seed=task.seed) as carrier:
        for number in range(task.count):
            run = host_faults.Run(hosts, f"lossy-{number}")
            run.start(f"trainer.timeout_s={limit_s:.0f}", "trainer.max_epochs=100000").wait_for_training()
            steps = _newest_step(run)
            carrier.loss, carrier.delay_s = 0.3, 0.5
            reached, sign = steps, time.monotonic()
            began = sign
            while not run._ended() and time.monotonic() < began + 60:
                if _newest_step(run) > reached:
                    reached, sign = _newest_step(run), time.monotonic()
                time.sleep(0.1)
            if run._ended():
                silent = time.monotonic() - sign
                seen = run.see("", "", lambda: None, 30)
                outcomes.append(f"ended {silent:.0f} s after its last checkpoint")
                wrong += ends_named(seen, limit_s + 10)
                wrong += [f"took {silent:.0f} s"] if silent > limit_s + 10 else []
            else:
                taken = _newest_step(run) - steps
                carrier.loss, carrier.delay_s = 0.0, 0.0
                wrong += goes_on(run, 60)
                outcomes.append(f"went on, {taken} steps further at the last checkpoint after 60 s")
            carrier.loss, carrier.delay_s = 0.0, 0.0
        lost = f"{carrier.lost} of {carrier.lossy} frames lost meanwhile"
    what = f"30 % loss and 500 ms for 60 s between two hosts (a relay in user space), `trainer.timeout_s={limit_s:.0f}`"
    return [Row("lossy", what, task.count, f"{'; '.join(outcomes)}; {lost}", clock.seconds, wrong)]
