"""Compile the net by torch.compile where it pays; evaluate without it."""

import importlib.util
import logging
import shutil
import sysconfig
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.launch.plan import RunPlan
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError
from lockstep.strategies.base import capabilities

log = logging.getLogger(__name__)

# On an H200 the compilation of a ViT-B/32 takes 20 s, and a step of 1,024 images 71 ms in place of 93.
PAYS_FROM_STEPS = 2000


class EagerEvaluation(pl.Callback):
    """Evaluate without torch.compile: as eval.py does, and without a compilation for each other size of a batch."""

    def on_validation_start(self, *_: Any) -> None:
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, *_: Any) -> None:
        torch.compiler.set_stance("default")

    on_test_start, on_test_end, on_exception = on_validation_start, on_validation_end, on_validation_end

    def record_fields(self) -> dict[str, bool]:
        return {"compiled": True}


def is_compiled(module: Any, data: Any, plan: RunPlan, strategy: Any) -> bool:
    """Return whether trainer.compile compiles the net; auto: in long runs on GPUs, but not under FSDP.

    Raises:
        UserError: a CPU has no C++ compiler.
    """
    own, able = plan.trainer, capabilities(strategy)
    if own["compile"] == "auto":
        if plan.accelerator != "gpu" or not able.supports_compile or able.compiles_units or not hasattr(data, "place"):
            return False
        by_epochs = (own["max_epochs"] or -1) * (data.num_train // data.global_batch_size)
        steps = min((limit for limit in (by_epochs, own["max_steps"]) if limit >= 0), default=PAYS_FROM_STEPS)
        headers = Path(sysconfig.get_paths()["include"], "Python.h")  # triton compiles against them
        has_compiler = headers.exists() and shutil.which(environment().get("CC") or "gcc")
        has_tools = has_compiler and importlib.util.find_spec("triton") is not None
        return bool(has_tools) and steps >= PAYS_FROM_STEPS and hasattr(module, "net") and module.automatic_optimization
    options = own["compile"] if isinstance(own["compile"], Mapping) else {}
    compiler = environment().get("CXX") or "g++"  # as inductor finds it
    on_cpu = plan.accelerator == "cpu" and options.get("backend", "inductor") == "inductor"
    if own["compile"] and on_cpu and not shutil.which(compiler):
        raise UserError(
            f"trainer.compile needs a C++ compiler on a CPU, and {compiler} is not here: install one (apt-get install "
            "g++), name it in the variable CXX, or leave trainer.compile out."
        )
    return bool(own["compile"])


def compile_net(net: torch.nn.Module, plan: RunPlan, strategy: Any) -> None:
    """Compile the net at its first step, for batches of one size; under FSDP each of its units."""
    options = plan.trainer["compile"] if isinstance(plan.trainer["compile"], Mapping) else {}
    options = {"dynamic": False, **options}
    if capabilities(strategy).compiles_units:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # of gathered weights
        for unit in getattr(net, "shard_units", list)() or [net]:
            unit.forward = torch.compile(unit.forward, **options)  # type: ignore[method-assign]
    else:
        net.compile(**options)
    if plan.cluster.is_rank_zero:
        log.info("torch.compile: the first step compiles the net, which takes a minute or less.")
