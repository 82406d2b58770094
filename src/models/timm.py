"""Any model of timm by its name. It uses the private `_pos_embed`, as nothing public replaces it.

python src/train.py model=timm model.name=vit_small_patch16_224 model.pretrained=false
python src/train.py model=timm model.name=hf-hub:timm/resnet18.a1_in1k       (or local-dir:FOLDER)
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lockstep.data.listing import warn_of_class_order
from lockstep.process.errors import UserError
from models.patch_conv import use_patch_conv
from models.timm_weights import (
    filter_state,
    go_offline_without_network,
    layer_names,
    load_weights,
    one_line,
    pretrained_config,
    shapes_by_name,
)

log = logging.getLogger(__name__)

# The parts that VisionTransformer.forward_head uses.
HEAD_PARTS = ("attn_pool", "fc_norm", "head_drop", "head", "head_dist")
IMAGE_SETTINGS = ("mean", "std", "crop_pct", "interpolation")


class TimmModel(nn.Module):
    """The model `name` of timm, built for the classes, image size and channels of the data.

    A new head on pretrained weights starts at zero, so that every class is equally likely.

    Args:
        name: a name of timm.list_models(), with or without the tag of its weights, or
            hf-hub:OWNER/NAME, or local-dir:FOLDER.
        pretrained: load timm's weights, and download them if they are not there.
        weights: a local .safetensors or .pth file in place of the download. Its head is kept if it
            fits.
        outputs_are_classes: the outputs are the logits of classes. Otherwise they are features of
            the task, and a new head keeps its random values: zeros would never learn behind a ReLU.
        class_names: the data's, for a warning where the head of the weights is kept.
        timm_arguments: further arguments of timm.create_model: patch_size, embed_dim, depth,
            num_heads, drop_path_rate, …

    Raises:
        UserError: timm has no such model, the model does not take an argument or the image size,
            or the weights cannot be loaded or do not fit.
    """

    def __init__(
        self,
        num_classes: int,
        image_size: int,
        channels: int,
        name: str | None = None,
        pretrained: bool = True,
        weights: str | None = None,
        outputs_are_classes: bool = True,
        class_names: Sequence[str] | None = None,
        **timm_arguments: Any,
    ) -> None:
        super().__init__()
        loads_timm_weights = pretrained and weights is None
        config = pretrained_config(name)
        if timm_arguments.get("in_chans", channels) != channels:
            raise UserError(
                f"model.in_chans={timm_arguments['in_chans']} is not the number of channels of the "
                f"images, {channels}: leave it out, as the net takes the channels of the data."
            )
        request = _BackboneRequest(
            name=str(name),
            num_classes=num_classes,
            image_size=image_size,
            channels=channels,
            pretrained=loads_timm_weights,
            options=timm_arguments,
        )
        self.backbone = _create_backbone(request)
        is_head_new = loads_timm_weights and config.get("num_classes") != num_classes
        if weights is not None:
            is_head_new = load_weights(self.backbone, Path(weights), str(name), channels)
        has_weights = loads_timm_weights or weights is not None
        if is_head_new and outputs_are_classes:
            self._zero_head()
        elif has_weights and not is_head_new and class_names:
            warn_of_class_order(weights or str(name), class_names)

    def _zero_head(self) -> None:
        for head in layer_names(self.backbone, "classifier"):
            for parameter in self.backbone.get_submodule(head).parameters():
                nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    @classmethod
    def image_settings(
        cls, name: str | None = None, pretrained: bool = True, weights: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return the preparation of the images of pretrained weights, as {"crop_pct": 0.9}.

        Without pretrained weights it is {}.
        """
        if not pretrained and weights is None:
            return {}
        config = pretrained_config(name)
        settings = {key: config[key] for key in IMAGE_SETTINGS if key in config}
        for key, value in settings.items():
            if isinstance(value, tuple):
                settings[key] = list(value)
        return settings

    def shard_units(self) -> list[nn.Module]:
        """Return the members of the outermost sequences, as the blocks of a ViT.

        In a ResNet or a ConvNeXt these are the stages.
        """
        units = []
        for child in self.backbone.children():
            if isinstance(child, nn.Sequential | nn.ModuleList):
                units += [unit for unit in child if _is_block(unit)]
        return units

    def head_names(self) -> list[str]:
        return [f"backbone.{name}" for name in layer_names(self.backbone, "classifier")]

    def layer_numbers(self) -> dict[str, int]:
        """Return timm's layer number of each parameter.

        A few families define no layers. For them each child module is a layer.
        """
        from timm.models import group_parameters

        if hasattr(self.backbone, "group_matcher"):
            matcher = self.backbone.group_matcher(coarse=False)
            numbers = group_parameters(self.backbone, matcher, reverse=True)
        else:
            children = [name for name, _ in self.backbone.named_children()]
            numbers = {}
            for name, _ in self.backbone.named_parameters():
                child = name.partition(".")[0]
                numbers[name] = children.index(child) if child in children else 0
        return {f"backbone.{name}": number for name, number in numbers.items()}

    def undecayed_names(self) -> set[str]:
        """Return timm's names of parameters without weight decay."""
        if not hasattr(self.backbone, "no_weight_decay"):
            return set()
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def adapt_to_image_size(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with position embeddings for this image size, resampled by timm.

        If they fit already, it is the same dict.
        """
        embedding = "backbone.pos_embed"
        patch = "backbone.patch_embed.proj.weight"
        shapes = shapes_by_name(self)
        names = {embedding, patch}
        if not names <= shapes.keys() or not names <= state.keys():
            return state
        if state[embedding].shape == shapes[embedding] or state[patch].shape != shapes[patch]:
            return state
        backbone_state = {key.removeprefix("backbone."): value for key, value in state.items()}
        filtered_state = filter_state(backbone_state, self.backbone)
        return {f"backbone.{key}": value for key, value in filtered_state.items()}

    # Up to version 2.1 the two hooks had these names, which subclasses may override or call.
    @classmethod
    def wanted_images(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return cls.image_settings(*args, **options)

    def adapted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.adapt_to_image_size(state)

    def stages(self) -> list[nn.Module]:
        """Return patch embedding, each block, norm and head.

        Raises:
            UserError: the model is not a plain VisionTransformer.
        """
        from timm.models.vision_transformer import VisionTransformer

        vit: Any = self.backbone
        if type(vit).forward_features is not VisionTransformer.forward_features:
            raise UserError(
                f"timm's {type(vit).__name__} does not name its stages: trainer=model_parallel "
                "works with vit_* names, alexnet, alexnet_bn, small_cnn and airbench."
            )

        def embed(images: Tensor) -> Tensor:
            return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))

        later_names = ("blocks", "norm", *HEAD_PARTS)
        first_names = [name for name, _ in vit.named_children() if name not in later_names]
        first_names += [name for name, _ in vit.named_parameters(recurse=False)]
        head = _Stage(vit, HEAD_PARTS, vit.forward_head)
        return [_Stage(vit, first_names, embed), *vit.blocks, vit.norm, head]


def _is_block(unit: nn.Module) -> bool:
    """Return whether a module has children and parameters."""
    return any(True for _ in unit.children()) and any(True for _ in unit.parameters())


class _Stage(nn.Module):
    """Some children and parameters of a VisionTransformer, which one device holds.

    Args:
        compute: the forward of this part, which uses methods of the whole net.
    """

    def __init__(
        self, vit: nn.Module, names: Iterable[str], compute: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, getattr(vit, name, None))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


# For small images, on a CPU
vit_tiny_32 = partial(TimmModel, name="vit_tiny_patch16_224", pretrained=False)


@dataclass(frozen=True)
class _BackboneRequest:
    """A request for a model of timm with these classes and images.

    Attributes:
        options: the user's further arguments of timm.create_model.
        passes_image_size: pass the image size as img_size. Otherwise the model has its default
            size.
    """

    name: str
    num_classes: int
    image_size: int
    channels: int
    pretrained: bool
    options: dict[str, Any]
    passes_image_size: bool = True

    def build(self) -> nn.Module:
        """Build the model, and check its output for one image."""
        import timm

        arguments: dict[str, Any] = {}
        if self.passes_image_size:
            arguments["img_size"] = self.image_size
        arguments["num_classes"] = self.num_classes
        arguments["in_chans"] = self.channels
        arguments["pretrained"] = self.pretrained
        backbone = timm.create_model(self.name, **{**arguments, **self.options})
        for layer in layer_names(backbone, "first_conv"):
            use_patch_conv(backbone.get_submodule(layer))
        self._check_output(backbone)
        return backbone

    def can_be_built(self) -> bool:
        """Return whether the model can be built without pretrained weights."""
        try:
            replace(self, pretrained=False).build()
        except Exception:
            return False
        return True

    def _check_output(self, backbone: nn.Module) -> None:
        """Raise an exception if the model has not one output for each class."""
        parameter = next(backbone.parameters())
        if parameter.is_meta:
            return
        shape = (1, self.channels, self.image_size, self.image_size)
        with torch.no_grad():
            output = backbone.eval()(torch.zeros(shape, dtype=parameter.dtype))
        expected = (1, self.num_classes)
        if self.num_classes and isinstance(output, Tensor) and output.shape != expected:
            sizes = "×".join(map(str, output.shape[1:]))
            raise ValueError(f"the output is {sizes} in place of {self.num_classes} classes")


def _create_backbone(request: _BackboneRequest) -> nn.Module:
    """Build the model with img_size. If that does not work, build it at its default size.

    Raises:
        UserError: the model cannot be built, or it does not take such images.
    """
    # Lockstep's own handler already shows the messages of the hub's client.
    logging.getLogger("huggingface_hub").handlers.clear()
    offline_reason = go_offline_without_network() if request.pretrained else ""
    backbone = _try_build(request, offline_reason)
    if isinstance(backbone, nn.Module):
        _warn_of_unseen_border(backbone, request)
        return backbone.train()

    failure = backbone
    backbone = _try_build(replace(request, passes_image_size=False), offline_reason)
    if isinstance(backbone, nn.Module):
        return backbone.train()
    if _is_img_size_unknown(failure):
        failure = backbone
    raise _explain_failure(request, failure) from failure


@rank_zero_only
def _warn_of_unseen_border(backbone: nn.Module, request: _BackboneRequest) -> None:
    """Warn if the patches of a ViT do not cover the image."""
    from timm.layers import PatchEmbed

    embedding = getattr(backbone, "patch_embed", None)
    if not isinstance(embedding, PatchEmbed) or embedding.dynamic_img_pad:
        return
    patch_size = max(embedding.patch_size)
    unseen = request.image_size % patch_size
    if unseen:
        covered = request.image_size - unseen
        log.warning(
            f"{request.name} does not see the last {unseen} of {request.image_size} rows and "
            f"columns, as its patches have {patch_size} pixels: give data.image_size={covered} or "
            f"{covered + patch_size}."
        )


def _try_build(request: _BackboneRequest, offline_reason: str) -> nn.Module | Exception:
    """Return the model, or the exception because of which it cannot be built.

    Raises:
        UserError: the model can be built, but its pretrained weights cannot be loaded.
    """
    try:
        return request.build()
    except Exception as error:
        # timm, the client of the hub and assertions of any model raise many kinds of errors.
        if request.passes_image_size and _is_img_size_unknown(error):
            return error
        if request.pretrained and request.can_be_built():
            raise UserError(
                f"the pretrained weights of {request.name} cannot be loaded "
                f"({offline_reason or one_line(error)}): give a local file with "
                "model.weights=FILE, or train from scratch with model.pretrained=false."
            ) from error
        return error


def _is_img_size_unknown(error: Exception) -> bool:
    return isinstance(error, TypeError) and "img_size" in str(error)


def _explain_failure(request: _BackboneRequest, failure: Exception) -> UserError:
    """Return an error that names the cause: one of the user's arguments, or the image size."""
    name = request.name
    reason = one_line(failure)
    if isinstance(failure, TypeError) and "argument" in str(failure):
        return UserError(f"{name} does not take one of the model's arguments ({reason}).")
    for key, value in request.options.items():
        others = {other: request.options[other] for other in request.options if other != key}
        simpler = replace(request, options=others)
        if simpler.can_be_built() or replace(simpler, passes_image_size=False).can_be_built():
            return UserError(f"{name} cannot be used with model.{key}={value!r} ({reason}).")
    return UserError(f"{name} cannot take data.image_size={request.image_size} ({reason}).")
