"""Redaction of secrets in configurations before they are passed to trackers."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

REDACTED = "<redacted>"

# Match whole words, so that `tokenizer`, `num_tokens` and `key_size` are not redacted.
_SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|passphrase|(db|user|smtp|proxy|redis)_pass|pwd|secret|secrets|credential|credentials|token|bearer|authorization|auth"
    r"|cookie|(api|access|private|secret|signing|encryption|ssh|account|wandb)_?keys?)(_(id|value|text|string))?$"
)
# Tokens of a text, such as `pad_token` and `eos_token_id` of a tokenizer, are not secrets.
_TEXT_TOKEN = re.compile(r"(^|_)(bos|eos|unk|sep|pad|cls|mask|end|stop)_token$|_token_id$")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
# A match is a secret, after a `name` that is kept.
_QUERY = r"(?i:(?:[\w-]{0,40}(?:password|secret|token|credential|signature|key)|sig)=)"
_SECRET_TEXT = re.compile(
    r"(?<=://)(?:[^/\s:@]*:[^/\s]+|[\w.~-]{16,})(?=@)"  # password, or token in place of the user, of a URL
    rf"|(?P<name>[?&]{_QUERY})[^\s&'\"]{{4,}}"
    r"|(?i:\bbearer\s+)[\w.~+/-]{8,}=*"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]+|(?<=/api/webhooks/)[\w/-]+"
    r"|\b(?:hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|[sr]k_(?:live|test)_|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|npm_|pypi-"
    r"|r8_|gsk_|nvapi-|hvs\.|wandb_v1_)[\w.-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON Web Token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_MIN_SECRET_LENGTH = 6
_FOLDERS = ("PWD", "OLDPWD")  # variables of shells
# A name and its value in prose, in JSON or on a command line: password=X, "api_key": "X", --hub.token X.
_NAME = (
    r"(?i:(?:password|passwd|passphrase|(?:db|user|smtp|proxy|redis)_pass|pwd|secret|credential|(?<!bos_|eos_|unk_|sep_|pad_|cls_|end_)(?<!mask_|stop_)token|signature"
    r"|(?:api|access|private|secret|account)[ _-]?key))"
)
_QUOTE = r"\\?['\"]"
_NAMED_SECRETS = (
    re.compile(rf"(?P<name>{_NAME}(?:{_QUOTE})?\s*[=:]\s*(?P<quote>{_QUOTE})).{{2,}}?(?=(?P=quote))"),
    re.compile(rf"(?P<name>{_NAME}(?:{_QUOTE})?\s*[=:]\s*)(?!None\b|null\b)[^\s'\"\\&,;)}}\]<]{{4,}}"),
    re.compile(rf"(?P<name>--[\w.-]{{0,40}}{_NAME}\s+)[^\s'\"<-]\S{{3,}}"),
    re.compile(rf"(?P<name>(?i:key)(?:{_QUOTE})?\s*[=: ]\s*(?:{_QUOTE})?)[\w+/-]{{20,}}=*"),
    re.compile(rf"(?P<name>(?i:\bauthorization)(?:{_QUOTE})?\s*[=:]\s*(?:{_QUOTE})?)(?!<)(?:[a-zA-Z]+\s+)?[^\s'\"]+"),
    re.compile(r"(?P<name>(?i:\bcookie):\s*)[^\n'\"]+"),
    re.compile(r"(?P<name>(?:\s-u|--user)[ =])[^\s:]+:\S+"),  # of curl
)


def redact_secrets(
    config: Mapping[str, JsonValue], environment: Mapping[str, str] | None = None
) -> dict[str, JsonValue]:
    """Return a copy of a configuration in which values that look like secrets are `<redacted>`.

    Values that JSON lacks, such as paths, dtypes and NaN, become text. A value is a secret in one of three cases. Its
    name suggests a secret (`password`, `api_key`, `hubToken`, ...). The value has the format of a secret: a password in
    a URL, an access token of a known service, a private key. Or an environment variable with a secret's name has the
    same value; `environment` defaults to this process's environment. Other secrets are not detected, so keep secrets in
    environment variables.
    """
    variables = os.environ if environment is None else environment
    names = [name for name in variables if _names_secret(name) and name not in _FOLDERS]
    known = [variables[name] for name in names if len(variables[name]) >= _MIN_SECRET_LENGTH]
    return _redacted(dict(config), sorted(known, key=len, reverse=True))


def redact_text(text: str) -> str:
    """Return a text, such as the message of an exception, without what looks like a secret; see `redact_secrets`."""
    text = str(redact_secrets({"text": text})["text"])
    for pattern in _NAMED_SECRETS:
        text = pattern.sub(_hide, text)
    return text


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without what looks like a secret: `--api_key X`, `TOKEN=X`, addresses with a password."""
    redacted = [redact_text(each) for each in arguments]
    for number, each in enumerate(arguments):
        name, is_assigned, _ = each.partition("=")
        if each.startswith("-") and _names_secret(name.lstrip("-").rpartition(".")[2]):
            if is_assigned:
                redacted[number] = f"{name}={REDACTED}"
            elif number + 1 < len(redacted):
                redacted[number + 1] = REDACTED
    return redacted


def _redacted(value: Any, known: list[str]) -> Any:
    match value:
        case Mapping():
            return {
                str(name): REDACTED if _names_secret(str(name)) and each not in (None, "") else _redacted(each, known)
                for name, each in value.items()
            }
        case list() | tuple():
            return [_redacted(each, known) for each in value]
        case None | int():
            return value
        case float() if math.isfinite(value):
            return value
    text = str(value)
    for secret in known:
        text = text.replace(secret, REDACTED)
    return _SECRET_TEXT.sub(_hide, text)


def _hide(found: re.Match[str]) -> str:
    return f"{found['name'] or ''}{REDACTED}"


def _names_secret(name: str) -> bool:
    words = "_".join(filter(None, _WORD.split(name))).lower()
    return _SECRET_NAME.search(words) is not None and _TEXT_TOKEN.search(words) is None
