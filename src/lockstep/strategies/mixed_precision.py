"""bf16 under autocast, for all strategies that do not shard."""

from lightning.pytorch.plugins import MixedPrecision, Precision


class BFloat16Mixed(MixedPrecision):
    """Lightning's, which refuses to clip where the optimizer is fused; but nothing is scaled here.

    Args:
        device_type: "cpu" or "cuda".
    """

    def __init__(self, device_type: str) -> None:
        super().__init__("bf16-mixed", device_type)

    clip_gradients = Precision.clip_gradients
