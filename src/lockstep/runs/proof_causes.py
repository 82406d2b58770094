"""Name the cause of a difference between two runs of a proof, and the option to type."""

from collections.abc import Mapping

from lockstep.runs.proof import RANKS
from lockstep.runs.step_trace import (
    Difference,
    StepTrace,
    find_changed_attributes,
    find_state_difference,
)


def cause_of_unseeded(reference: StepTrace) -> str:
    """Return why a run differs from its own repeat."""
    return (
        f"a generator that no seed reaches: {first_random_call(reference)}; draw from torch.rand, "
        "or from numpy.random and random without a generator of its own"
    )


def first_random_call(reference: StepTrace) -> str:
    """Return the first line of the user's code that draws random numbers."""
    calls = reference.setup.random_calls or ["in the data"]
    return calls[0]


def cause_of_resume(run: StepTrace, reference: StepTrace, difference: Difference) -> str:
    """Return why a resumed run goes on in another way."""
    if difference.kind == "images":
        loaders = ", ".join(reference.setup.without_state) or "the training loader"
        return (
            f"{loaders} keeps its place without a state: give the loader state_dict and "
            "load_state_dict, as torchdata's StatefulDataLoader has them"
        )
    start = run.starts[-1]
    last_step = reference.steps.get(start.step)
    if last_step is None:
        return "state that is not in the checkpoint"
    lost_state = find_state_difference(start, last_step, 0.0)
    if lost_state:
        return (
            f"state that is not in the checkpoint: {lost_state}; leave it in on_save_checkpoint, "
            "on_load_checkpoint and state_dict"
        )
    attributes = ", ".join(f"self.{name}" for name in find_changed_attributes(start, last_step))
    if difference.kind == "metric" and not attributes:
        return (
            "what the epoch had counted before the stop (torchmetrics, self.log with on_epoch) is "
            "not in the checkpoint; the weights are equal: metric.persistent(True) keeps it"
        )
    return (
        f"state that is not in the checkpoint: {attributes or 'of the module'}; use "
        "register_buffer, or on_save_checkpoint and on_load_checkpoint"
    )


def cause_of_parts(difference: Difference, reference: StepTrace, run: StepTrace) -> str:
    """Return why a batch in parts gives another training."""
    if difference.kind == "loss" and difference.ratio and abs(difference.ratio - RANKS) < 1e-3:
        return "a loss that is a sum over the batch: take its mean"
    norms = reference.setup.batch_norms
    if norms:
        return f"BatchNorm ({norms[0]}) over a part of the batch: trainer.sync_batchnorm=true"
    if run.unused:
        return cause_of_unused(run.unused)
    if difference.kind == "loss" and difference.step == 1:
        return "the loss of a batch is not the mean of its images' losses, or depends on the rank"
    return "the module computes something that depends on the rank"


def cause_of_unused(unused: Mapping[str, str]) -> str:
    """Return why a run fails whose first step leaves parameters without a gradient.

    Args:
        unused: the line of each parameter, by its name.
    """
    name, line = next(iter(unused.items()))
    return (
        f"parameters without a gradient: {name} ({line}); use them, or trainer=ddp_sim "
        "+trainer.strategy.find_unused_parameters=true"
    )


def has_same_targets(run: StepTrace, reference: StepTrace, step: int) -> bool:
    """Return whether each image of a step shares a tensor with the reference, as its class."""
    pairs = zip(run.steps[step].images, reference.steps[step].images, strict=False)
    return all(set(hashes) & set(others) for hashes, others in pairs)


def cause_of_metric(run: StepTrace, monitor: str) -> str:
    """Return why a metric of several ranks is another one."""
    values_differ = False
    for ranks in run.metrics.values():
        values_differ |= len({values.get(monitor) for values in ranks}) > 1
    if values_differ:
        return f"logged without sync_dist: self.log({monitor!r}, …, sync_dist=True)"
    return (
        "the mean of the ranks' values is not the value over all images: log a torchmetrics metric"
    )
