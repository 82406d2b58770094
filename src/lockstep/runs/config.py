"""The user's composed config, which nothing writes to. What is decided from it goes into the run's plan."""

from collections.abc import Mapping
from typing import Any, NoReturn

Config = Mapping[str, Any]


class ReadOnly(dict[str, Any]):
    """A dict that refuses changes; isinstance, json and pickle take it as a dict."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the config is read-only: what is decided from it belongs in the run's plan")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return ReadOnly, (dict(self),)


def read_only(tree: Mapping[str, Any]) -> Config:
    """The same tree with every dict read-only and every list a tuple."""
    frozen: Config = _frozen(tree)
    return frozen


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return ReadOnly({key: _frozen(child) for key, child in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def writable(value: Any) -> Any:
    """A copy of plain dicts and lists, for what is written to a file or changed."""
    if isinstance(value, dict):
        return {key: writable(child) for key, child in value.items()}
    return [writable(child) for child in value] if isinstance(value, list | tuple) else value


def model_name(config: Config) -> str:
    """What is built, in records and on pages: timm's own name, or the option of the group."""
    model = config["model"]
    if model["_target_"] == "models.timm.TimmModel" and model.get("name"):
        return str(model["name"])
    return str((config.get("choices") or {}).get("model") or model["_target_"].rpartition(".")[2])


def data_name(config: Config) -> str:
    """Return data.name, or the option of the group where the data config has no name."""
    return str(config["data"].get("name") or (config.get("choices") or {}).get("data") or "data")
