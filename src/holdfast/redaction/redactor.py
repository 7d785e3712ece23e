"""The redactor, and its walk over plain data."""

from __future__ import annotations

import logging
import operator
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from ..errors import InvalidArgument
from .cards import is_card, without_cards
from .edit import hidden, replace_all
from .named import without_named
from .names import kind_of
from .tokens import without_tokens

_LENGTH_MIN: Final = 7
_TOKEN_LENGTH_MIN: Final = 20
_DEPTH_MAX: Final = 256
_KEY_BYTES_MIN: Final = 16
_TOKEN_NUMBER_MIN: Final = 1_000_000  # Smaller ones are token ids of a model's vocabulary.
_KIND: Final = re.compile("[a-z][a-z0-9_]{0,39}")
_URL_PASSWORD: Final = re.compile(rb"://[^\s/?#:@\"'<>]{0,256}:([^\s/\"'<>]+)@")
_EMAIL: Final = re.compile(
    rb"(?<![A-Za-z0-9._%+-])([A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)"
)
_SCHEMA_TYPES: Final = ("string", "object", "integer", "number", "boolean", "array", "null")


class Redaction(Protocol):
    """Redacts secrets in plain data before it is stored.

    An optional attribute `key`, bytes kept outside the store, keys the hashes of calls.
    """

    def redact(self, value: Any) -> Any:
        """Return the value to store; the same object if it contains no secret."""
        ...


class NoRedaction:
    """Stores everything as it is, secrets included."""

    def redact(self, value: Any) -> Any:
        """Return the value itself."""
        return value


class Redactor:
    """Replaces common kinds of secrets by `[redacted:kind]`; thread-safe.

    `extra` maps further kinds to patterns, `{"badge": r"EMP-[0-9]{6}"}`, which must not backtrack
    without bound; `emails` also redacts e-mail addresses. `key` keys the hashes that identify equal
    calls. Without one they use a salt that is in the store, so that anyone with the file could
    guess card numbers. Keep the key: a store that has effects cannot be used with another.
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
        require_key(key)
        self._extra = [(kind, re.compile(pattern)) for kind, pattern in (extra or {}).items()]
        self._emails = emails
        self.key = key

    def redact(self, value: Any) -> Any:
        """Return the value with `[redacted:kind]` for each secret, or the same object."""
        return _Walk(self._text).walk(value)

    def _text(self, text: str) -> str:
        for kind, pattern in self._extra:
            text = pattern.sub(hidden(kind), text)
        length = len(text)
        if length < _LENGTH_MIN or (length < _TOKEN_LENGTH_MIN and text.isidentifier()):
            return text
        before = text.encode("utf-8", "surrogatepass")
        raw = without_named(without_tokens(before))
        if b"@" in raw:
            if b"://" in raw:
                raw = replace_all(_URL_PASSWORD, "url_password", raw)
            if self._emails:
                raw = replace_all(_EMAIL, "email", raw)
        raw = without_cards(raw)
        return text if raw is before else raw.decode("utf-8", "surrogatepass")


def checked_redaction(redaction: Redaction | None) -> Redaction:
    """Return a redaction that can be used, the default without one, or raise InvalidArgument."""
    if redaction is None:
        return Redactor()
    if not callable(getattr(redaction, "redact", None)):
        raise InvalidArgument(
            f"redaction must have redact(), which {type(redaction).__name__} lacks; "
            "holdfast.NoRedaction() stores secrets in plain text"
        )
    require_key(getattr(redaction, "key", None))
    return redaction


def require_key(key: object) -> None:
    """Refuse an invalid key."""
    if key is not None and (type(key) is not bytes or len(key) < _KEY_BYTES_MIN):
        problem = f"The key must be at least {_KEY_BYTES_MIN} bytes."
        raise InvalidArgument(problem, argument="key")


def log_origin(log: logging.Logger, redaction: Redaction, error: object) -> None:
    """Log the traceback of an error of user code at the level DEBUG, redacted."""
    if isinstance(error, BaseException) and log.isEnabledFor(logging.DEBUG):
        log.debug("%s", redaction.redact("".join(traceback.format_exception(error))))


class _Walk:
    """One walk over one value; shared and cyclic containers are walked once."""

    def __init__(self, text: Callable[[str], str]) -> None:
        self._text = text
        self._seen: dict[tuple[int, str | None], Any] = {}

    def walk(self, value: Any, kind: str | None = None, level: int = 0) -> Any:
        """Return a value with secrets redacted; with a kind, all text and numbers are secrets."""
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
            return value  # PWD is also a shell's working directory.
        if value.startswith("[redacted:") and value.endswith("]"):
            return value
        return hidden(kind)

    def _integer(self, value: int, kind: str | None) -> int | str:
        if kind is None and 10**14 <= value < 10**16 and is_card(str(value).encode()):
            kind = "card"
        if kind is None or (kind == "token" and value < _TOKEN_NUMBER_MIN):
            return value
        return hidden(kind)

    def _list(self, value: list[Any], kind: str | None, level: int) -> list[Any]:
        items = [self.walk(item, kind, level) for item in value]
        same = all(map(operator.is_, items, value))
        return value if same else items

    def _dict(self, value: dict[Any, Any], kind: str | None, level: int) -> dict[Any, Any]:
        if kind is not None and value.get("type") in _SCHEMA_TYPES:
            kind = None  # A JSON schema of a secret contains none.
        changed: dict[Any, Any] = {}
        same = True
        for key, item in value.items():
            name = self._text(key) if type(key) is str else key
            while name is not key and (name in changed or name in value):
                name += "*"
            inner = kind or (kind_of(key) if type(key) is str else None)
            if inner == "token" and "logprob" in value:
                inner = None  # A language model's token.
            found = changed[name] = self.walk(item, inner, level)
            same = same and found is item and name is key
        return value if same else changed
