"""Open a run on this rank: meet the others, decide which run it is, and close it however it ends.

Imports no torch before the first rank is needed, so that every early refusal is quick.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoints.files import newest_whole, read_sidecar
from lockstep.config.keys import is_equal_on_all_ranks
from lockstep.process import signals
from lockstep.process.environment import environment, set_variables
from lockstep.process.errors import (
    EXIT_FAILED,
    EXIT_OK,
    CommandEnded,
    Interrupted,
    UserError,
)
from lockstep.ranks import failures
from lockstep.ranks.find import (
    Cluster,
    find_requested_run_id,
    find_restart_id,
    set_rank_environment,
)
from lockstep.records import provenance
from lockstep.records.batch import Batch
from lockstep.records.config import Config
from lockstep.records.folder import RunFolder
from lockstep.records.record import RunRecord, has_trained, read_record
from lockstep.runs.batch_search import search_largest_batch
from lockstep.runs.batch_size import decide_batch, refuse_other_epoch
from lockstep.runs.finishing import decide_exit_code, finish_run
from lockstep.runs.first_record import begin_record, format_headlines, write_config
from lockstep.runs.resume import check_bucket, check_resumable, read_earlier_config
from lockstep.runs.run import Run, resolve_rank_options
from lockstep.runs.run_lock import choose_run_folder, hold_run_lock

if TYPE_CHECKING:
    from lockstep.ranks.meeting import Meeting

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDecision:
    """The decision of rank 0: the run's folder, its batch and where it begins.

    It is sent to the other ranks as JSON. The folder is relative to paths.log_dir.
    """

    folder: str
    global_batch_size: int
    accumulate: int
    resume_step: int | None
    checkpoint: str | None


@contextmanager
def open_run(config: Config, cluster: Cluster) -> Iterator[Run]:
    """Open the run of this rank, and close it when the block ends, however it ends.

    The ranks meet, rank 0 decides which run it is and where it begins, and its record is begun. An
    exception that leaves the block is logged and recorded and goes no further: `run.exit_code` says
    how the run has ended. Then what is left is uploaded, and the page is written.

    Raises:
        CommandEnded: the run could not be opened; the reason has been logged.
    """
    opening = Opening(config, cluster)
    run = None
    with opening.exit_stack:
        try:
            with _join_run(opening) as run:
                yield run
            code = EXIT_OK
        # A callback or a library may call sys.exit.
        except (Exception, SystemExit) as error:
            code = _report_failure(error, opening)

        # If Lockstep's agent has started this rank, the agent's process finishes the run.
        if not cluster.has_agent:
            code = _finish(opening, code)

    if run is None:
        raise CommandEnded(code)
    run.exit_code = code


@contextmanager
def _join_run(opening: "Opening") -> Iterator[Run]:
    """Open the run and join its ranks; a signal interrupts until the block ends."""
    signals.install_stop_handler(signals.interrupt)
    try:
        run = opening.open()

        from lockstep.runs.join import join_ranks

        with join_ranks(run):
            yield run
    finally:
        # The rest is short, so that a signal is recorded and no longer interrupts.
        signals.install_stop_handler(signals.record_signal)


def _finish(opening: "Opening", code: int) -> int:
    """Finish the run on the first process of a node; return the exit code of this process."""
    folder = opening.folder
    if folder is None or opening.cluster.local_rank:
        return decide_exit_code(opening.config, opening.cluster, folder, code)
    return finish_run(opening.config, opening.cluster, folder, code)


def _report_failure(error: BaseException, opening: "Opening") -> int:
    """Report the exception that ended this rank; return its exit code."""
    cluster = opening.cluster
    # A signal during an import can raise any exception. After the ranks have met, `culprit` names
    # the rank that failed.
    is_explained = isinstance(error, Interrupted | UserError) or hasattr(error, "culprit")
    if signals.received and not is_explained:
        error = Interrupted(signals.first_signal_name())

    if opening.meeting is not None and not getattr(error, "is_of_other_nodes", False):
        # This rank may end before it has joined the others, which must not wait for it.
        meeting = opening.meeting
        error = failures.explain_failure(error, meeting.errors, cluster, meeting.hosts)
    code = failures.report_failure(error, cluster, opening.folder)
    if (
        getattr(error, "is_of_other_nodes", False)
        and cluster.launcher == "torchrun"
        and cluster.num_nodes > 1
    ):
        # At this code torchrun starts the ranks of this node again, beside a node that comes back.
        return EXIT_FAILED
    return code


@dataclass
class Opening:
    """The steps from a composed config to a run that has begun, on one rank.

    Attributes:
        exit_stack: holds what stays open until the run is closed, such as its lock.
        folder: the run's folder, as soon as it is known and locked.
        meeting: the meeting of several ranks, once they have met; None for a single rank.
    """

    config: Config
    cluster: Cluster
    exit_stack: ExitStack = field(default_factory=ExitStack)
    folder: RunFolder | None = None
    meeting: "Meeting | None" = None

    def open(self) -> Run:
        """Return the run, once all ranks have met and know it."""
        set_rank_environment(self.cluster)
        decision = self._decide() if self.cluster.world_size == 1 else self._meet()
        run = self._build_run(decision)
        self._prepare_folder(run)
        return run

    def _meet(self) -> RunDecision:
        """Meet the other ranks; return what rank 0 has decided."""
        from lockstep.ranks.meeting import meet

        config = resolve_rank_options(self.config, self.cluster)
        self.meeting = meet(
            self.cluster,
            config["trainer"]["timeout_s"],
            provenance.take_fingerprint(config, is_equal_on_all_ranks),
            lambda: asdict(self._decide()),
        )
        return RunDecision(**self.meeting.decision)

    def _decide(self) -> RunDecision:
        """Decide on rank 0 which run it is, where it begins, and its batch; begin its record."""
        folder, earlier_record = self._open_folder()
        earlier_config = (read_earlier_config(folder) or {}) if earlier_record else {}
        batch, largest_batch = decide_batch(
            self.config,
            self.cluster,
            earlier_record or RunRecord(),
            earlier_config,
            search_largest_batch,
        )
        run = Run(self.config, self.cluster, folder, batch)
        if earlier_record:
            refuse_other_epoch(self.config, earlier_record, batch)
            check_resumable(folder, run.effective_config(), earlier_record)
        self._find_checkpoint(run, earlier_record)
        begin_record(run, earlier_record, largest_batch)
        for line in format_headlines(run):
            log.info(line)
        return RunDecision(
            folder=os.path.relpath(folder.path, self.config["paths"]["log_dir"]),
            global_batch_size=batch.global_size,
            accumulate=batch.accumulate,
            resume_step=run.resume_step,
            checkpoint=run.checkpoint,
        )

    def _open_folder(self) -> tuple[RunFolder, RunRecord | None]:
        """Return the run's folder, locked, and the record of its earlier starts."""
        config = self.config
        environ = environment()
        run_id = find_requested_run_id(config, environ) or find_restart_id(environ)
        folder, is_new = choose_run_folder(config, run_id)
        if not self.cluster.has_agent:
            self.exit_stack.enter_context(hold_run_lock(folder))
            # Another process may have trained it while this one waited for the lock.
            is_new = is_new and not has_trained(folder)
        # Without the lock this process must neither record nor remove anything in the folder.
        self.folder = folder
        check_bucket(config, folder)
        return folder, None if is_new else read_record(folder.record_path)

    def _find_checkpoint(self, run: Run, earlier_record: RunRecord | None) -> None:
        """Set the checkpoint from which a resumed run goes on, or a new one takes its weights."""
        checkpoint = None
        if earlier_record or run.config.get("resume") == "auto":
            checkpoint = newest_whole(run.folder.checkpoints)
            run.resume_step = read_sidecar(checkpoint).step if checkpoint else 0
            _log_resume(run, earlier_record, checkpoint)
        checkpoint = checkpoint or _initial_weights(run.config)
        if checkpoint:
            run.checkpoint = str(checkpoint.resolve())

    def _build_run(self, decision: RunDecision) -> Run:
        """Return the run that rank 0 has decided on."""
        if self.folder is None:
            logs = Path(self.config["paths"]["log_dir"])
            self.folder = RunFolder((logs / decision.folder).resolve())
        batch = Batch.cut(decision.global_batch_size, self.cluster.world_size, decision.accumulate)
        return Run(
            self.config,
            self.cluster,
            self.folder,
            batch,
            decision.resume_step,
            decision.checkpoint,
        )

    def _prepare_folder(self, run: Run) -> None:
        """Make the run's folder on this node, which may have a disk of its own."""
        run.folder.path.mkdir(parents=True, exist_ok=True)
        if run.cluster.is_rank_zero:
            record_end = partial(failures.record_end, run.folder, signals.INTERRUPTED_AT_ONCE)
            signals.set_force_exit_action(record_end)
        elif run.cluster.local_rank == 0:
            # A later resume on this node reads the options from config.yaml.
            if not run.folder.config_path.exists():
                write_config(run)
            node = f"node {run.cluster.node_rank} of {run.cluster.num_nodes} (counted from 0)"
            log.info(f"{node} joined run {run.folder.run_id}; output is on node 0")
        set_variables(
            {"TORCH_FR_DUMP_TEMP_FILE": str(run.folder.path / "nccl-trace-rank")}, unless_set=True
        )


def _log_resume(run: Run, earlier_record: RunRecord | None, checkpoint: Path | None) -> None:
    """Log where a resumed run goes on; a new run logs nothing."""
    if checkpoint:
        log.info(f"Resuming {run.folder.run_id} from {checkpoint.name}.")
    elif earlier_record:
        # Steps without a checkpoint are lost.
        level = logging.WARNING if earlier_record.steps else logging.INFO
        log.log(level, f"Resuming {run.folder.run_id} from its start: no whole checkpoint.")


def _initial_weights(config: Config) -> Path | None:
    """Return the checkpoint of ckpt_path, downloaded if it lies in a bucket."""
    address = config.get("ckpt_path")
    if not address:
        return None

    from lockstep.storage.fetch import locate_checkpoint

    logs = Path(config["paths"]["log_dir"])
    return locate_checkpoint(str(address), logs, config.get("s3"))
