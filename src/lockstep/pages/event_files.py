"""The curves of a run that git keeps, as files of TensorBoard: for whoever has the clone and not the run folder.

`python src/logbook.py tensorboard RUN …`; a curve has as many points as logbook/runs/<run_id>.json holds of it.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from lockstep.pages.facts import RunFacts
from lockstep.pages.json_values import mapping

Point = tuple[str, int, float, float]  # tag, step, value, seconds since the start


def write_events(run: RunFacts, into: Path) -> Path:
    """The folder of one run's file; what an earlier call wrote there goes."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = into / run.run_id
    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    writer = EventFileWriter(str(folder))
    began = started_at(run)
    for tag, step, value, seconds in sorted(points(run), key=lambda point: point[1]):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(wall_time=began + seconds, step=step, summary=summary))
    writer.close()
    return folder


def points(run: RunFacts) -> Iterator[Point]:
    """Metrics by step, hardware by second."""
    at = dict(zip(*run.curve("time_s"), strict=True))
    for name in mapping(run.source.get("curves")):
        for step, value in zip(*run.curve(name), strict=True):
            yield name, int(step), value, at.get(step, 0.0)
    for node, name, (seconds, values) in run.hardware_series():
        for second, value in zip(seconds, values, strict=True):
            yield f"hardware/node{node}/{name}", int(second), value, second


def started_at(run: RunFacts) -> float:
    try:
        return datetime.fromisoformat(run.record.started_at or "").timestamp()
    except ValueError:
        return 0.0
