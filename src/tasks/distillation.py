"""Distillation (task=distillation): a student learns the labels and a teacher's probabilities (arXiv 1503.02531).

python src/train.py task=distillation task.teacher=<run_id>           (or a checkpoint, or a name of timm)
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.runs.errors import UserError
from tasks.classifier import ImageClassifier


class Distillation(ImageClassifier):
    """Train `net` on the labels and on the probabilities of a teacher, which no checkpoint contains.

    Args:
        net: the student.
        teacher: a run id, a checkpoint, s3://…, or a model of timm with pretrained weights for these classes.
        log_dir: the folder of runs in which `teacher` is looked up.
        temperature: of both softmaxes, above 0; a higher one gives more weight to unlikely classes.
        teacher_share: weight of the teacher in the loss, 0 to 1; the labels have the rest.
        parts: passed to ImageClassifier.
    """

    def __init__(
        self, net: nn.Module, *, num_classes: int, channels: int, teacher: str | None, log_dir: str,
        temperature: float = 4.0, teacher_share: float = 0.9, **parts: Any,
    ) -> None:  # fmt: skip
        super().__init__(net, num_classes=num_classes, **parts)
        self.channels, self.address, self.log_dir = channels, teacher, Path(log_dir)
        self.temperature, self.teacher_share = temperature, teacher_share
        self.teacher: list[nn.Module] = []  # a list, because a child module would be saved

    def setup(self, stage: str) -> None:
        if stage == "fit" and not self.teacher:
            device = self.trainer.strategy.root_device
            self.teacher = [self._load_teacher().to(device).eval().requires_grad_(False)]

    def _load_teacher(self) -> nn.Module:
        import timm

        from lockstep.training.inference import load_finished

        if not self.address:
            raise UserError("task=distillation learns from a teacher: add task.teacher=<run_id>, or a model of timm.")
        num_classes, channels = self.num_classes, self.channels
        if not timm.is_model(self.address.partition(".")[0]):
            return load_finished(self.address, self.log_dir).net
        teacher: nn.Module = timm.create_model(self.address, pretrained=True, in_chans=channels)
        if teacher.num_classes != num_classes:
            raise UserError(f"task.teacher={self.address} knows {teacher.num_classes} classes, the data {num_classes}.")
        return teacher

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits, temperature = self.net(images), self.temperature
        self.count_hits(logits, targets)
        precise = torch.promote_types(logits.dtype, torch.float32)
        with torch.no_grad():
            taught = (self.teacher[0].to(images.dtype)(images).to(precise) / temperature).log_softmax(1)
        found = (logits.to(precise) / temperature).log_softmax(1)
        towards_teacher = F.kl_div(found, taught, log_target=True, reduction="batchmean") * temperature**2
        return self.teacher_share * towards_teacher + (1 - self.teacher_share) * self.loss(logits, targets).mean()
