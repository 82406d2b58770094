"""Call Hydra 1.3 and 1.4 in the same way: only this file knows what differs between them."""

from collections.abc import Callable
from typing import Any


def is_hydra_1_3() -> bool:
    """Return whether the installed Hydra is 1.3 and OmegaConf 2.3, which it needs."""
    from hydra import __version__

    return __version__.startswith("1.3.")


def version_base() -> dict[str, str]:
    """Return the argument that turns off the behaviour of Hydra 1.2. Hydra 1.4 would warn of it."""
    return {"version_base": "1.3"} if is_hydra_1_3() else {}


def instantiate(node: Any, **options: Any) -> Any:
    """Instantiate a config of the user, whose targets may be any that can be imported."""
    from hydra import utils

    if not is_hydra_1_3():
        # Hydra 1.4 asks which targets may be called. An untrusted config never comes here, see
        # config/foreign.py.
        checks = utils.UNSAFE_DISABLE_EXECUTION_CHECKS  # type: ignore[attr-defined]
        options["_execution_whitelist_"] = checks
    return utils.instantiate(node, **options)


def store_config(**config: Any) -> None:
    """Store a config, and replace one that has its name."""
    from hydra.core.config_store import ConfigStore

    if not is_hydra_1_3():
        # Hydra 1.4 warns if it replaces a config without this argument.
        config["replace"] = True
    ConfigStore.instance().store(**config)


def register_resolver(name: str, resolver: Callable[..., Any], **options: bool) -> None:
    """Register a resolver of OmegaConf, and replace one that has its name."""
    from omegaconf import OmegaConf

    if is_hydra_1_3():
        OmegaConf.register_new_resolver(name, resolver, replace=True, **options)
    else:
        # OmegaConf 2.3 has a deprecated function of this name, which takes other arguments.
        register: Any = OmegaConf.register_resolver
        register(name, resolver, replace=True, **options)
