"""Options end in files, checkpoints, pages and buckets: what looks like a secret among them is refused at the start."""

import re
from typing import Any

from errors import UserError
from pages.redact import SIGNED_QUERY, TOKEN_FORMS, URL_LOGIN

NAME = re.compile(r"(?i)(password|passwd|passphrase|secret|token|credentials?|api_?key|access_?key|private_?key)$")
QUERY = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?]*\?(\S+)", re.IGNORECASE)


def refuse_secrets(config: Any, key: str = "") -> None:
    """
    Raises:
        UserError: names the key, and does not repeat the value.
    """
    if isinstance(config, dict):
        for name, value in config.items():
            refuse_secrets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list | tuple):
        for value in config:
            refuse_secrets(value, key)
    elif isinstance(config, str) and (what := _looks_like(key, config)):
        raise UserError(
            f"{key} holds {what}, and a run writes its options down: give it in the environment, ~/.aws or ~/.netrc."
        )


def _looks_like(key: str, value: str) -> str | None:
    if value and NAME.search(key):
        return "a secret"
    if URL_LOGIN.search(value):
        return "an address with credentials"
    if (query := QUERY.search(value)) and SIGNED_QUERY.search(query[1]):
        return "a signed address"
    return "a token or key" if TOKEN_FORMS.search(value) else None
