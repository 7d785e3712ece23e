"""The redactor, and its walk over plain data."""

from __future__ import annotations

import hmac
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from typing import Any, Final, Protocol

from ..errors import InvalidArgument
from .cards import is_card, without_cards
from .editing import Replace, replace_all
from .named import without_named
from .names import kind_of
from .tokens import without_tokens

_LENGTH_MIN: Final = 7
_TOKEN_LENGTH_MIN: Final = 20
_DEPTH_MAX: Final = 256
_KEY_BYTES_MIN: Final = 16
_TOKEN_NUMBER_MIN: Final = 1_000_000  # Below it stands the place of a word in a vocabulary.
_KIND: Final = re.compile("[a-z][a-z0-9_]{0,39}")
_URL_PASSWORD: Final = re.compile(rb"://[^\s/?#:@\"'<>]{0,256}:([^\s/\"'<>]+)@")
_EMAIL: Final = re.compile(
    rb"(?<![A-Za-z0-9._%+-])([A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)"
)
_SCHEMA_TYPES: Final = ("string", "object", "integer", "number", "boolean", "array", "null")


class Redaction(Protocol):
    """Takes secrets out of plain data before it is stored."""

    def redact(self, value: Any) -> Any:
        """Return the value to store; the very same object when there is no secret in it."""
        ...

    def fingerprint(self, value: Any) -> Any:
        """Return the value to hash: equal for equal values, without the secrets."""
        ...

    def with_key(self, key: bytes) -> Redaction:
        """Return the same redaction with the key of a store for its fingerprints."""
        ...


class NoRedaction:
    """Stores everything as it is, secrets included."""

    def redact(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def fingerprint(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def with_key(self, key: bytes) -> NoRedaction:
        """Return itself: it needs no key."""
        return self


class Redactor:
    """Replaces secrets of common shapes by `[redacted:kind]`; any thread may use it.

    `extra` maps the kind of a further secret to its pattern, `{"badge": r"EMP-[0-9]{6}"}`, and
    `emails` counts addresses as secrets. A pattern of yours must not backtrack without bound.
    `key` makes the fingerprints by which equal secrets are told; without one they are made with
    a key that lies in the store, where whoever has the file can try card numbers.
    """

    def __init__(
        self,
        *,
        extra: Mapping[str, str | re.Pattern[str]] | None = None,
        emails: bool = False,
        key: bytes | None = None,
    ) -> None:
        for kind in extra or ():
            if not _KIND.fullmatch(kind):
                problem = f"The kind {kind!r} must be a lower-case word, like card_number."
                raise InvalidArgument(problem, argument="extra")
        if key is not None and len(key) < _KEY_BYTES_MIN:
            problem = f"The key must have at least {_KEY_BYTES_MIN} bytes."
            raise InvalidArgument(problem, argument="key")
        self._extra = [(kind, re.compile(pattern)) for kind, pattern in (extra or {}).items()]
        self._emails = emails
        self._key = key

    def with_key(self, key: bytes) -> Redactor:
        """Return the same redaction with a store's key for its fingerprints, unless it has one."""
        if self._key is not None:
            return self
        return Redactor(extra=dict(self._extra), emails=self._emails, key=key)

    def redact(self, value: Any) -> Any:
        """Return the value with `[redacted:kind]` for each secret, or the very same object."""
        return _Walk(self._redact_text, _hide).walk(value)

    def fingerprint(self, value: Any) -> Any:
        """Return the value with `[redacted:kind:HASH]` for each secret, or the very same object.

        The hash is keyed: it tells equal secrets from different ones, and who has the database
        without the key cannot find a secret by trying.
        """
        if self._key is None:
            raise InvalidArgument("A fingerprint needs a key: Redactor(key=…).", argument="key")
        replace = partial(_keyed, self._key)
        return _Walk(partial(self._text, replace=replace), replace).walk(value)

    def _redact_text(self, text: str) -> str:
        return self._text(text, _hide)

    def _text(self, text: str, replace: Replace) -> str:
        for kind, pattern in self._extra:
            text = pattern.sub(lambda found, kind=kind: replace(kind, found[0]), text)  # type: ignore[misc]
        length = len(text)
        if length < _LENGTH_MIN or (length < _TOKEN_LENGTH_MIN and text.isidentifier()):
            return text
        before = text.encode("utf-8", "surrogatepass")
        raw = without_named(without_tokens(before, replace), replace)
        if b"@" in raw:
            if b"://" in raw:
                raw = replace_all(_URL_PASSWORD, "url_password", raw, replace)
            if self._emails:
                raw = replace_all(_EMAIL, "email", raw, replace)
        raw = without_cards(raw, replace)
        return text if raw is before else raw.decode("utf-8", "surrogatepass")


def _hide(kind: str, secret: str) -> str:
    return f"[redacted:{kind}]"


def _keyed(key: bytes, kind: str, secret: str) -> str:
    # Arguments are compared in normal form C, so equal arguments must give equal hashes.
    text = unicodedata.normalize("NFC", secret).encode("utf-8", "surrogatepass")
    return f"[redacted:{kind}:{hmac.digest(key, text, sha256).hex()[:32]}]"


class _Walk:
    """One walk over one value; lists that hold each other are walked once."""

    def __init__(self, text: Callable[[str], str], replace: Replace) -> None:
        self._text = text
        self._replace = replace
        self._seen: dict[tuple[int, str | None], Any] = {}

    def walk(self, value: Any, kind: str | None = None, level: int = 0) -> Any:
        """Return a value without its secrets; with a kind, all text and numbers are secrets."""
        type_of = type(value)
        if type_of is str:
            return self._text(value) if kind is None else self._whole(kind, value)
        if type_of is dict or type_of is list:
            place = (id(value), kind)
            if place in self._seen or level > _DEPTH_MAX:
                return self._seen.get(place, value)
            self._seen[place] = value
            walk = self._dict if type_of is dict else self._list
            found = self._seen[place] = walk(value, kind, level + 1)
            return found
        return self._integer(value, kind) if type_of is int else value

    def _whole(self, kind: str, value: str) -> str:
        if not value or (kind == "pwd" and value[0] in "/~"):
            return value  # A shell calls its directory PWD.
        if value.startswith("[redacted:") and value.endswith("]"):
            return value
        return self._replace(kind, value)

    def _integer(self, value: int, kind: str | None) -> int | str:
        if kind is None and 10**14 <= value < 10**16 and is_card(str(value).encode()):
            kind = "card"
        if kind is None or (kind == "token" and value < _TOKEN_NUMBER_MIN):
            return value
        return self._replace(kind, f"int:{value:x}")

    def _list(self, value: list[Any], kind: str | None, level: int) -> list[Any]:
        items = [self.walk(item, kind, level) for item in value]
        same = all(map(operator.is_, items, value))
        return value if same else items

    def _dict(self, value: dict[Any, Any], kind: str | None, level: int) -> dict[Any, Any]:
        if kind is not None and value.get("type") in _SCHEMA_TYPES:
            kind = None  # A JSON schema that describes a secret holds none.
        changed: dict[Any, Any] = {}
        same = True
        for key, item in value.items():
            name = self._text(key) if type(key) is str else key
            while name is not key and (name in changed or name in value):
                name += "*"
            inner = kind or (kind_of(key) if type(key) is str else None)
            if inner == "token" and "logprob" in value:
                inner = None  # What a model calls a token.
            found = changed[name] = self.walk(item, inner, level)
            same = same and found is item and name is key
        return value if same else changed
