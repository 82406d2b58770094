"""Load a trained net from its checkpoint alone, and the data of its run.

It serves predict.py, export.py and notebooks.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lockstep.checkpoints.load import Checkpoint, read_checkpoint
from lockstep.checkpoints.random_state import random_state, set_random_state
from lockstep.config.foreign import DATA_ROOTS, config_of_checkpoint
from lockstep.config.instantiate import parameters_of, resolve_target
from lockstep.data.framing import Framing
from lockstep.data.reading import Reading
from lockstep.process.errors import UserError
from lockstep.process.files import sha256_of
from lockstep.process.project import REPOSITORY
from lockstep.records.config import Config, model_name
from lockstep.records.folder import RUN_ID_PATTERN
from lockstep.records.record import RunRecord, read_record
from lockstep.storage.fetch import locate_checkpoint
from lockstep.training.build_data import DataFacts, build_prepared_data, build_user_data
from lockstep.training.build_module import build_module
from lockstep.training.task import Task
from lockstep.training.weights import check_fits

log = logging.getLogger(__name__)


@dataclass
class FinishedModel:
    """A trained LightningModule, in evaluation mode, in float32, on the CPU.

    Args:
        config: the run's whole config.
        facts: class_names, num_classes, image_size, channels, mean, std, resize, fit,
            interpolation, data_hash, and for images in files range, page and bands.
        record: the run's record if it lies beside the checkpoint, else empty.
    """

    module: Any
    config: Config
    facts: DataFacts
    path: Path
    record: RunRecord

    @property
    def name(self) -> str:
        """The run's id. Without a record it is the checkpoint's name and the start of its sha256.

        Checkpoints of two runs may have the same name.
        """
        # A record that Lockstep has not written may have an id that cannot name a folder.
        run_id = self.record.run_id or ""
        if RUN_ID_PATTERN.fullmatch(run_id) and ".." not in run_id:
            return run_id
        return f"{self.path.stem}-{sha256_of(self.path)[:8]}"

    @property
    def net(self) -> nn.Module:
        """The net, from (B, C, H, W) float32 normalised to outputs; a classifier's are logits."""
        return getattr(self.module, "net", self.module)

    @property
    def framing(self) -> Framing:
        """Return the framing of evaluation.

        Checkpoints without `fit` were trained on squashed images.
        """
        facts = self.facts
        image_size = facts["image_size"]
        resize = facts.get("resize") or self.config["data"].get("resize") or image_size
        options = {key: facts[key] for key in ("interpolation", "channels") if key in facts}
        fit = facts.get("fit", "squash")
        return Framing(image_size, resize, fit, mean=tuple(facts["mean"]), **options)

    @property
    def reading(self) -> Reading:
        """Return how files become pixels; images may be as large as in training."""
        limit = self.config["data"].get("max_megapixels")
        is_number = isinstance(limit, int | float) and limit > 0
        return replace(Reading.from_facts(self.facts), max_megapixels=limit if is_number else None)

    def check_prediction(self) -> None:
        """Refuse a task that does not say what it predicts.

        Raises:
            UserError: it has no predict_step, and its forward would give the outputs of `net`
                alone, which may be features.
        """
        module = self.module
        has_own_forward = type(module).forward not in (Task.forward, LightningModule.forward)
        if is_overridden("predict_step", module, LightningModule) or has_own_forward:
            return
        raise UserError(
            f"The task {type(module).__name__} has no predict_step: write "
            "predict_step(self, batch, batch_idx), which returns what it predicts for a batch "
            "(docs/tasks.md)."
        )

    @torch.inference_mode()
    def parts_beside_net(self, images: Tensor) -> list[str]:
        """Return the layers with parameters beside `net` that predict_step calls.

        Args:
            images: (B, C, H, W) normalised.
        """
        called_layers: list[str] = []
        hooks = []
        for name, part in self.module.named_children():
            has_parameters = any(True for _ in part.parameters())
            if part is not self.net and has_parameters:
                hooks.append(part.register_forward_hook(partial(_append_name, called_layers, name)))
        # A predict_step of the user's own may take another batch than images, and raise. Then the
        # layers that it has called before count.
        try:
            self.module.predict_step(images, 0)
        except Exception as error:
            log.info(f"predict_step cannot be tried with images alone ({error})")
        finally:
            for hook in hooks:
                hook.remove()
        return sorted(set(called_layers))


def _append_name(called_layers: list[str], name: str, *_: Any) -> None:
    called_layers.append(name)


def load_finished(
    address: str, logs: Path = REPOSITORY / "logs", s3: Config | None = None
) -> FinishedModel:
    """Return the trained model of a checkpoint.

    Args:
        address: a checkpoint file, a run id (its best), or s3://….
        logs: the folder of runs in which an id is looked up.
        s3: the config group of the bucket.

    Raises:
        UserError: there is no such checkpoint, or it was not written by this project.
    """
    path, checkpoint = _locate_and_read(address, logs, s3)
    config = config_of_checkpoint(path, checkpoint["lockstep"]["config"], logs)
    facts = checkpoint["lockstep"]["data"]

    # build_module seeds torch, and the caller may be about to train.
    state = random_state()
    module = build_module(config, facts, trainable=False)
    set_random_state(state)
    check_fits(module, checkpoint["state_dict"], str(path), model_name(config))
    module.load_state_dict(checkpoint["state_dict"])
    module = module.eval().float().to(memory_format=torch.contiguous_format)

    run_file = path.parent.parent / "run.json"
    record = read_record(run_file) if run_file.exists() else RunRecord()
    return FinishedModel(module, config, facts, path, record)


def load_data(
    address: str, logs: Path = REPOSITORY / "logs", s3: Config | None = None, **options: Any
) -> Any:
    """Return the data module of a run, for one process and without a Trainer.

    It has the run's options, seed and augmentation.

    Args:
        address, logs, s3: as of `load_finished`.
        options: options of the data that replace the run's. A checkpoint from elsewhere has no
            root, so that root= must be given.

    Raises:
        UserError: there is no such checkpoint, it was not written by this project, or its images
            do not exist.
    """
    path, checkpoint = _locate_and_read(address, logs, s3)
    config = config_of_checkpoint(path, checkpoint["lockstep"]["config"], logs, DATA_ROOTS)
    facts = checkpoint["lockstep"]["data"]
    data_config = {**config["data"], **options}
    data_class = resolve_target(config["data"].get("_target_"), "data._target_")
    if "range" in parameters_of(data_class)[0] and "range" not in options:
        # Versions that read 8 bits have written checkpoints without a range.
        data_config["range"] = facts.get("range")
    if hasattr(data_class, "attach_to_ranks"):
        return build_prepared_data(config, data_config, checkpoint_facts=facts)
    return build_user_data(data_config)


def _locate_and_read(address: str, logs: Path, s3: Config | None) -> tuple[Path, Checkpoint]:
    path = locate_checkpoint(address, logs, s3)
    checkpoint = read_checkpoint(path)
    lockstep_part = checkpoint.get("lockstep")
    if not isinstance(lockstep_part, dict) or not {"config", "data"} <= lockstep_part.keys():
        raise UserError(f"{path} carries no config: it was not written by this project.")
    return path, checkpoint
