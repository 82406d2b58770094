"""The runs of src/prove.py: the same training again and again, each time with one thing changed."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS
from lockstep.config.keys import is_placement
from lockstep.config.overrides import (
    SHORT_RUN_OVERRIDES,
    config_folders,
    overrides_of_short_run,
    quote_value,
)
from lockstep.config.schema import key_of
from lockstep.config.suggestions import options_with
from lockstep.process.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.records.config import Config
from lockstep.runs.batch_size import is_lockstep_data
from lockstep.runs.step_trace import Difference, StepTrace, find_first_difference, read_trace

# Images of an optimizer step
BATCH_SIZE = 16
RANKS = 2
# The same sums in another order differ by the rounding of float32.
FLOAT32_TOLERANCE = 1e-4
DIGEST_KEY = "callbacks.prove"
FIXED_OPTIONS = {
    **SHORT_RUN_OVERRIDES,
    "trainer.max_epochs": 2,
    "trainer.accumulate_grad_batches": 1,
    "trainer.num_sanity_val_steps": -1,
    "trainer.log_every_n_steps": 1,
    "trainer.num_threads": 1,
    "test": False,
    "++callbacks.hardware": "null",
    f"+{DIGEST_KEY}._target_": "lockstep.callbacks.step_digest.StepDigest",
    f"+{DIGEST_KEY}.folder": "${run:folder}",
}
# A function that runs a script with overrides until it ends, writes its output to the path, and
# returns its exit code.
ScriptRunner = Callable[[str, list[str], Path], int]


class RunFailed(Exception):
    """A run that should have trained has failed; the message is its last line."""


@dataclass
class Proof:
    """The runs of a proof: the reference first, each other one when a check asks for it.

    Attributes:
        overrides: the overrides of the user.
        folder: holds the folders of the runs.
        script_runner: runs train.py or eval.py.
        epoch_steps: optimizer steps of each of the two epochs.
    """

    config: Config
    overrides: list[str]
    folder: Path
    script_runner: ScriptRunner
    epoch_steps: int
    tolerance: float
    precision: str = "64-true"
    failures: dict[str, str] = field(default_factory=dict)
    _reference: StepTrace | None = None

    @property
    def is_lockstep(self) -> bool:
        return is_lockstep_data(self.config)

    def run_folder(self, name: str) -> Path:
        return self.folder / "train" / "runs" / name

    def run_script(self, script_name: str, name: str, overrides: list[str]) -> tuple[int, str]:
        """Run a script; return its exit code and its last line."""
        output = self.folder / f"{name}.txt"
        log_folder = f"paths.log_dir={quote_value(str(self.folder))}"
        code = self.script_runner(script_name, [*overrides, log_folder], output)
        text = output.read_text().strip()
        return code, text.rpartition("\n")[2].removeprefix("error: ")

    def train(self, name: str, changes: Mapping[str, Any], trainer: str = "") -> tuple[int, str]:
        """Run train.py as the user does, with changes beside those of every run of a proof."""
        trainer = trainer or self.one_process
        changes = {
            **FIXED_OPTIONS,
            **self._size_options(),
            "trainer": trainer,
            "run_id": name,
            **changes,
        }
        folders = config_folders(self.overrides, CONFIGS)
        overrides = [
            text for text in self.overrides if _keeps_override(key_of(text), trainer, folders)
        ]
        return self.run_script("train", name, overrides_of_short_run(overrides, changes))

    @property
    def one_process(self) -> str:
        return "gpu" if self.config["choices"].get("trainer") == "gpu" else "cpu"

    def _size_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"trainer.precision": self.precision}
        for stage in ("train", "val", "test"):
            options[f"trainer.limit_{stage}_batches"] = self.epoch_steps
        if self.is_lockstep:
            size = self.config["data"].get("global_batch_size", BATCH_SIZE)
            options["data.global_batch_size"] = (
                BATCH_SIZE if size == "max" else min(BATCH_SIZE, size)
            )
        if "pretrained" in self.config["model"]:
            options["model.pretrained"] = False
        return options

    @property
    def reference(self) -> StepTrace:
        """The run that all others are compared with, once `train_reference` has made it."""
        assert self._reference is not None, "train_reference() comes first"
        return self._reference

    def train_reference(self) -> None:
        """Train the run that all others are compared with.

        It may fall back to float32 and to shorter epochs.

        Raises:
            UserError: it does not train.
        """
        code, line = self._train_as_reference()
        if code == EXIT_FAILED:
            # The module may create float32 tensors itself, which float64 weights refuse.
            self.precision = "32-true"
            self.tolerance = max(self.tolerance, FLOAT32_TOLERANCE)
            code, line = self._train_as_reference()
        self._read_reference(code, line)

        if self.reference.whole_batches:
            # The last batch of an epoch is smaller and may not divide into equal parts. Epochs end
            # before it.
            self.epoch_steps = self.reference.whole_batches
            self._read_reference(*self._train_as_reference())

    def _train_as_reference(self) -> tuple[int, str]:
        shutil.rmtree(self.run_folder("reference"), ignore_errors=True)
        changes = {"test": True, f"+{DIGEST_KEY}.keeps_batches": not self.is_lockstep}
        return self.train("reference", changes)

    def _read_reference(self, code: int, line: str) -> None:
        if code != EXIT_OK:
            raise UserError(f"This training fails by itself: {line}")
        self._reference = read_trace(self.run_folder("reference"))

    def remove_batches(self) -> None:
        """Remove the batches of the reference, which may be large."""
        shutil.rmtree(self.run_folder("reference") / "batches", ignore_errors=True)

    def trace_run(self, name: str, changes: Mapping[str, Any], trainer: str = "") -> StepTrace:
        """Train once under this name, and return the trace.

        The run may have failed on its way: `failures` keeps its last line.
        """
        folder = self.run_folder(name)
        if not folder.exists() and name not in self.failures:
            code, line = self.train(name, changes, trainer)
            if code != EXIT_OK:
                self.failures[name] = line
        return read_trace(folder)

    def compare_repeat(self) -> Difference | None:
        """Train once more without a change; return where the run differs from the reference."""
        return find_first_difference(self.trace_run("repeat", {}), self.reference, 0.0)

    def run_and_resume(
        self, name: str, stop_option: str, exit_codes: tuple[int, ...], stop_value: int
    ) -> StepTrace:
        """Let an option of StepDigest end a run, resume it, and return its trace.

        Args:
            stop_value: the option's value, a step or an epoch.
            exit_codes: the exit codes that the stopped run may have.

        Raises:
            RunFailed: the stop or the resume did not work.
        """
        code, line = self.train(name, {f"+{DIGEST_KEY}.{stop_option}": stop_value})
        if code not in exit_codes:
            raise RunFailed(f"the stop ended with exit code {code}: {line}")
        code, line = self.run_script(
            "train", f"{name}-resumed", [f"resume={name}", f"++{DIGEST_KEY}.{stop_option}=null"]
        )
        if code != EXIT_OK:
            raise RunFailed(line)
        return read_trace(self.run_folder(name))

    def trace_in_parts(self, name: str, trainer: str = "", micro_batches: int = 1) -> StepTrace:
        """Return the trace of a run that computes the reference's batches in parts."""
        changes: dict[str, Any] = {}
        if micro_batches > 1:
            changes["trainer.accumulate_grad_batches"] = micro_batches
            changes["trainer.limit_train_batches"] = self.epoch_steps * micro_batches
        if trainer:
            changes["trainer.devices"] = RANKS
        if not self.is_lockstep:
            changes[f"+{DIGEST_KEY}.replay"] = self.run_folder("reference")
        return self.trace_run(name, changes, trainer)

    def run_on_two_ranks(self, name: str) -> StepTrace:
        return self.trace_in_parts(name, f"{name}_sim")

    def why_not_in_parts(self) -> str:
        """Return why batches in parts cannot give the same, or ""."""
        reference = self.reference
        images = len(next(iter(reference.steps.values())).images)
        if reference.draws_random_numbers:
            return "the step draws random numbers, which differ between ranks and micro-batches"
        if not self.is_lockstep and reference.setup.loaders > 1:
            return "there are several training loaders"
        if images == 0:
            return "the batch holds no tensors, and cannot be cut in two"
        if images % RANKS:
            return f"a batch of {images} images cannot be cut in two: give an even batch size"
        return ""


def _keeps_override(key: str, trainer: str, folders: tuple[Path, ...]) -> bool:
    """Return whether a user's override also holds under the trainer of a proof's run.

    Args:
        folders: the folders of configs, whose trainers may list a key that others lack.
    """
    if key.startswith("trainer.strategy."):
        return trainer == "ddp_sim"
    if is_placement(key):
        return False
    options = options_with(key, folders) if key.startswith("trainer.") else []
    is_common = not options or "trainer=default" in options
    return is_common or f"trainer={trainer.removesuffix('_sim')}" in options


def read_test_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of a run's record whose names begin with test."""
    metrics = json.loads((folder / "run.json").read_text())["metrics"]
    return {name: float(value) for name, value in metrics.items() if name.startswith("test")}
