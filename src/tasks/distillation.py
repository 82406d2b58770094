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
        self.rescale: tuple[Any, Any] = (1.0, 0.0)  # from the student's normalisation to the teacher's

    def setup(self, stage: str) -> None:
        if stage == "fit" and not self.teacher:
            device = self.trainer.strategy.root_device
            teacher, facts = self._load_teacher()
            self.teacher = [teacher.to(device).eval().requires_grad_(False)]
            self._adapt_images(facts, getattr(self.trainer, "datamodule", None), device)

    def _adapt_images(self, facts: dict[str, Any], data: Any, device: torch.device) -> None:
        """
        Raises:
            UserError: the teacher has other classes or channels than the data.
        """
        for key, what in (("class_names", "classes"), ("channels", "channels")):
            wanted, here = facts.get(key), getattr(data, key, None)
            if wanted is not None and here is not None and wanted != here:
                raise UserError(f"task.teacher={self.address} has other {what} than the data: {wanted}, not {here}.")
        if "mean" in facts and hasattr(data, "std"):
            values = (torch.tensor(each).view(-1, 1, 1) for each in (data.mean, data.std, facts["mean"], facts["std"]))
            mean, std, its_mean, its_std = values
            self.rescale = (std / its_std).to(device), ((mean - its_mean) / its_std).to(device)

    def _load_teacher(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the teacher, and what is known of its classes and images."""
        import timm

        from lockstep.training.inference import load_finished

        if not self.address:
            raise UserError("task=distillation learns from a teacher: add task.teacher=<run_id>, or a model of timm.")
        num_classes, channels = self.num_classes, self.channels
        if not timm.is_model(self.address.partition(".")[0]):
            finished = load_finished(self.address, self.log_dir)
            return finished.net, finished.facts
        teacher: nn.Module = timm.create_model(self.address, pretrained=True, in_chans=channels)
        if teacher.num_classes != num_classes:
            raise UserError(f"task.teacher={self.address} knows {teacher.num_classes} classes, the data {num_classes}.")
        known = timm.data.resolve_data_config({}, model=teacher)
        return teacher, {key: known[key] for key in ("mean", "std") if channels == len(known[key])}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits, temperature = self.net(images), self.temperature
        self.count_hits(logits, targets)
        precise = torch.promote_types(logits.dtype, torch.float32)
        with torch.no_grad():
            scale, shift = self.rescale
            seen = (images * scale + shift).to(images.dtype)
            taught = (self.teacher[0].to(images.dtype)(seen).to(precise) / temperature).log_softmax(1)
        found = (logits.to(precise) / temperature).log_softmax(1)
        towards_teacher = F.kl_div(found, taught, log_target=True, reduction="batchmean") * temperature**2
        return self.teacher_share * towards_teacher + (1 - self.teacher_share) * self.loss(logits, targets).mean()
