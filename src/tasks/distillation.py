"""Distillation (task=distillation): a student learns the labels and a teacher's probabilities.

Source: arXiv 1503.02531.

python src/train.py task=distillation task.teacher=<run_id>    (or a checkpoint, or a name of timm)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.process.errors import UserError
from tasks.classifier import ImageClassifier


class Distillation(ImageClassifier):
    """Train `net` on the labels and on the probabilities of a teacher.

    Checkpoints do not contain the teacher.

    Args:
        net: the student.
        teacher: a run id, a checkpoint, s3://…, or a model of timm with pretrained weights for
            these classes.
        log_dir: the folder of runs in which `teacher` is looked up.
        temperature: of both softmaxes, above 0; a higher one gives more weight to unlikely classes.
        teacher_share: weight of the teacher in the loss, 0 to 1; the labels have the rest.
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
        self.address = teacher
        self.log_dir = Path(log_dir)
        self.temperature = temperature
        self.teacher_share = teacher_share

        # The list hides the teacher from Lightning: a child module would be saved in checkpoints.
        self.teacher: list[nn.Module] = []
        # Scale and shift lead from the student's normalisation to the teacher's.
        self.rescale: tuple[Any, Any] = (1.0, 0.0)

    def setup(self, stage: str) -> None:
        if stage != "fit" or self.teacher:
            return

        device = self.trainer.strategy.root_device
        teacher, facts = self._load_teacher()
        self.teacher = [teacher.to(device).eval().requires_grad_(False)]
        self._adapt_images(facts, getattr(self.trainer, "datamodule", None), device)

    def _adapt_images(self, facts: dict[str, Any], data: Any, device: torch.device) -> None:
        """Compare the teacher's classes and channels with the data's, and set `rescale`.

        Raises:
            UserError: the teacher has other classes or channels than the data.
        """
        for key, noun in (("class_names", "classes"), ("channels", "channels")):
            of_teacher = facts.get(key)
            of_data = getattr(data, key, None)
            if None not in (of_teacher, of_data) and of_teacher != of_data:
                raise UserError(
                    f"task.teacher={self.address} has other {noun} than the data: "
                    f"{of_teacher}, not {of_data}."
                )

        self._check_range(facts, data)

        if "mean" not in facts or not hasattr(data, "std"):
            return
        mean = _per_channel(data.mean)
        std = _per_channel(data.std)
        scale = std / _per_channel(facts["std"])
        shift = (mean - _per_channel(facts["mean"])) / _per_channel(facts["std"])
        self.rescale = (scale.to(device), shift.to(device))

    def _check_range(self, facts: dict[str, Any], data: Any) -> None:
        """
        Raises:
            UserError: black and white of deep images are others than those of the teacher.
        """
        reading = getattr(getattr(data, "source", None), "reading", None)
        if reading is None or "range" not in facts:
            return
        if facts["range"] != reading.facts["range"]:
            raise UserError(
                f"task.teacher={self.address} was trained with data.range={facts['range']}, not "
                f"{reading.facts['range']}: give data.range={facts['range'] or 'null'}."
            )

    def _load_teacher(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the teacher, and the facts about its classes and images."""
        import timm

        from lockstep.training.inference import load_finished

        if not self.address:
            raise UserError(
                "task=distillation learns from a teacher: "
                "add task.teacher=<run_id>, or a model of timm."
            )
        if not timm.is_model(self.address.partition(".")[0]):
            finished = load_finished(self.address, self.log_dir)
            return finished.net, finished.facts

        teacher: nn.Module = timm.create_model(
            self.address, pretrained=True, in_chans=self.channels
        )
        if teacher.num_classes != self.num_classes:
            raise UserError(
                f"task.teacher={self.address} knows {teacher.num_classes} classes, "
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

        from_teacher = self._distance_to_teacher(logits, self._teacher_logits(images))
        from_labels = self.loss(logits, targets).mean()
        return self.teacher_share * from_teacher + (1 - self.teacher_share) * from_labels

    @torch.no_grad()
    def _teacher_logits(self, images: Tensor) -> Tensor:
        scale, shift = self.rescale
        rescaled = (images * scale + shift).to(images.dtype)
        return self.teacher[0].to(images.dtype)(rescaled)

    def _distance_to_teacher(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergence at `temperature`, the mean over the images.

        The factor temperature² keeps the size of its gradient independent of the temperature.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        student = (logits.to(dtype) / self.temperature).log_softmax(1)
        teacher = (teacher_logits.to(dtype) / self.temperature).log_softmax(1)
        divergence = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
        return divergence * self.temperature**2


def _per_channel(values: Sequence[float]) -> Tensor:
    """Return (channels, 1, 1)."""
    return torch.tensor(values).view(-1, 1, 1)
