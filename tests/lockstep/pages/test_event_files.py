"""TensorBoard reads, of a run that only git keeps, the curves of its source."""

import logbook as logbook_script
from example_runs import write_run
from lockstep.pages.build import build
from lockstep.pages.facts import RunFacts
from lockstep.pages.source import read_source, source_path


def test_tensorboard_reads_the_curves_of_a_kept_run(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logbook, into = tmp_path / "logbook", tmp_path / "events"
    build(logbook, [write_run(tmp_path / "logs", "run-1", started_at="2026-11-20T20:00:00Z")])
    for _ in range(2):  # a second time writes it anew
        assert logbook_script.main(["--logbook", str(logbook), "tensorboard", "--into", str(into)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"tensorboard --logdir {into}"
    run = RunFacts(read_source(source_path(logbook, "run-1")))
    events = EventAccumulator(str(into / "run-1"))
    events.Reload()
    steps, values = run.curve("train/loss")
    assert len(steps) > 1
    found = events.Scalars("train/loss")
    assert [event.step for event in found] == steps
    assert [round(event.value, 6) for event in found] == [round(value, 6) for value in values]
    times = dict(zip(*run.curve("time_s"), strict=True))
    assert found[-1].wall_time == 1795204800 + times[steps[-1]]  # 2026-11-20T20:00:00Z
    node, name, (seconds, _) = next(iter(run.hardware_series()))
    assert [event.step for event in events.Scalars(f"hardware/node{node}/{name}")] == [int(s) for s in seconds]


def test_a_run_that_the_logbook_lacks_is_named(tmp_path, caplog):
    (tmp_path / "logbook").mkdir()
    assert logbook_script.main(["--logbook", str(tmp_path / "logbook"), "tensorboard", "gone"]) == 2
    assert "The logbook has no run 'gone'" in caplog.text
