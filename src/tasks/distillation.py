"""Distillation (task=distillation): a student learns the labels and a teacher's probabilities.

Source: arXiv 1503.02531.

python src/train.py task=distillation task.teacher=<run_id>    (or a checkpoint, or a name of timm)
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.listing import warn_of_class_order
from lockstep.process.errors import UserError
from tasks.classifier import ImageClassifier

log = logging.getLogger(__name__)


class Distillation(ImageClassifier):
    """Train `net` on the labels and on the probabilities of a teacher.

    Checkpoints do not contain the teacher.

    Args:
        net: the student.
        teacher: a run id, a checkpoint, s3://…, or a model of timm with pretrained weights for
            these classes.
        log_dir: the folder of runs in which `teacher` is looked up.
        temperature: the temperature of both softmaxes, above 0. A higher one gives unlikely classes
            more weight.
        teacher_share: the weight of the teacher in the loss, 0 to 1. The labels have the rest.
        parts: passed to ImageClassifier.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        num_classes: int,
        channels: int,
        teacher: str | None,
        log_dir: str,
        temperature: float = 4.0,
        teacher_share: float = 0.9,
        **parts: Any,
    ) -> None:
        super().__init__(net, num_classes=num_classes, **parts)
        self.channels = channels
        self.teacher_source = teacher
        self.log_dir = Path(log_dir)
        self.temperature = temperature
        self.teacher_share = teacher_share

        # The list hides the teacher from Lightning, which would save a child module in checkpoints.
        self._unregistered_teacher: list[nn.Module] = []
        self.rescale: tuple[Any, Any] = (1.0, 0.0)

    def setup(self, stage: str) -> None:
        if stage != "fit" or self._unregistered_teacher:
            return

        device = self.trainer.strategy.root_device
        data = getattr(self.trainer, "datamodule", None)
        teacher, facts = self._load_teacher()
        class_names = getattr(data, "class_names", None)
        if "class_names" not in facts and class_names:
            warn_of_class_order(str(self.teacher_source), class_names)
        self._check_teacher(facts, data)
        self._unregistered_teacher = [teacher.to(device).eval().requires_grad_(False)]
        self.rescale = compute_rescaling(facts, data, device)

    def _check_teacher(self, facts: dict[str, Any], data: Any) -> None:
        """Compare the teacher with the data.

        Raises:
            UserError: the teacher has other classes or channels than the data, or was trained on
                deep images with another black and white.
        """
        for key, noun in (("class_names", "classes"), ("channels", "channels")):
            teacher_value = facts.get(key)
            data_value = getattr(data, key, None)
            if None not in (teacher_value, data_value) and teacher_value != data_value:
                raise UserError(
                    f"task.teacher={self.teacher_source} has other {noun} than the data: "
                    f"{teacher_value}, not {data_value}."
                )

        sizes = (facts.get("image_size"), getattr(data, "image_size", None))
        if None not in sizes and sizes[0] != sizes[1]:
            log.warning(
                f"task.teacher={self.teacher_source} was trained at {sizes[0]} pixels, and gets "
                f"images of {sizes[1]} here: its targets may be poor."
            )

        reading = getattr(getattr(data, "source", None), "reading", None)
        if reading is None or "range" not in facts:
            return
        if facts["range"] != reading.facts["range"]:
            raise UserError(
                f"task.teacher={self.teacher_source} was trained with "
                f"data.range={facts['range']}, not {reading.facts['range']}: "
                f"give data.range={facts['range'] or 'null'}."
            )

    def _load_teacher(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the teacher, and the facts about its classes and images."""
        import timm

        from lockstep.training.inference import load_finished

        if not self.teacher_source:
            raise UserError(
                "task=distillation learns from a teacher: "
                "add task.teacher=<run_id>, or a model of timm."
            )
        if not timm.is_model(self.teacher_source.partition(".")[0]):
            model = load_finished(self.teacher_source, self.log_dir)
            return model.net, model.facts

        teacher: nn.Module = timm.create_model(
            self.teacher_source, pretrained=True, in_chans=self.channels
        )
        if teacher.num_classes != self.num_classes:
            raise UserError(
                f"task.teacher={self.teacher_source} knows {teacher.num_classes} classes, "
                f"the data {self.num_classes}."
            )
        data_config = timm.data.resolve_data_config({}, model=teacher)
        facts = {
            key: data_config[key]
            for key in ("mean", "std")
            if len(data_config[key]) == self.channels
        }
        return teacher, facts

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self.net(images)
        self.count_hits(logits, targets)

        teacher_loss = self._distance_to_teacher(logits, self._teacher_logits(images))
        label_loss = self.loss(logits, targets).mean()
        return self.teacher_share * teacher_loss + (1 - self.teacher_share) * label_loss

    @torch.no_grad()
    def _teacher_logits(self, images: Tensor) -> Tensor:
        scale, shift = self.rescale
        rescaled = (images * scale + shift).to(images.dtype)
        return self._unregistered_teacher[0].to(images.dtype)(rescaled)

    def _distance_to_teacher(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergence at `temperature`, the mean over the images.

        With the factor temperature² the size of the gradient does not depend on the temperature.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        student = (logits.to(dtype) / self.temperature).log_softmax(1)
        teacher = (teacher_logits.to(dtype) / self.temperature).log_softmax(1)
        divergence = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
        return divergence * self.temperature**2


def compute_rescaling(facts: dict[str, Any], data: Any, device: torch.device) -> tuple[Any, Any]:
    """Return scale and shift from the student's normalisation to the teacher's.

    If one of the two is not known, they are 1 and 0.
    """
    if "mean" not in facts or not hasattr(data, "std"):
        return 1.0, 0.0
    std_of_teacher = _per_channel(facts["std"])
    scale = _per_channel(data.std) / std_of_teacher
    shift = (_per_channel(data.mean) - _per_channel(facts["mean"])) / std_of_teacher
    return scale.to(device), shift.to(device)


def _per_channel(values: Sequence[float]) -> Tensor:
    """Return a tensor (channels, 1, 1), which applies to images (B, channels, H, W)."""
    return torch.tensor(values).view(-1, 1, 1)
