"""What the run asks of a strategy; the answers of most are the defaults here."""

from typing import Any

from lightning.pytorch.plugins import Precision

from lockstep.strategies.precision import BFloat16Mixed


class Capabilities:
    """A base beside Lightning's strategy class.

    Attributes:
        no_ema: why trainer.ema_decay cannot average the weights; empty where it can.
        supports_compile: trainer.compile can compile the net.
        scales_losses: fp16 works, whose losses are scaled.
        micro_batches: parts in which it sends a batch through the net.
    """

    no_ema = ""
    supports_compile = True
    scales_losses = True
    micro_batches = 1

    @staticmethod
    def precision_for(precision: str, device_type: str) -> Precision | None:
        """For the Trainer in place of `precision=`; None where Lightning's own does."""
        return BFloat16Mixed(device_type) if precision == "bf16-mixed" else None


def capabilities(strategy: Any) -> Capabilities:
    """Of any strategy, Lightning's own too."""
    return strategy if isinstance(strategy, Capabilities) else Capabilities()
