"""Write the checkpoint of a step in a thread, as best, as last or as both."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from lockstep.checkpoints import files
from lockstep.checkpoints.files import Sidecar
from lockstep.checkpoints.io import check_loadable, write_checkpoint
from lockstep.checkpoints.load import Checkpoint

# The checkpoint files of one step by kind: "best", "last" or both.
Paths = dict[str, Path]


class CheckpointWriter:
    """Write one checkpoint at a time.

    Args:
        weights_only: leave the optimizer's state out of the best checkpoint.

    Attributes:
        job: the write in the thread; it returns the files that it wrote.
    """

    def __init__(self, weights_only: bool) -> None:
        self.weights_only = weights_only
        self.is_checked = False
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.job: Future[Paths] | None = None

    @property
    def is_idle(self) -> bool:
        return self.job is None or self.job.done()

    def begin(self, content: Checkpoint, paths: Paths, sidecar: Sidecar) -> None:
        self.job = self.thread.submit(self._write, content, paths, sidecar)

    def finish(self) -> Paths:
        """Wait for the thread; return the files that it has written, or raise its error."""
        job = self.job
        self.job = None
        return job.result() if job else {}

    def _write(self, content: Checkpoint, paths: Paths, sidecar: Sidecar) -> Paths:
        if not self.is_checked:
            check_loadable(content)
            self.is_checked = True
        if "best" in paths:
            best = drop_optimizer_states(content) if self.weights_only else content
            self._write_file(best, paths["best"], replace(sidecar, weights_only=self.weights_only))
        if "last" in paths:
            if "best" in paths and not self.weights_only:
                files.link(paths["best"], paths["last"])
            else:
                self._write_file(content, paths["last"], sidecar)
        return paths

    def _write_file(self, content: Checkpoint, path: Path, sidecar: Sidecar) -> None:
        files.mark_unfinished(path)
        write_checkpoint(content, path)
        files.write_sidecar(path, sidecar)


def drop_optimizer_states(content: Checkpoint) -> Checkpoint:
    """Return a checkpoint without optimizer states and without weights beside their average."""
    content = {**content, "optimizer_states": []}
    content.pop("current_model_state", None)
    return content
