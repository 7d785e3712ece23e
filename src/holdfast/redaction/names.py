"""Names whose values are secrets: `dbPassword`, `X-Api-Key`, `client_secret`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_WORD: Final = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LAST_WORDS: Final = {
    word: kind
    for kind, words in {
        "password": "password passwords passwd passphrase passcode",
        "pwd": "pwd",
        "secret": "secret secrets otp cvv cvc ssn apisecret clientsecret",
        "token": "jwt bearer accesstoken authtoken refreshtoken apitoken sessiontoken",
        "api_key": "apikey apikeys secretkey accesskey",
        "authorization": "authorization",
        "cookie": "cookie cookies phpsessid jsessionid sessionid",
        "credential": "credential credentials",
    }.items()
    for word in words.split()
}
_KEYS: Final = {
    word: kind
    for kind, words in {
        "api_key": "api access secret account auth master service signing encryption shared "
        "subscription client app admin",
        "private_key": "private ssh pem",
    }.items()
    for word in words.split()
}
_HARMLESS_TOKENS: Final = {
    "page", "next", "previous", "prev", "continuation", "continue", "sync", "cursor", "pagination",
    "pad", "padding", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "start", "end", "special",
    "first", "last", "new", "per", "one", "each", "input", "output",
}  # fmt: skip


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str | None:
    """Return the kind of secret that a name implies, or None as for `max_tokens`."""
    words = [word.lower() for word in _WORD.findall(name[:80])]
    if not words:
        return None
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _LAST_WORDS:
        return _LAST_WORDS[last]
    if last == "token":
        return None if before in _HARMLESS_TOKENS else "token"
    if last in ("key", "keys"):
        return _KEYS.get(before)
    if (before, last) in (("card", "number"), ("password", "hash"), ("connect", "sid")):
        return "card" if before == "card" else "secret"
    if last.endswith(("password", "passwd")):
        return "password"
    return "secret" if last.endswith("secret") else None
