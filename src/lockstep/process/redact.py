"""Remove secrets from text and records before they reach a page; refuse them as options."""

import re
from typing import Any

from lockstep.process.errors import UserError

REDACTED = "[redacted]"
SECRET_WORD = (
    r"(?:passw(?:or)?d|passphrase|pwd|secrets?|tokens?|credentials?|authorization"
    r"|access[_-]?key(?:[_-]?id)?"
    r"|(?:api|secret|private|account|kms|sse)[_-]?key)"
)
SECRET_NAME = re.compile(rf"{SECRET_WORD}$", re.IGNORECASE)
NAMED_VALUE = re.compile(
    rf"((?<![\w-])--?[\w-]{{0,60}}{SECRET_WORD}[ \t]{{1,8}}"
    rf"|{SECRET_WORD}[\"']?[ \t]{{0,8}}[=:][ \t]{{0,8}}(?:bearer |basic )?)"
    r"(\"[^\"\n]*\"|'[^'\n]*'"
    r"|(?![\[\"'])(?!\d[\d.,]*(?:[\s;)\]}\"']|\Z)|(?:null|none|true|false|bearer|basic)\b)\S+)",
    re.IGNORECASE,
)
# In Python code a name is no secret, as in cls_token = self.cls_token.expand(…), but a text is.
TEXT_IN_CODE = re.compile(
    rf"({SECRET_WORD}[\"'\]]{{0,2}}(?:[ \t]{{0,8}}:[ \t]{{0,8}}[\w.\[\] |]{{1,40}})?"
    r"[ \t]{0,8}[=:][ \t]{0,8}[bfru]{0,2})(\"[^\"\n]+\"|'[^'\n]+')",
    re.IGNORECASE,
)
FILE_IN_DIFF = re.compile(r"(?m)^(?=diff --git )")
# Keys of AWS, GitHub and Hugging Face, JSON web tokens, 40 characters that look like a secret key,
# private keys.
TOKEN = re.compile(
    r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}"
    r"|\bhf_[A-Za-z0-9]{20,}"
    r"|\bsk-[\w-]{20,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<![A-Za-z0-9/+])(?!/|(?:[A-Za-z0-9+]{0,40}/){4})"
    r"(?=[a-z/+]*[A-Z])(?=[a-zA-Z/+]*\d)(?=[A-Z0-9/+]*[a-z])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
)
URL_LOGIN = re.compile(
    r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^\s/?#\"'<>@]{1,500}@", re.IGNORECASE
)
SIGNED_QUERY = re.compile(
    r"\?(?=[^\s?]{0,500}(?:x-amz-|signature|sig=|token|credential))[^\s\"'<>]+", re.IGNORECASE
)


def redact_text(text: str) -> str:
    """Return the text with every secret replaced."""
    return NAMED_VALUE.sub(rf"\1{REDACTED}", _redact_tokens(text))


def redact_diff(diff: str) -> str:
    """Return a patch with every secret replaced; other code stays, so that the patch applies."""
    files = []
    for file in FILE_IN_DIFF.split(diff):
        is_python = file.partition("\n")[0].rstrip('"\r').endswith(".py")
        if is_python:
            files.append(TEXT_IN_CODE.sub(rf'\1"{REDACTED}"', _redact_tokens(file)))
        else:
            files.append(redact_text(file))
    return "".join(files)


def _redact_tokens(text: str) -> str:
    """Replace what is a secret by its form, whatever its name is."""
    text = TOKEN.sub(REDACTED, text)
    text = URL_LOGIN.sub(rf"\1{REDACTED}@", text)
    return SIGNED_QUERY.sub(f"?{REDACTED}", text)


def redact(value: Any, name: str = "") -> Any:
    """Return the value with every secret replaced, in nested lists and mappings too."""
    if isinstance(value, dict):
        return {redact_text(str(key)): redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        is_secret = value and SECRET_NAME.search(name)
        return REDACTED if is_secret else redact_text(value)
    return value


def refuse_secrets(value: Any, key: str = "") -> None:
    """Raise UserError if an option holds a secret: a run writes its options down.

    The error names the key, and not the value.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_secrets(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_secrets(item, key)
    elif isinstance(value, str) and value not in ("", "null") and redact(value, key) != value:
        kind = _kind_of_secret(value, key)
        raise UserError(
            f"{key} holds {kind}: give it in the environment, ~/.aws or ~/.netrc instead."
        )


def _kind_of_secret(value: str, key: str) -> str:
    if SECRET_NAME.search(key):
        return "a secret"
    return "credentials" if "://" in value else "a token or key"
