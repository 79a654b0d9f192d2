"""Redaction of secrets in configurations before they are passed to trackers."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

REDACTED = "<redacted>"

# Match whole words, so that `tokenizer`, `num_tokens` and `key_size` are not redacted.
_SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|passphrase|pwd|secret|secrets|credential|credentials|token|bearer|authorization|auth|cookie"
    r"|(api|access|private|secret|signing|encryption|ssh)_?keys?)(_(id|value|text|string))?$"
)
# Tokens of a text, such as `pad_token` and `eos_token_id` of a tokenizer, are no secrets.
_TEXT_TOKEN = re.compile(r"(^|_)(bos|eos|unk|sep|pad|cls|mask|end|stop)_token$|_token_id$")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_SECRET_TEXT = re.compile(
    r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user and password of a URL
    r"|(?i:\bbearer\s+)[\w.~+/-]{8,}=*"
    r"|\b(?:hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|ya29\.|wandb_v1_)[\w.-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON Web Token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_MIN_SECRET_LENGTH = 6
# A name and its value in prose or in a query: password=X, "api_key": "X".
_NAMED_SECRET = re.compile(
    r"(?i)(?P<name>\b[\w-]*(?:password|passwd|passphrase|secret|token|credential|api_?key|access_?key)['\"]?\s*[=:]\s*['\"]?)"
    r"[^\s'\"&,;)}]{4,}"
)


def redact_secrets(
    config: Mapping[str, JsonValue], environment: Mapping[str, str] | None = None
) -> dict[str, JsonValue]:
    """Return a copy of JSON values in which values that look like secrets are `<redacted>`.

    A value is a secret in one of three cases. Its name suggests a secret (`password`, `api_key`, `hubToken`, ...). The
    value has the format of a secret: a password in a URL, an access token of a known service, a private key. Or an
    environment variable with a secret's name has the same value; `environment` defaults to this process's environment.
    Other secrets are not detected, so keep secrets in environment variables.
    """
    variables = os.environ if environment is None else environment
    known = [value for name, value in variables.items() if _names_secret(name) and len(value) >= _MIN_SECRET_LENGTH]
    return _redacted(dict(config), sorted(known, key=len, reverse=True))


def redact_text(text: str) -> str:
    """Return a text, such as the message of an exception, without what looks like a secret; see `redact_secrets`."""
    return str(redact_secrets({"text": _NAMED_SECRET.sub(_redacted_name, text)})["text"])


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without what looks like a secret: `--api_key X`, `TOKEN=X`, addresses with a password."""
    redacted = [redact_text(each) for each in arguments]
    for number, each in enumerate(arguments[:-1]):
        if each.startswith("-") and "=" not in each and _names_secret(each.lstrip("-").rpartition(".")[2]):
            redacted[number + 1] = REDACTED
    return redacted


def _redacted_name(found: re.Match[str]) -> str:
    is_of_text = _TEXT_TOKEN.search(found["name"].rstrip(" =:'\"")) is not None
    return found[0] if is_of_text else f"{found['name']}{REDACTED}"


def _redacted(value: Any, known: list[str]) -> Any:
    match value:
        case dict():
            return {
                name: REDACTED if _names_secret(name) and each not in (None, "") else _redacted(each, known)
                for name, each in value.items()
            }
        case list() | tuple():
            return [_redacted(each, known) for each in value]
        case str():
            for secret in known:
                value = value.replace(secret, REDACTED)
            return _SECRET_TEXT.sub(REDACTED, value)
    return value


def _names_secret(name: str) -> bool:
    words = "_".join(filter(None, _WORD.split(name))).lower()
    return _SECRET_NAME.search(words) is not None and _TEXT_TOKEN.search(words) is None
