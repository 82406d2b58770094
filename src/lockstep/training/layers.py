"""Which parameters of a net are its head, and in which layer each of the others lies."""

from torch import nn

from lockstep.runs.hooks import HasStages, NamesHead, NamesLayers


def head_names(net: nn.Module) -> set[str]:
    """Parameters of the layer that gives the logits: what the net names, else the layer of its last matrix."""
    names = [name for name, _ in net.named_parameters()]
    heads = net.head_names() if isinstance(net, NamesHead) else []
    if not heads:
        matrices = [name for name, parameter in net.named_parameters() if parameter.ndim >= 2]
        heads = [matrices[-1].rpartition(".")[0]] if matrices else []
    return {name for name in names if any(name.startswith(f"{head}.") for head in heads)}


def layer_numbers(net: nn.Module) -> dict[str, int]:
    """The layer of each parameter by its name, 0 at the images: as the net says, else its stages, else its children."""
    if isinstance(net, NamesLayers):
        return net.layer_numbers()
    parts = net.stages() if isinstance(net, HasStages) else list(net.children())
    parts = [part for part in parts if any(True for _ in part.parameters())]
    layer_of = {id(parameter): number for number, part in enumerate(parts) for parameter in part.parameters()}
    return {name: layer_of.get(id(parameter), 0) for name, parameter in net.named_parameters()}
