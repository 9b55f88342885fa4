"""Keep secrets out of everything that is written or printed.

Secrets come from the environment and stay there. What a run writes about itself (settings, command
line, metrics, messages) passes through :func:`redact` first, because a password gets into it all
the same: in a URL, in a setting that repeats a variable, in a message that quotes either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

# variables whose values are secrets, whatever they belong to
_VARIABLE = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)$", re.IGNORECASE
)
# settings and keys of JSON; "token" and "key" alone are words of language models and of data
_KEY = re.compile(
    r"((^|[._-])(secret|password|passwd|passphrase|credentials?)"
    r"|(api|access|private|secret|auth|wandb|account)[._-]?key"
    r"|(api|access|auth|bearer|hf|hub|github|session|security|sas)[._-]?token)$",
    re.IGNORECASE,
)
_PARAMETER = r"[^=&?#\s]*(?:token|key|secret|passw|sig|credential)[^=&?#\s]*"
_SETTING = re.compile(r"[a-z_.]+")  # names of settings, which a password that is a word may equal
_SHORTEST = 6  # a shorter value is a word or a flag, and would be hidden all over a text

_PATTERNS = (
    # user:password@ and token@ of a URL; taken for a path it has lost a slash
    (re.compile(r"(\b[a-z][a-z0-9+.-]+:/{1,2})[^/?#\s'\"@]*(?:@[^/?#\s'\"@]*)*@", re.IGNORECASE),
     rf"\1{HIDDEN}@"),
    # signed URLs
    (re.compile(rf"([?&]{_PARAMETER}=)[^&#\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    # what services hand out: Hugging Face, OpenAI and its like, GitHub, W&B, AWS
    (re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|wandb_v1_)[A-Za-z0-9_-]{16,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"), HIDDEN),
)  # fmt: skip
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.-]*)=([^\s&;,}]+)")


def secret_values(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the values of variables that are named like secrets, longest first.

    Args:
        environ: None takes the process's own environment.
    """
    environ = os.environ if environ is None else environ
    found = {value for name, value in environ.items() if _VARIABLE.search(name)}
    return sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)


def redact(content: Any) -> Any:
    """Return ``content`` with every secret replaced by ``***``.

    Secrets are the values of environment variables called ``*_TOKEN``, ``*_KEY``, ``*_SECRET``,
    ``*_PASSWORD`` and the like, user and password in a URL, signatures in one, tokens in the form
    of the known services, and what is assigned to a name such as ``api_key`` or ``password``.

    Args:
        content: text, or lists, tuples and dicts of JSON values around texts; it is not changed.
    """
    return _redact(content, secret_values())


def _redact(content: Any, secrets: list[str]) -> Any:
    if isinstance(content, str):
        return _text(content, secrets)
    if isinstance(content, Mapping):
        return {
            key if _SETTING.fullmatch(str(key)) else _redact(key, secrets): HIDDEN
            if isinstance(key, str) and isinstance(value, str) and value and _KEY.search(key)
            else _redact(value, secrets)
            for key, value in content.items()
        }
    if isinstance(content, list | tuple):
        return type(content)(_redact(value, secrets) for value in content)
    return content


def _text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern, hidden in _PATTERNS:
        text = pattern.sub(hidden, text)
    return _ASSIGNMENT.sub(_assigned, text)


def _assigned(match: re.Match[str]) -> str:
    name = match[1]
    secret = _KEY.search(name) or (name.isupper() and _VARIABLE.search(name))
    return f"{name}={HIDDEN}" if secret else match[0]
