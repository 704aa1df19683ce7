"""What may be shown to others: neither credentials nor the names of home folders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import cast

MASK = "***"

_ALWAYS_SECRET = re.compile(r"secret|passw|passphrase|credential|apikey", re.IGNORECASE)
_TRAILING = {"id", "value", "string", "text"}
"""Words that say nothing, as in ``TOKEN_VALUE``."""
_ACCESS = {"access", "api", "auth", "deploy", "hf", "hub", "private", "signing", "ssh", "wandb"}
"""Words that make keys and tokens secret where they are many: ``api_keys``, not ``stop_tokens``."""
_ORDINARY = {"bos", "cls", "eos", "mask", "metric", "pad", "public", "sep", "sort", "stop", "unk"}
"""Words that make one key or token ordinary: ``pad_token``, ``sort_key``."""

_CREDENTIAL = re.compile(
    r"""
    \b(?: (?:hf_|gh[oprsu]_)[A-Za-z0-9]{16,}               # Hugging Face, GitHub
      | sk-(?:[A-Za-z0-9]{16,}|(?:admin|ant|or|proj|svcacct)-[\w-]{12,})
      | [rs]k_(?:live|test)_[A-Za-z0-9]{16,}
      | (?:github_pat_|gl[a-z]{2,4}t-|xox[abeprs]-|xapp-|wandb_v1_|nvapi-)[\w-]{16,}
      | pypi-[\w-]{24,} | npm_[A-Za-z0-9]{36} | AIza[\w-]{30,}
      | A[KS]IA[A-Z0-9]{16}\b                              # an access key of AWS
      | eyJ[\w-]+\.[\w-]+\.[\w-]*                          # a JSON web token
      )
    # user:password@host; a port and a path are no password, but one may hold "@" and "/"
    | (?<=://)[^/\s:@\["']*:(?!\d{1,5}(?:[/?\#\s"',]|$))[^\s"']{0,256}(?=@[\w.\[-])
    | (?<=://)(?!git@)[^/\s:@?\#\["']+(?=@)                # token@host
    | (?:(?<=[Bb]earer\ )|(?<=[Bb]asic\ ))[\w.~+/=-]{8,}   # a header of HTTP
    | [?&][\w-]*(?i:key|key_?id|token|auth|password|pwd|pat|secret|sig|signature|credential)=[^&\s]+
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----.*
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])([\w.-]++)(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&'"\])}]+)"""
)


def public_config(
    config: Mapping[str, object], environ: Mapping[str, str] = os.environ
) -> dict[str, object]:
    """Returns a copy of ``config`` that may be shown to others, made of plain JSON values.

    ``***`` stands for values under names such as ``hf_token``, ``apiKey`` or ``password``; numbers
    such as ``max_tokens`` and words such as ``pad_token`` stay. Texts are shown as ``scrub`` does.
    """
    scrubbed = _scrubber(environ)

    def public(value: object) -> object:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            items = cast("Mapping[object, object]", value).items()
            return {
                scrubbed(str(name)): MASK if _secret(str(name), item) else public(item)
                for name, item in items
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [public(item) for item in cast("Iterable[object]", value)]
        return scrubbed(str(value))

    return cast("dict[str, object]", public(config))


def scrub(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns a text that may be shown to others.

    ``***`` stands for well-known forms of credentials, for values that are assigned to a secret
    name, and for values of secret-named variables of ``environ``. Home folders become ``~``.
    """
    return _scrubber(environ)(text)


def _scrubber(environ: Mapping[str, str]) -> Callable[[str], str]:
    secrets = [value for name, value in environ.items() if len(value) >= 8 and _secret(name, value)]
    secrets.sort(key=len, reverse=True)
    secret = re.compile("|".join(re.escape(value) for value in secrets) or r"(?!)")
    own = environ.get("HOME", "").rstrip("/") or "/root"
    home = re.compile(rf"(?<![\w.~-])(?:{re.escape(own)}|/root|/(?:home|Users)/[\w.-]+)(?![\w-])")

    def scrubbed(text: str) -> str:
        text = _CREDENTIAL.sub(MASK, secret.sub(MASK, text))
        return home.sub("~", _ASSIGNMENT.sub(_assigned, text))

    return scrubbed


def _assigned(found: re.Match[str]) -> str:
    name, sign, value = found.groups()
    in_prose = ":" in sign and found.string[: found.start()].rpartition("\n")[2].strip(" '\"{-")
    if in_prose and re.fullmatch(r"(?i)auth|key|pat|token", name):  # "unknown key: 'lr'"
        return found[0]
    return f"{name}{sign}{MASK}" if _secret(name, value) else found[0]


def _secret(name: str, value: object) -> bool:
    """Whether a name such as ``HF_TOKEN`` or ``apiKey`` promises a secret."""
    if value is None or isinstance(value, bool):
        return False
    if _ALWAYS_SECRET.search(name):
        return True
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    while words and words[-1] in _TRAILING:
        words.pop()
    number = isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal())
    if number or not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    match words[-1]:
        case "keys" | "tokens":
            return before in _ACCESS
        case "key" | "token":
            return before not in _ORDINARY
        case last:
            return last in {"auth", "pat", "pwd"}
