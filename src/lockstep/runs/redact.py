"""Takes secrets out of any text, list or mapping before it can reach a page.

What is taken out: AWS keys, values of password-like names, credentials inside addresses, the query of a signed
address, well-known token forms, private keys. Rather a word too many than a key: a page is public for ever.
"""

import re
from typing import Any

from lockstep.runs.errors import UserError

REDACTED = "[redacted]"
SECRET_WORD = (
    r"(?:password|passwd|passphrase|pwd|secrets?|tokens?|credentials?|authorization"
    r"|api[_-]?key|access[_-]?key(?:[_-]?id)?|secret[_-]?key|private[_-]?key|account[_-]?key|kms[_-]?key|sse[_-]?key)"
)
LAST_NAME = re.compile(rf"{SECRET_WORD}$", re.IGNORECASE)
SECRET_NAME = re.compile(rf"{SECRET_WORD}(?:\.|$)", re.IGNORECASE)
COUNT_NAME = re.compile(r"tokens?$", re.IGNORECASE)  # num_tokens=196 is a number of patches
SIGNED_QUERY = re.compile(r"(?i)(x-amz-|signature|credential|token|expires|sig=|key=|password|secret|auth)")
TOKEN_FORMS = re.compile(
    r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA|AIPA|ANPA|ANVA|ABIA|ACCA)[A-Z0-9]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_[A-Za-z0-9]{20,}"
    r"|\bxox[abeprs]-[\w-]{10,}|\bsk-[\w-]{20,}|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
)
# Every repetition is bounded: a megabyte of dashes must not cost a minute
SCHEME = r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,20}://"
URL_LOGIN = re.compile(rf"({SCHEME})[^\s/?#\"'<>]{{0,500}}@", re.IGNORECASE)
URL_QUERY = re.compile(rf"({SCHEME}[^\s?\"'<>]{{0,2000}})\?([^\s\"'<>]+)", re.IGNORECASE)
STRAY_AMZ = re.compile(r"(?i)\b(x-amz-(?:signature|credential|security-token)=)[^\s&\"'<>]+")
BEARER = re.compile(r"(?i)\b(bearer|basic)([ \t]{1,8})[A-Za-z0-9._~+/=-]{8,}")
NAMED_VALUE = re.compile(
    rf"({SECRET_WORD}[\"']?)([ \t]{{0,8}}[=:][ \t]{{0,8}})(\"[^\"\n]*\"|'[^'\n]*'|\S+)", re.IGNORECASE
)
NAMED_OPTION = re.compile(rf"((?<![\w-])--?[\w-]{{0,60}}{SECRET_WORD})([ \t]{{1,8}})(?!-)(\S+)", re.IGNORECASE)
LONG_KEY = re.compile(r"(?<![A-Za-z0-9/+])(?:[A-Za-z0-9/+]{40}|[A-Za-z0-9/+]{100,})(?![A-Za-z0-9/+])")
HARMLESS = re.compile(r"(?i)(none|null|true|false|\[redacted\]|\$\{[^}]*\})")


def redact(value: Any) -> Any:
    """The same value with every secret replaced; walks lists and mappings, and knows password-like keys."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {redact_text(str(key)): _redact_entry(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


def _redact_entry(key: str, item: Any) -> Any:
    if not SECRET_NAME.search(key) or item is None or isinstance(item, bool):
        return redact(item)
    if isinstance(item, str) and (not item or HARMLESS.fullmatch(item)):
        return item
    if isinstance(item, int | float) and COUNT_NAME.search(key):
        return item
    return REDACTED


def redact_text(text: str) -> str:
    text = TOKEN_FORMS.sub(REDACTED, text)
    text = URL_LOGIN.sub(rf"\1{REDACTED}@", text)
    text = URL_QUERY.sub(_without_signature, text)
    text = STRAY_AMZ.sub(rf"\1{REDACTED}", text)
    text = BEARER.sub(rf"\1\2{REDACTED}", text)
    text = NAMED_VALUE.sub(_without_value, text)
    text = NAMED_OPTION.sub(rf"\1\2{REDACTED}", text)
    return LONG_KEY.sub(_unless_plain, text)


def _without_signature(match: re.Match) -> str:
    address, query = match.groups()
    return f"{address}?{REDACTED}" if SIGNED_QUERY.search(query) else match.group()


def _without_value(match: re.Match) -> str:
    name, sign, value = match.groups()
    bare = value.strip("\"',;}])")
    if HARMLESS.fullmatch(bare) or (bare.isdecimal() and COUNT_NAME.search(name.rstrip("\"'"))):
        return match.group()
    return f"{name}{sign}{REDACTED}"


def _unless_plain(match: re.Match) -> str:
    """A secret access key is 40 mixed characters; a git hash has no capitals, and a path rarely has all three."""
    text = match.group()
    capitals, digits = sum(c.isupper() for c in text), sum(c.isdigit() for c in text)
    return REDACTED if capitals >= 4 and digits >= 1 and any(c.islower() for c in text) else text


WORDS = re.compile(r"[\s,;:=\"'()\[\]{}]+")
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
    if value and LAST_NAME.search(key) and not HARMLESS.fullmatch(value):
        return "a secret"
    if URL_LOGIN.search(value):
        return "an address with credentials"
    if (query := QUERY.search(value)) and SIGNED_QUERY.search(query[1]):
        return "a signed address"
    return "a token or key" if TOKEN_FORMS.search(value) or any(map(_is_bare_key, WORDS.split(value))) else None


def _is_bare_key(word: str) -> bool:
    """A secret access key of AWS by itself, and no path, which may be as long by chance."""
    is_path = word.startswith(("/", "~")) or word.count("/") > 3
    return len(word) == 40 and not is_path and LONG_KEY.sub(_unless_plain, word) == REDACTED
