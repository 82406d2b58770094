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

from lockstep.process.environment import environment
from lockstep.process.errors import UserError
from lockstep.runs.run import Run
from lockstep.strategies.base import capabilities

log = logging.getLogger(__name__)

# On an H200 the compilation of a ViT-B/32 takes 20 s. A step of 1,024 images takes 71 ms compiled
# and 93 ms otherwise.
PAYS_FROM_STEPS = 2000


class EagerEvaluation(pl.Callback):
    """Evaluate without torch.compile, as eval.py does.

    Otherwise each other size of a batch would be compiled too.
    """

    def on_validation_start(self, *_: Any) -> None:
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, *_: Any) -> None:
        torch.compiler.set_stance("default")

    on_test_start = on_validation_start
    on_test_end = on_validation_end
    on_exception = on_validation_end

    def record_fields(self) -> dict[str, bool]:
        return {"compiled": True}


def should_compile(module: Any, data: Any, run: Run, strategy: Any) -> bool:
    """Return whether trainer.compile compiles the net.

    The value auto compiles it in long runs on GPUs, but not under FSDP.

    Raises:
        UserError: a CPU has no C++ compiler.
    """
    compile_option = run.trainer_config["compile"]
    if compile_option == "auto":
        return (
            run.cluster.accelerator == "gpu"
            and _can_be_compiled(module, data, strategy)
            and _has_gpu_compiler()
            and _training_steps(run, data) >= PAYS_FROM_STEPS
        )

    if compile_option and run.cluster.accelerator == "cpu":
        backend = _compile_arguments(run).get("backend", "inductor")
        if backend == "inductor":
            _require_cpu_compiler()
    return bool(compile_option)


def _can_be_compiled(module: Any, data: Any, strategy: Any) -> bool:
    """Return whether task and data are Lockstep's, and the strategy allows to compile the net."""
    strategy_capabilities = capabilities(strategy)
    if not strategy_capabilities.supports_compile or strategy_capabilities.compiles_units:
        return False
    is_task = hasattr(module, "net") and module.automatic_optimization
    return is_task and hasattr(data, "attach_to_ranks")


def _has_gpu_compiler() -> bool:
    """Return whether triton is here, with the C compiler and Python's headers that it needs."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = environment().get("CC") or "gcc"
    if not headers.exists() or not shutil.which(compiler):
        return False
    return importlib.util.find_spec("triton") is not None


def _training_steps(run: Run, data: Any) -> int:
    """Return the number of steps in max_epochs or max_steps, whichever ends first.

    Without either the training is long: it counts as PAYS_FROM_STEPS.
    """
    max_steps = run.trainer_config["max_steps"]
    max_epochs = run.trainer_config["max_epochs"] or -1
    steps_of_epochs = max_epochs * data.steps_per_epoch
    limits = [limit for limit in (steps_of_epochs, max_steps) if limit >= 0]
    return min(limits, default=PAYS_FROM_STEPS)


def _require_cpu_compiler() -> None:
    """Refuse a CPU without the C++ compiler that inductor looks for."""
    compiler = environment().get("CXX") or "g++"
    if not shutil.which(compiler):
        raise UserError(
            f"trainer.compile needs a C++ compiler on a CPU, and {compiler} is not here: install "
            "one (apt-get install g++), name it in the variable CXX, or leave trainer.compile out."
        )


def _compile_arguments(run: Run) -> dict[str, Any]:
    """Return the arguments of torch.compile that trainer.compile lists.

    {} if it is true or auto.
    """
    compile_option = run.trainer_config["compile"]
    return dict(compile_option) if isinstance(compile_option, Mapping) else {}


def compile_net(net: torch.nn.Module, run: Run, strategy: Any) -> None:
    """Compile the net at its first step, for batches of one size; under FSDP each of its units."""
    arguments = {"dynamic": False, **_compile_arguments(run)}
    if capabilities(strategy).compiles_units:
        _compile_units(net, arguments)
    else:
        net.compile(**arguments)
    if run.cluster.is_rank_zero:
        log.info("torch.compile: the first step compiles the net, which takes a minute or less.")


def _compile_units(net: torch.nn.Module, arguments: dict[str, Any]) -> None:
    # torch warns of each weight that FSDP has gathered.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    units = net.shard_units() if hasattr(net, "shard_units") else []
    for unit in units or [net]:
        unit.forward = torch.compile(unit.forward, **arguments)  # type: ignore[method-assign]
