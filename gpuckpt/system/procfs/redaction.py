"""Command lines without their secrets: they go into manifests, reports and logs that others read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HIDDEN = "***"

SECRET_WORDS = frozenset(
    (
        *("key", "keys", "apikey", "apikeys", "accesskey", "secretkey", "privatekey"),
        *("token", "accesstoken", "authtoken", "hftoken", "password", "passwd", "passphrase", "pwd", "pass"),
        *("secret", "secrets", "credential", "credentials", "auth", "authorization", "bearer", "cookie"),
    )
)
"""A name is a secret's when one of its words is one of these; 'tokens', 'tokenizer' and 'keyfile' are others."""

MANY_VALUES = frozenset(("api-key", "api-keys"))
"""Options that take several values in a row (vLLM's --api-key)."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_NAMED_VALUE = re.compile(
    r"""(?P<name>(?P<option>-{1,2})?[A-Za-z_][\w.-]*)"""
    r"""(?:["']?\s*[:=]\s*|(?(option)\s+|(?!)))"""  # a blank separates name and value only after an option's dashes
    r"""["']?(?:(?:Bearer|Basic)\s+)?(?P<value>[^\s"',&;}]+)""",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?P<before>[a-z][\w+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)", re.IGNORECASE)
_AUTHORIZATION = re.compile(r"(?P<before>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_KNOWN_FORMS = re.compile(
    r"\b(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS access key ids
    r"|hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic and others
    r"|(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{35}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web tokens
    r")"
)
_AWS_SECRET = re.compile(
    r"(?<![\w/+=.-])(?=[^\s]*[a-z])(?=[^\s]*[A-Z])(?=[^\s]*\d)[A-Za-z0-9+][A-Za-z0-9/+]{39}(?![\w/+=.-])"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL)


def redact(argv: Sequence[str]) -> tuple[str, ...]:
    """The same command line with '***' in the place of what looks like a key, token, password or secret.

    Rather hides too much than too little: what it shows may be read by anybody who may read the image's manifest.
    """
    return tuple(_redacted(argv))


def _redacted(argv: Sequence[str]) -> Iterator[str]:
    secret_of = ""
    for argument in argv:
        if secret_of and not _is_option(argument):
            yield HIDDEN
            secret_of = secret_of if secret_of in MANY_VALUES else ""
            continue
        is_named = argument.startswith("-") and is_secret_name(argument) and "=" not in argument
        secret_of = argument.lstrip("-").lower() if is_named and not re.search(r"\s", argument) else ""
        yield argument if secret_of else redact_text(argument)


def _is_option(argument: str) -> bool:
    # A secret may begin with one dash, an option's name is not a single dash and a long word.
    return argument.startswith("--") or re.fullmatch(r"-[A-Za-z]", argument) is not None


def is_secret_name(name: str) -> bool:
    """An option, variable or field of this name holds a secret: '--hf-token', 'AWS_SECRET_ACCESS_KEY', 'apiKey'."""
    words = [word.lower() for word in _WORD.findall(name)]
    return not SECRET_WORDS.isdisjoint(words)


def redact_text(text: str) -> str:
    """Hide secrets inside one argument: name=value, 'name: value', URLs, headers, whole command lines."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _URL_PASSWORD.sub(rf"\g<before>{HIDDEN}", text)
    text = _AUTHORIZATION.sub(rf"\g<before>{HIDDEN}", text)
    text = _KNOWN_FORMS.sub(HIDDEN, text)
    text = _AWS_SECRET.sub(HIDDEN, text)
    return "".join(_without_named_values(text))


def _without_named_values(text: str) -> Iterator[str]:
    at = 0
    while match := _NAMED_VALUE.search(text, at):
        secret = is_secret_name(match["name"])
        # A value that is no secret is searched again: it may hold names of its own ('url=http://h/?token=…').
        until, after = (match.start("value"), match.end("value")) if secret else (match.end("name"),) * 2
        yield text[at:until]
        yield HIDDEN if secret else ""
        at = after
    yield text[at:]
