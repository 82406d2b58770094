"""Any optimizer of timm by its name.

python src/train.py optimizer=timm optimizer.opt=lamb optimizer.lr=0.005
"""

import difflib
from typing import Any

from torch.optim import Optimizer

from lockstep.process.errors import UserError

# A prefix of timm: slow weights follow those of the optimizer that is named after it.
LOOKAHEAD = "lookahead_"


# timm reads these from a module alone, and here it gets parameters.
OF_MODULES = {
    "fallback_list": "optimizer.opt=muon gives vectors to AdamW by itself",
    "fallback_no_weight_decay": "optimizer.decay_norms=false",
    "filter_bias_and_bn": "optimizer.decay_norms=false",
    "param_group_fn": "optimizer.layer_decay and optimizer.head_lr_factor",
    "weight_decay_exclude_1d": "optimizer.decay_norms=false",
}


def timm_optimizer(
    parameters: Any,
    opt: str | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    **options: Any,
) -> Optimizer:
    """Return an optimizer of timm.

    Args:
        parameters: parameters, or groups of them.
        opt: any of timm.optim.list_optimizers().
        options: arguments of the optimizer: momentum, betas, eps, …

    Raises:
        UserError: an unknown name or option, an optimizer that needs second derivatives, or
            Lookahead.
    """
    from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers

    name = str(opt).removeprefix(LOOKAHEAD)
    if name not in list_optimizers():
        close = difflib.get_close_matches(name, list_optimizers(), 3)
        others = ", ".join(close) or "lamb, lion, adan, nadamw"
        raise UserError(
            f"optimizer.opt={opt}: timm has no optimizer of that name; it has {others} and others."
        )
    if name != opt:
        raise UserError(
            f"optimizer.opt={opt}: timm's Lookahead lacks the hooks of torch's optimizers, which a "
            f"resume here needs. Pass optimizer.opt={name}."
        )
    _refuse_unread_options(name, options)
    if get_optimizer_info(name).second_order:
        raise UserError(
            f"optimizer.opt={opt} needs second derivatives, which a training step here does not "
            "keep."
        )
    try:
        return create_optimizer_v2(
            parameters, opt=name, lr=lr, weight_decay=weight_decay, **options
        )
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"timm's {opt} cannot be built from the optimizer's options ({error})."
        ) from error


def _refuse_unread_options(name: str, options: dict[str, Any]) -> None:
    """Refuse the options that timm drops without a word."""
    from timm.optim import get_optimizer_info

    info = get_optimizer_info(name)
    is_read = {"momentum": info.has_momentum, "eps": info.has_eps, "betas": info.has_betas}
    for option in options:
        if option in OF_MODULES:
            raise UserError(f"optimizer.{option} does nothing here: use {OF_MODULES[option]}.")
        if not is_read.get(option, True):
            raise UserError(
                f"optimizer.{option}: {name} of timm does not take it. Leave it out, as "
                f"optimizer=timm optimizer.opt={name}."
            )
