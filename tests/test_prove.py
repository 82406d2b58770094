"""prove.py finds the fault of a training and names its cause, and finds none in sound ones."""

import json
import shlex
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import broken_modules
import prove
from lockstep.config.compose import compose, whole_config
from lockstep.records.proof_table import CheckResult, write_table
from lockstep.runs.step_trace import StepTrace
from runs import run_script, with_small_defaults

BROKEN = Path(broken_modules.__file__)
PLAIN = (
    "task._target_=broken_modules.{task}",
    "data._target_=broken_modules.{data}",
    "task.monitor=val_loss",
    "task.mode=min",
    "trainer=cpu",
)


def line_of(mark: str) -> str:
    before = BROKEN.read_text().partition(f"# {mark}")[0]
    return f"{BROKEN.name}:{before.count(chr(10)) + 1}"


def allow_shares():
    # The tests take warnings for errors, and Lightning recommends sync_dist.
    warnings.filterwarnings("ignore", ".*sync_dist=True.*")


def results_of(*overrides: str, folder: Path, checks: str = "", steps: int = 16):
    """The lines of prove.py, whose runs are forked from a server."""

    def forked(name, overrides, output):
        done = run_script(name, *overrides, logs=output.parent, before=allow_shares)
        output.write_text(done.output)
        return done.code

    config = whole_config(
        compose("train", with_small_defaults("train", (*overrides, f"paths.log_dir={folder}")))
    )
    chosen = prove.parse_checks(checks) if checks else prove.default_checks("cpu")
    options = prove.Options(chosen, steps)
    return prove.prove(prove.create_proof(config, options, forked), chosen)


def plain_overrides(task: str = "Sound", data: str = "Points") -> list[str]:
    return [word.format(task=task, data=data) for word in PLAIN]


# The classes of task and data: checks that fail, checks that are not counted, words of the cause.
CAUSES = {
    ("Sound", "Points"): ((), (), ()),
    ("Normalised", "Points"): (("ddp", "fsdp"), ("accumulate",), ("trainer.sync_batchnorm=true",)),
    ("LogsItsShare", "Points"): (("metric",), (), ("self.log('val_loss', …, sync_dist=True)",)),
    ("MeanOfMeans", "Points"): (("metric",), (), ("mean of the ranks",)),
    ("Summed", "Points"): (("accumulate", "ddp", "fsdp"), (), ("a sum",)),
    ("Unused", "Points"): (("ddp",), (), ("find_unused_parameters=true", line_of("UNUSED"))),
    ("CountsEpochs", "Points"): (("resume_step", "resume_epoch"), (), ("self.epochs_seen",)),
    ("CountsLosses", "Points"): (("resume_step",), (), ("persistent(True)",)),
    ("ForgetsMoments", "Points"): (("resume_step", "resume_epoch"), (), ("optimizer net.0",)),
    ("KnowsItsRank", "Points"): (("ddp", "fsdp"), (), ("rank",)),
    ("CountsTests", "Points"): (("eval",), (), ("self.seen",)),
    ("Sound", "NoisyPoints"): (
        ("repeat",), ("resume_step", "resume_epoch", "workers"), (line_of("UNSEEDED"),),
    ),
    ("Sound", "CopiedPoints"): (("workers",), (), (line_of("COPIED"),)),
    ("Sound", "StreamPoints"): (("workers",), (), ("get_worker_info",)),
    ("Sound", "EndlessPoints"): (("resume_step", "resume_epoch"), (), ("Endless", "state_dict")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parts", CAUSES, ids="-".join)
def test_it_names_the_cause_of_a_fault(parts, tmp_path):
    failing, uncounted, cause = CAUSES[parts]
    # A sound training has all checks; a fault those that it should change.
    checks = ",".join((*failing, *uncounted))
    results = results_of(*plain_overrides(*parts), folder=tmp_path, checks=checks)
    lines = "\n".join(map(str, results))
    assert {result.check for result in results if result.equal is False} == set(failing), lines
    assert {result.check for result in results if result.equal is None} == set(uncounted), lines
    if failing:
        causes = "\n".join(str(result.cause) for result in results if result.equal is False)
        assert [part for part in cause if part not in causes] == [], lines


def test_a_run_without_a_validation_has_no_metric(tmp_path):
    values = {("sanity", 0): [{"val_loss": 1.0}]}
    proof = SimpleNamespace(
        config={"task": {"monitor": "val_loss"}},
        reference=StepTrace(metrics=values),
        is_lockstep=True,
        one_process="cpu",
        run_on_two_ranks=lambda name: StepTrace(metrics={("sanity", 0): [{"val_loss": 0.5}]}),
        failures={"ddp": "rank 0 is lost"},
    )
    result = prove.check_metric(proof)
    assert result.equal is None and "rank 0 is lost" in result.cause


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Sound", "HalvesWhenCompiled"])
def test_a_compiled_net_that_computes_something_else_is_found(task, tmp_path):
    (result,) = results_of(*plain_overrides(task), folder=tmp_path, checks="compile", steps=8)
    assert result.equal is (task == "Sound"), result
    if task != "Sound":
        assert "trainer.compile=false" in str(result.cause) and result.first_step == 1


@pytest.mark.slow
def test_a_persistent_metric_of_the_epoch_is_resumed(tmp_path):
    overrides = plain_overrides("KeepsLosses")
    (result,) = results_of(*overrides, folder=tmp_path, checks="resume_step", steps=8)
    assert result.equal is True, result


def test_nets_are_compiled_where_a_gpu_is_chosen():
    assert "compile" not in prove.default_checks("cpu")
    assert prove.default_checks("gpu") == list(prove.CHECKS)


def test_resume_names_both_of_its_kind():
    assert prove.parse_checks("ddp,resume") == ["resume_step", "resume_epoch", "ddp"]


@pytest.mark.parametrize(
    ("argument", "word"),
    [("--checks=dpp", "take repeat"), ("--steps=two", "--steps=two"), ("--tolerance=-1", "from 0")],
)
def test_a_wrong_option_ends_with_code_2(argument, word, capfd):
    assert prove.main(["experiment=quickstart", argument]) == 2
    assert word in "".join(capfd.readouterr())


def test_a_training_without_checkpoints_is_refused(capfd):
    assert prove.main(["experiment=quickstart", "~callbacks.checkpoints"]) == 2
    assert "checkpoints" in "".join(capfd.readouterr())


def test_the_table_is_written_as_json_and_markdown(tmp_path):
    results = [
        CheckResult("ddp", False, 1, "loss by 1.0e+00", "a loss that is a sum"),
        CheckResult("eval", None, cause="no test"),
    ]
    overrides = ["experiment=mine", "+metrics.a={_target_: m.A}"]
    write_table(tmp_path, overrides, results, "24 steps")
    rows = json.loads((tmp_path / "prove.json").read_text())
    assert rows[0] == {
        "check": "ddp",
        "equal": False,
        "first_step": 1,
        "difference": "loss by 1.0e+00",
        "cause": "a loss that is a sum",
    }
    assert rows[1]["equal"] is None
    text = (tmp_path / "prove.md").read_text()
    assert "| **differs** | 1 | loss by 1.0e+00 |" in text
    # The shell takes the command back as the same words.
    command = next(line for line in text.splitlines() if line.startswith("`")).strip("`")
    assert shlex.split(command)[2:] == overrides


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_net_is_the_same_everywhere(tmp_path):
    results = results_of("experiment=quickstart", folder=tmp_path)
    assert [str(result) for result in results if result.equal is not True] == []
