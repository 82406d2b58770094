"""The one object that knows a run: its config, ranks, folder, batch, resume point and record."""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.config.keys import is_rate
from lockstep.process.errors import EXIT_OK, UserError
from lockstep.ranks.find import Cluster
from lockstep.ranks.placement import count_devices_per_rank
from lockstep.records.batch import Batch
from lockstep.records.config import Config
from lockstep.records.folder import RunFolder
from lockstep.records.record import update_record

if TYPE_CHECKING:
    # These import torch, and a run exists before torch is needed.
    from lightning.pytorch import Trainer

    from lockstep.callbacks.hang_dump import HangDump
    from lockstep.callbacks.interruption import Interruption
    from lockstep.callbacks.run_recorder import RunRecorder
    from lockstep.ranks.heartbeat import Heartbeat


@dataclass
class Run:
    """A run, as each of its ranks knows it before it builds its parts; rank 0 writes its record.

    Args:
        config: composed, as the user asked for it, with `choices` (the option of each group) and
            `overrides`. It is read-only.
        cluster: this rank and those around it.
        resume_step: optimizer steps that a resumed run has done; None for a new run.
        checkpoint: a path on the machine of rank 0. If resume_step is above 0, it is the run's own
            checkpoint, else one with initial weights; None without either.

    Attributes:
        exit_code: the code of this process, once the run has been closed.
        hosts: a description of each node. This and the following are set when the ranks have
            joined.
        interruption: the callback that saves a checkpoint and ends the run after a signal.
        hang_dump: the callback that writes the stack of a rank that hangs; None for a single rank.
        heartbeat: notices that another rank is lost; None for a single rank.
        recorder: the callback that writes run.json while Lightning runs; None before the parts are
            built.
    """

    config: Config
    cluster: Cluster
    folder: RunFolder
    batch: Batch
    resume_step: int | None = None
    checkpoint: str | None = None

    exit_code: int = field(default=EXIT_OK, init=False)
    hosts: list[dict[str, Any]] = field(default_factory=list, init=False)
    interruption: "Interruption | None" = field(default=None, init=False)
    hang_dump: "HangDump | None" = field(default=None, init=False)
    heartbeat: "Heartbeat | None" = field(default=None, init=False)
    recorder: "RunRecorder | None" = field(default=None, init=False)

    @property
    def trainer_config(self) -> Config:
        """The config's options of the trainer."""
        return self.config["trainer"]

    @property
    def choices(self) -> Config:
        """The option of each config group."""
        return self.config["choices"]

    @property
    def resume_from(self) -> str | None:
        """The checkpoint from which Lightning's fit resumes; None from step 0."""
        return self.checkpoint if self.resume_step else None

    @property
    def learning_rates(self) -> dict[str, float]:
        """Each learning rate × global batch / base_batch_size; {} unless scale_lr_with_batch.

        Source: Goyal et al. 2017, Accurate, Large Minibatch SGD.
        """
        optimizer = self.config["optimizer"]
        if self.config["task_name"] != "train" or not optimizer.get("scale_lr_with_batch"):
            return {}

        base = optimizer["base_batch_size"]
        if not isinstance(base, int) or base < 1:
            raise UserError(f"optimizer.base_batch_size={base!r}: give a whole number from 1 on.")

        names = [key for key in optimizer if is_rate(key)]
        return {name: optimizer[name] * self.batch.global_size / base for name in names}

    def effective_config(self) -> dict[str, Any]:
        """Return the config with the values of the run, as config.yaml and checkpoints hold it."""
        config = resolve_rank_options(self.config, self.cluster)
        if "global_batch_size" in config["data"]:
            config["data"]["global_batch_size"] = self.batch.global_size
        config["optimizer"].update(self.learning_rates)
        return config

    def wait_for_all(self) -> None:
        """Wait until every rank has come here, however long the slowest takes to read its images.

        Raises:
            LostRank: a rank gives no sign of life.
        """
        if self.heartbeat is not None:
            self.heartbeat.wait_for_all()

    def update(self, trainer: "Trainer | None" = None, **fields: object) -> None:
        """Set fields of run.json, on rank 0.

        With a trainer, its progress and the fields of its callbacks are written, too.
        """
        if not self.cluster.is_rank_zero:
            return
        if self.recorder is not None:
            self.recorder.write(trainer, **fields)
            return
        with update_record(self.folder.record_path) as record:
            record.update(fields)


def resolve_rank_options(config: Config, cluster: Cluster) -> dict[str, Any]:
    """Return a copy of the config with the accelerator, devices and nodes of the cluster."""
    copied = copy.deepcopy(dict(config))
    copied["trainer"].update(
        accelerator=cluster.accelerator,
        devices=cluster.ranks_per_node * count_devices_per_rank(config["trainer"]),
        num_nodes=cluster.num_nodes,
    )
    return copied
