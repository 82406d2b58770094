"""DistributedDataParallel: each rank holds the whole model, and backward averages the gradients.

trainer=ddp (GPUs), trainer=ddp_sim (the same in CPU processes over gloo). The gradients are
averaged in buckets while backward still computes the others.
"""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lockstep.process.errors import UserError
from lockstep.strategies.base import ProcessPerDevice

COMPRESSION_HOOKS = {
    "float32": None,
    "bfloat16": default_hooks.bf16_compress_hook,
    "float16": default_hooks.fp16_compress_hook,
}


class DDP(ProcessPerDevice):
    """Lightning's DDPStrategy over a process group that exists already.

    The forwards of an evaluation need no collectives.

    Args:
        gradient_dtype: the type in which gradients travel between ranks: float32, or bfloat16 or
            float16 with half the bytes.
        options: further options of DistributedDataParallel, such as find_unused_parameters,
            static_graph and bucket_cap_mb.
    Raises:
        UserError: gradient_dtype is none of these.
    """

    def __init__(self, gradient_dtype: str = "float32", **options: Any) -> None:
        if gradient_dtype not in COMPRESSION_HOOKS:
            raise UserError(
                f"trainer.gradient_dtype={gradient_dtype}: give {', '.join(COMPRESSION_HOOKS)}."
            )
        defaults = {
            # The gradients are views of the buckets, which saves a copy of them.
            "gradient_as_bucket_view": True,
            # ProcessPerDevice.on_validation_start broadcasts the buffers once for each evaluation.
            "forward_sync_buffers": False,
        }
        super().__init__(**{**defaults, **options})
        self.hook = COMPRESSION_HOOKS[gradient_dtype]
        self.finds_unused = bool(options.get("find_unused_parameters"))
        self.reduced_parameters: list[Tensor] = []
        self.unreduced_parameters: list[Tensor] = []

    def configure_ddp(self) -> None:
        """Wrap the module, and compress the gradients.

        Lightning ignores its `ddp_comm_hook` on CPUs, where the tests compare losses.
        """
        DDPStrategy.configure_ddp(self)
        if self.hook:
            self.model.register_comm_hook(None, self.hook)
        # The wrapper averages the gradients of the parameters that are trainable when it is made.
        self.reduced_parameters = []
        self.unreduced_parameters = []
        for parameter in self.lightning_module.parameters():
            if parameter.requires_grad:
                self.reduced_parameters.append(parameter)
            else:
                self.unreduced_parameters.append(parameter)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the module anew if a callback has frozen or unfrozen layers."""
        if self._has_unreduced_trainable() or self._is_waiting_for_frozen():
            self.model = self.lightning_module
            self.configure_ddp()

    def _has_unreduced_trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.unreduced_parameters)

    def _is_waiting_for_frozen(self) -> bool:
        """Return whether the wrapper waits for the gradient of a parameter that is frozen now.

        Modules that optimize by hand may freeze a part before a step and unfreeze it within the
        step, so they do not count.
        """
        if self.finds_unused or not self.lightning_module.automatic_optimization:
            return False
        return not all(parameter.requires_grad for parameter in self.reduced_parameters)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin the backward pass.

        Raises:
            UserError: training_step has unfrozen layers, whose gradients DDP does not average.
        """
        if self._has_unreduced_trainable():
            raise UserError(
                "training_step unfreezes parameters, and DDP does not average their gradients: "
                "unfreeze them in on_train_epoch_start or on_train_batch_start."
            )
        super().pre_backward(closure_loss)

    def determine_ddp_device_ids(self) -> None:
        """Return no device, because torch warns in every run if Lightning passes one.

        Lightning then builds DDP in a CUDA stream other than that of the training.
        """

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step.

        Raises:
            UserError: a parameter gets no gradient, as in a GAN that trains its parts one after
                the other.
        """
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if "parameters that were not used in producing" not in str(error):
                raise
            raise UserError(
                "Some parameters get no gradient in a step, and DDP waits for it: freeze them, "
                "remove them, or add +trainer.strategy.find_unused_parameters=true."
            ) from error
