"""Check that your training is the same after a kill, and on any number of ranks.

    python src/prove.py <overrides of train.py> [--checks=resume,ddp] [--steps=24]
    [--tolerance=1e-9]

It trains a few steps again and again with train.py (small batch, no dropout, float64 where the
module can), each time with one thing changed, and compares every step with those of a reference
run: images, loss, weights, optimizer, metrics. Checks: repeat, resume (resume_step, resume_epoch),
accumulate, ddp, fsdp, workers, metric, eval, and compile with trainer=gpu. Needs no GPU. The table
is written as prove.md and prove.json into logs/prove/<id>/. Exit code 0: nothing differs; 1:
something does; 2: wrong options.
"""

import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import read_command
from lockstep.process.environment import environment
from lockstep.process.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from lockstep.process.script import script
from lockstep.records.config import Config
from lockstep.records.folder import new_run_id
from lockstep.records.proof_table import CHECKS, GPU_CHECKS, CheckResult, skip_check, write_table
from lockstep.runs.batch_search import TRAIN_SCRIPT, remove_launcher_variables
from lockstep.runs.forked import run_forked
from lockstep.runs.proof import DIGEST_KEY, RANKS, Proof, RunFailed, ScriptRunner, read_test_metrics
from lockstep.runs.proof_causes import (
    cause_of_metric,
    cause_of_parts,
    cause_of_resume,
    cause_of_unseeded,
    cause_of_unused,
    first_random_call,
    has_same_targets,
)
from lockstep.runs.step_trace import (
    Difference,
    StepTrace,
    difference_result,
    find_changed_attributes,
    find_first_difference,
    find_metric_difference,
)

log = logging.getLogger(__name__)

STEPS = 24
MORE_WORKERS = 2
TOLERANCE = 1e-9


def check_repeat(proof: Proof) -> CheckResult:
    difference = proof.compare_repeat()
    if difference is None:
        return CheckResult("repeat", True)
    cause = "the order of the sums on this device differs: trainer.deterministic=true"
    if difference.kind == "images":
        cause = cause_of_unseeded(proof.reference)
    elif proof.reference.draws_random_numbers:
        cause = f"a generator that no seed reaches: {first_random_call(proof.reference)}"
    return difference_result("repeat", difference, cause)


def check_resume_step(proof: Proof) -> CheckResult:
    steps = list(proof.reference.steps)
    step = steps[max(len(steps) * 3 // 4 - 1, 0)]
    return check_resume(proof, "resume_step", "stops_at", (EXIT_INTERRUPTED,), step)


def check_resume_epoch(proof: Proof) -> CheckResult:
    # A shell reports a kill as 137, Python as -9.
    return check_resume(proof, "resume_epoch", "dies_in", (-9, 137), 1)


def check_resume(
    proof: Proof, check: str, stop_option: str, exit_codes: tuple[int, ...], stop_value: int
) -> CheckResult:
    reference = proof.reference
    try:
        run = proof.run_and_resume(check, stop_option, exit_codes, stop_value)
    except RunFailed as error:
        return CheckResult(check, False, difference="the run fails", cause=str(error))
    difference = find_first_difference(run, reference, 0.0)
    if difference is None:
        return CheckResult(check, True)
    if proof.compare_repeat():
        return skip_check(check, "two runs of the same command differ already")
    return difference_result(check, difference, cause_of_resume(run, reference, difference))


def check_accumulate(proof: Proof) -> CheckResult:
    reason = proof.why_not_in_parts()
    norms = proof.reference.setup.batch_norms
    if norms:
        reason = f"BatchNorm ({norms[0]}) normalises micro-batches"
    if reason:
        return skip_check("accumulate", reason)
    run = proof.trace_in_parts("accumulate", micro_batches=2)
    if "manual optimization" in proof.failures.get("accumulate", ""):
        return skip_check("accumulate", "the module calls its optimizers itself")
    result = compare_parts(proof, "accumulate", run)
    is_of_batch = result.first_step == 1 and str(result.difference).startswith("loss")
    if result.equal is False and is_of_batch and not str(result.cause).startswith("a loss that"):
        return skip_check("accumulate", "the loss of a batch is not the mean of its images' losses")
    return result


def check_ranks(proof: Proof, check: str) -> CheckResult:
    reason = proof.why_not_in_parts() or why_not_two_ranks(proof)
    if reason:
        return skip_check(check, reason)
    return compare_parts(proof, check, proof.run_on_two_ranks(check))


def compare_parts(proof: Proof, check: str, run: StepTrace) -> CheckResult:
    """Compare losses, weights and optimizer of a run that computes batches in parts."""
    reference = proof.reference
    difference = find_first_difference(run, reference, proof.tolerance, compares_metrics=False)
    failure = proof.failures.get(check)
    if difference is None and failure is None:
        return CheckResult(check, True)
    unused = {**run.unused, **reference.unused}
    step = difference.step if difference else None
    if failure is not None:
        cause = cause_of_unused(unused) if unused else failure
        return CheckResult(check, False, step, "the run fails", cause)
    assert difference is not None
    if difference.kind == "images" and proof.is_lockstep:
        return difference_result(check, difference, "the ranks read other images")
    return difference_result(check, difference, cause_of_parts(difference, reference, run))


def check_workers(proof: Proof) -> CheckResult:
    reference = proof.reference
    changes: dict[str, Any] = {f"+{DIGEST_KEY}.more_workers": MORE_WORKERS}
    if proof.is_lockstep:
        num_workers = proof.config["data"].get("num_workers")
        of_user = num_workers if isinstance(num_workers, int) else 0
        changes = {"data.num_workers": of_user + MORE_WORKERS}
        if "path" in proof.config["data"]:
            changes["data.path"] = "loader"
    run = proof.trace_run("workers", changes)
    if "workers" in proof.failures:
        return CheckResult("workers", False, None, "the run fails", proof.failures["workers"])
    if not proof.is_lockstep and run.setup.num_workers == reference.setup.num_workers:
        return skip_check("workers", "the loader is no DataLoader, and has no workers to add")
    difference = find_first_difference(run, reference, 0.0, compares_metrics=False)
    if difference is None:
        return CheckResult("workers", True)
    if difference.kind == "images":
        return explain_workers(proof, run, difference)
    tolerated = find_first_difference(run, reference, proof.tolerance, compares_metrics=False)
    if tolerated is None:
        return CheckResult("workers", True)
    return difference_result("workers", tolerated, "the step depends on the number of workers")


def explain_workers(proof: Proof, run: StepTrace, difference: Difference) -> CheckResult:
    """Tell streams and copied generators from transforms that PyTorch seeds for each worker."""
    if proof.compare_repeat():
        return skip_check("workers", "two runs of the same command differ already")
    setup = proof.reference.setup
    if setup.streams:
        cause = (
            f"{setup.streams[0]} is read by every worker as a whole: take a share by "
            "torch.utils.data.get_worker_info()"
        )
        return difference_result("workers", difference, cause)
    if setup.generators:
        cause = (
            f"a generator of the dataset ({first_random_call(proof.reference)}) is copied into "
            "each worker: draw from torch.rand, which each worker seeds"
        )
        return difference_result("workers", difference, cause)
    if has_same_targets(run, proof.reference, difference.step):
        return skip_check(
            "workers", "the data draw random numbers, which PyTorch seeds for each worker"
        )
    return difference_result(
        "workers", difference, "the order of the images depends on the workers"
    )


def check_metric(proof: Proof) -> CheckResult:
    monitor = str(proof.config["task"].get("monitor"))
    reason = why_no_metric(proof, monitor)
    if reason:
        return skip_check("metric", reason)
    reference = proof.reference
    run = proof.run_on_two_ranks("ddp")
    if any(len(ranks) < RANKS for ranks in run.metrics.values()) or not run.metrics:
        return skip_check("metric", f"two ranks by DDP fail: {proof.failures.get('ddp')}")

    # Metrics are compared as long as the weights are equal: the sanity check is before any step.
    training = find_first_difference(run, reference, proof.tolerance, compares_metrics=False)
    last = training.step - 1 if training else len(reference.steps)
    compared = StepTrace(
        metrics={key: ranks for key, ranks in reference.metrics.items() if key[1] <= last}
    )
    difference = find_metric_difference(run, compared, proof.tolerance, [monitor])
    if difference is None:
        return CheckResult("metric", True)
    return difference_result("metric", difference, cause_of_metric(run, monitor))


def why_no_metric(proof: Proof, monitor: str) -> str:
    """Return why two ranks cannot give the same metric, or ""."""
    if not any(monitor in ranks[0] for ranks in proof.reference.metrics.values()):
        return f"task.monitor={monitor} is no metric of a validation"
    if not proof.is_lockstep and proof.why_not_in_parts():
        return proof.why_not_in_parts()
    smallest = proof.reference.setup.smallest_validation_batch
    if not proof.is_lockstep and 0 < smallest < RANKS:
        return f"a validation batch of {smallest} image cannot be cut in two"
    return why_not_two_ranks(proof)


def why_not_two_ranks(proof: Proof) -> str:
    if proof.one_process == "gpu":
        return "trainer=gpu computes on one GPU: leave trainer=gpu out"
    return ""


def check_eval(proof: Proof) -> CheckResult:
    reference = proof.reference
    expected = read_test_metrics(proof.run_folder("reference"))
    if not expected:
        return skip_check("eval", "the task has no test_step, or the data no test_dataloader")
    limit = f"trainer.limit_test_batches={proof.epoch_steps}"
    overrides = ["ckpt_path=reference", "run_id=evaluated", limit]
    code, line = proof.run_script("eval", "evaluated", overrides)
    if code != EXIT_OK:
        return CheckResult("eval", False, None, "eval.py fails", line)
    values = read_test_metrics(proof.folder / "eval" / "runs" / "evaluated")
    steps = list(reference.steps.values())
    when = ("test", len(steps))
    difference = find_metric_difference(
        StepTrace(metrics={when: [values]}), StepTrace(metrics={when: [expected]}), proof.tolerance
    )
    if difference is None:
        return CheckResult("eval", True)
    changed = find_changed_attributes(reference.starts[0], steps[-1])
    names = ", ".join(f"self.{name}" for name in changed) or "of the module"
    cause = f"state that is not in the checkpoint ({names}), or random numbers in test_step"
    return difference_result("eval", difference, cause)


def check_compile(proof: Proof) -> CheckResult:
    """Compare the compiled net with the net as it is written."""
    if proof.reference.draws_random_numbers:
        return skip_check(
            "compile", "the step draws random numbers, and compiled kernels draw others"
        )
    run = proof.trace_run("compile", {"trainer.compile": True})
    if "compile" in proof.failures:
        return CheckResult("compile", False, None, "the run fails", proof.failures["compile"])
    difference = find_first_difference(
        run, proof.reference, proof.tolerance, compares_metrics=False
    )
    if difference is None:
        return CheckResult("compile", True)
    cause = "torch.compile computes something else than this net: trainer.compile=false"
    return difference_result("compile", difference, cause)


CHECK_FUNCTIONS: dict[str, Callable[[Proof], CheckResult]] = {
    "repeat": check_repeat,
    "resume_step": check_resume_step,
    "resume_epoch": check_resume_epoch,
    "accumulate": check_accumulate,
    "ddp": partial(check_ranks, check="ddp"),
    "fsdp": partial(check_ranks, check="fsdp"),
    "workers": check_workers,
    "metric": check_metric,
    "eval": check_eval,
    "compile": check_compile,
}


def prove(proof: Proof, checks: list[str]) -> list[CheckResult]:
    """Run the checks, log each line as it is known, and write prove.md and prove.json."""
    proof.train_reference()
    reference = proof.reference
    losses = [loss for loss in reference.losses if loss is not None]
    where = (
        f"{len(reference.steps)} steps in two epochs, float{proof.precision[:2]}, "
        f"tolerance {proof.tolerance:g}, "
        f"without dropout, on {platform.machine()} ({proof.one_process}), "
        f"torch {version('torch')}, lightning {version('lightning')}"
    )
    log.info(where)
    if len(set(losses)) == 1:
        log.warning("The loss is the same in every step: this training learns nothing.")
    results = []
    for check in checks:
        results.append(CHECK_FUNCTIONS[check](proof))
        log.info(f"{results[-1]}")
    write_table(proof.folder, proof.overrides, results, where)
    proof.remove_batches()
    return results


@dataclass
class Options:
    """The options of prove.py itself.

    Args:
        checks: their names; None: all that suit the device.
    """

    checks: list[str] | None = None
    steps: int = STEPS
    tolerance: float = TOLERANCE


def read_options(argv: list[str]) -> tuple[list[str], Options]:
    """Return the overrides and the options.

    Raises:
        UserError: an option has a wrong value.
    """
    overrides = []
    options = Options()
    for word in argv:
        key, _, value = word.partition("=")
        if key == "--checks":
            options.checks = parse_checks(value)
        elif key == "--steps":
            options.steps = int(parse_number(word, value, smallest=4))
        elif key == "--tolerance":
            options.tolerance = parse_number(word, value, smallest=0.0)
        else:
            overrides.append(word)
    return overrides, options


def parse_checks(names: str) -> list[str]:
    """Return the checks that a list names; `resume` names both of its kind."""
    chosen = []
    for name in names.split(","):
        matches = [check for check in CHECKS if check == name or check.startswith(f"{name}_")]
        if not matches:
            raise UserError(f"--checks={names}: there is no {name!r}; take {', '.join(CHECKS)}.")
        chosen += matches
    return [check for check in CHECKS if check in chosen]


def default_checks(device: str) -> list[str]:
    """Return the checks that are made where none are chosen."""
    return [check for check in CHECKS if device == "gpu" or check not in GPU_CHECKS]


def parse_number(word: str, value: str, smallest: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not smallest <= number < float("inf"):
        raise UserError(f"{word}: give a number from {smallest:g} on.")
    return number


def run_child(name: str, overrides: list[str], output: Path) -> int:
    """Run train.py or eval.py; return its exit code."""
    script = TRAIN_SCRIPT.with_name(f"{name}.py")
    return run_forked(script, overrides, remove_launcher_variables(environment()), output)


def create_proof(
    config: Config, options: Options, script_runner: ScriptRunner = run_child
) -> Proof:
    """Return a proof, in a new folder.

    Raises:
        UserError: the runs would save no checkpoints.
    """
    if not (config["callbacks"] or {}).get("checkpoints"):
        raise UserError("A proof resumes from checkpoints: leave '~callbacks.checkpoints' out.")
    folder = Path(config["paths"]["log_dir"]) / "prove" / new_run_id()
    folder.mkdir(parents=True)
    steps = options.steps // 2
    return Proof(config, config["overrides"], folder, script_runner, steps, options.tolerance)


@script
def main(argv: list[str]) -> int:
    """Train again and again, log the table, and return the exit code."""
    overrides, options = read_options(argv)
    config = read_command("train", overrides, __doc__ or "").compose()
    proof = create_proof(config, options)
    results = prove(proof, options.checks or default_checks(proof.one_process))
    log.info(os.path.relpath(proof.folder / "prove.md"))
    failed = [result.check for result in results if result.equal is False]
    if failed:
        log.info(f"Not the same: {', '.join(failed)}")
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
