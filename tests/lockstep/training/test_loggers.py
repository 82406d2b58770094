"""The loggers that a config names, and that TensorBoard shows each step once over all restarts."""

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.launch.launchers import Cluster
from lockstep.launch.plan import RunPlan
from lockstep.runs.batch import Batch
from lockstep.runs.folder import RunFolder
from lockstep.runs.provenance import REPOSITORY
from lockstep.training.build import build_loggers

DEFAULT = yaml.safe_load((REPOSITORY / "configs" / "logger" / "default.yaml").read_text())


def log_steps(folder: RunFolder, resume_step: int | None, steps: range, value: float) -> None:
    plan = RunPlan(
        {"logger": DEFAULT}, {}, (), Cluster("none", 1, 1, 0, 0, "127.0.0.1", None), "cpu", folder, Batch(8, 8, 1),
        resume_step=resume_step,
    )  # fmt: skip
    for logger in build_loggers(plan):
        for step in steps:
            logger.log_metrics({"train/loss": value + step}, step)
        logger.finalize("success")


def test_a_restart_hides_the_steps_that_were_lost(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    log_steps(folder, None, range(1, 7), 0.0)
    log_steps(folder, 4, range(5, 9), 100.0)
    events = EventAccumulator(str(folder.tensorboard)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 105.0), (6, 106.0), (7, 107.0), (8, 108.0)
    ]  # fmt: skip
    assert [line.split(",")[0] for line in folder.metrics.read_text().splitlines()[1:]] == list("12345678")
