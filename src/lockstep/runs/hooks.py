"""What a net, an optimizer, a callback or a strategy may offer beside its duties; each is used where it is offered.

None is a base class: whoever has the method has the hook. Imports no torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# --- nets


@runtime_checkable
class HasShardUnits(Protocol):
    def shard_units(self) -> list["nn.Module"]:
        """Blocks whose weights FSDP gathers one after the other; together most of the net."""


@runtime_checkable
class HasStages(Protocol):
    def stages(self) -> list["nn.Module"]:
        """Modules that in this order are the whole forward, each parameter in one of them: model parallelism cuts."""


@runtime_checkable
class AdaptsWeights(Protocol):
    def adapted(self, state: dict[str, "Tensor"]) -> dict[str, "Tensor"]:
        """A checkpoint's weights of the net for this one's image size; `state` itself where nothing is to be done."""


@runtime_checkable
class StartsFromImages(Protocol):
    def init_from_images(self, images: "Tensor") -> None:
        """Set weights from training images (N, C, H, W), normalised, before the first step."""


@runtime_checkable
class SaysWantedImages(Protocol):
    def wanted_images(self, **model: Any) -> dict[str, Any]:
        """mean, std, crop_pct, interpolation of the pretrained weights that the model's options name; {} for none.

        Asked of the class: a class method.
        """


@runtime_checkable
class NamesHead(Protocol):
    def head_names(self) -> list[str]:
        """Names of the modules that give the logits; without it the module of the net's last matrix is taken."""


@runtime_checkable
class NamesLayers(Protocol):
    def layer_numbers(self) -> dict[str, int]:
        """The layer of each parameter by its name, 0 at the images, for optimizer.layer_decay."""


@runtime_checkable
class NamesUndecayed(Protocol):
    def undecayed_names(self) -> set[str]:
        """Names, or patterns of them, of what weight decay harms beside norms and biases: embeddings, tokens."""


# --- losses


@runtime_checkable
class GivesProbabilities(Protocol):
    def probabilities(self, logits: "Tensor") -> "Tensor":
        """(B, classes) of logits (B, classes); of a loss without it the softmax."""


# --- optimizers (the class or function that makes one)


@runtime_checkable
class TakesNamedParameters(Protocol):
    takes_named_parameters: bool  # (name, parameter) pairs instead of parameters


# --- callbacks


@runtime_checkable
class OnCheckpointComplete(Protocol):
    def on_checkpoint_complete(self, path: Path, sidecar: Any, kind: str) -> None:
        """On rank 0 when a checkpoint is whole, before the one before it goes.

        Args:
            sidecar: its storage.checkpoint_files.Sidecar: step, epoch, bytes, sha256, metric.
            kind: best or last.
        """


@runtime_checkable
class ExpectsEnd(Protocol):
    def expect_end(self, seconds: float) -> None:
        """The machine goes away in so many seconds: what must outlive it has to leave it by then."""


# --- callbacks and strategies


@runtime_checkable
class HasRecordFields(Protocol):
    def record_fields(self) -> dict[str, object]:
        """What this one adds to run.json, by field."""


# --- strategies


@runtime_checkable
class ComputesOnSeveral(Protocol):
    process_devices: "list[torch.device]"  # of this one process, in order; one may come twice
