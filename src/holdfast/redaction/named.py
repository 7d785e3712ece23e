"""Secrets in a text that follow a name, a scheme or a command."""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from typing import Final

from .edit import PLACEHOLDER, Edit, replace_all
from .names import kind_of
from .tokens import WORD_BYTES

_NAMES: Final = (
    b"key", b"token", b"pass", b"secret", b"authorization", b"cookie", b"credential", b"pwd",
    b"sessid", b"sessionid",
)  # fmt: skip
_ANNOUNCED: Final = re.compile(
    rb"(?P<name>keys?|token|pass(?:w(?:or)?ds?|phrase|code|word_?hash)|secrets?|authorization"
    rb"|cookies?|credentials?|pwd|sess(?:ion)?id)"
    rb"(?P<op>\\{0,7}[\"']?\]?[ \t]{0,8}(?::[ \t]{0,4}str(?:ing)?[ \t]{0,4}=|:=|=>|=(?!=)|:(?!:)|>)"
    rb"|[ \t]{1,4}is[ \t:]{1,4}|[ \t]{1,4})[ \t]{0,8}"
)
_TWO_WORDS: Final = (b"api ", b"access ", b"secret ", b"private ", b"account ", b"auth ")
_NAME_BYTES: Final = bytes(i if i in WORD_BYTES + b"." else 32 for i in range(256))
_NAME_LENGTH_MAX: Final = 48
_LOOK_LENGTH: Final = 128
_QUOTED_LENGTH_MAX: Final = 4096
_QUOTE: Final = re.compile(rb"\\{0,7}[\"'`]")
_QUOTED: Final = {
    quote: re.compile(rb"(?:[^\n\\" + quote + rb"]|\\.)*(?=" + quote + rb")")
    for quote in (b'"', b"'", b"`")
}
_CLOSING: Final = b")]}.: "
_BARE: Final = re.compile(rb"[^\s\"'`,;&<>\\]+")
_HEADER_LINE: Final = re.compile(rb"[^\r\n\"'`\\]+")
_SCHEME: Final = re.compile(rb"(?i)(?:bearer|basic|digest|token|apikey|negotiate|aws4|hawk)\b")
_CODE: Final = re.compile(rb"[A-Za-z_][\w.]*[\[(]|[A-Za-z_]*\.[A-Za-z_.]*\Z|[\[({]|[!@][A-Za-z]*\Z")
_IDENTIFIER: Final = re.compile(rb"[A-Za-z_]+\Z")
_HARMLESS: Final = frozenset(
    b"none null nil undefined true false str string bytes int integer number bool boolean object "
    b"any optional required value text yes no on off empty missing invalid valid expired unknown "
    b"hidden default password passwd secret token key self this your the a an is not".split()
)
_BEARER: Final = re.compile(rb"(?i)\bbearer[ \t]{1,4}([A-Za-z0-9._~+/=-]{8,})")
_BASIC: Final = re.compile(rb"(?i)\bbasic[ \t]{1,4}([A-Za-z0-9+/]{6,}={0,2})")
_CURL_USER: Final = re.compile(
    rb"(?<=\s)(?:-u|--user|--proxy-user)[ =]?[\"']?[^\s:\"']{1,100}:([^\s\"']+)"
)
_SIGNATURE: Final = re.compile(
    rb"(?i)[?&;](?:x-amz-|x-goog-)?sig(?:nature)?=([A-Za-z0-9%+/=_-]{16,})"
)


def without_named(raw: bytes) -> bytes:
    """Replace every secret that follows a name, a scheme or a command."""
    # Names are found in the lower-case bytes, which have the same positions.
    lower = raw.lower()
    hits = []
    for name in _NAMES:
        at = lower.find(name)
        while at >= 0:
            hits.append(at)
            at = lower.find(name, at + len(name))
    if hits:
        raw = _without_values(raw, lower, sorted(hits))
    if b"bearer" in lower:
        raw = replace_all(_BEARER, "bearer", raw, _is_credential)
    if b"basic" in lower:
        raw = replace_all(_BASIC, "basic", raw, _is_basic)
    if b"curl" in lower:
        raw = replace_all(_CURL_USER, "password", raw)
    if b"sig=" in lower or b"signature=" in lower:
        raw = replace_all(_SIGNATURE, "signature", raw)
    return raw


def _without_values(raw: bytes, lower: bytes, hits: list[int]) -> bytes:
    edit = Edit(raw)
    for at in hits:
        found = _ANNOUNCED.match(lower, at) if at >= edit.done else None
        if found is None:
            continue
        name = _name_ending(raw, lower, edit.done, at) + raw[at : found.end("name")]
        kind = kind_of(name.decode())
        place = None if kind is None else _value_after(raw, found, name, kind)
        if kind is not None and place is not None:
            edit.cut(*place, kind)
    return edit.text()


def _name_ending(raw: bytes, lower: bytes, least: int, end: int) -> bytes:
    """Return the part of a name before its last word: `db_` of `db_password`."""
    begin = max(least, end - _NAME_LENGTH_MAX)
    for word in _TWO_WORDS:
        if lower.endswith(word, begin, end):
            return word
    return raw[begin:end].translate(_NAME_BYTES).rpartition(b" ")[2]


def _is_credential(value: bytes) -> bool:
    """Whether the text after `Bearer` is a token, not the next word of a sentence."""
    return _has_digit(value) or len(value) >= 32


def _is_basic(value: bytes) -> bool:
    try:
        return b":" in b64decode(value[:256], validate=True)
    except Base64Error:
        return False


def _value_after(
    raw: bytes, found: re.Match[bytes], name: bytes, kind: str
) -> tuple[int, int] | None:
    """Return the span of the value after a name, if it is a secret."""
    operator, at = found["op"].strip(b" \t\\\"']"), found.end()
    start = found.end("name") - len(name)
    if operator == b"" and not name.startswith(b"--"):
        return None
    if operator == b">" and raw[start - 1 : start] != b"<":
        return None
    quote = _QUOTE.match(raw, at)
    if quote is not None:
        place = _quoted(raw, quote)
        if place is not None:
            return place if _is_quoted_secret(raw[slice(*place)], kind) else None
        at = quote.end()
    pattern = _HEADER_LINE if kind in ("authorization", "cookie") else _BARE
    look = pattern.match(raw, at, at + _LOOK_LENGTH)
    if look is None or not _is_bare_secret(raw, look, operator, start, kind):
        return None
    whole = pattern.match(raw, at)
    return (at, at + len(whole[0].rstrip(_CLOSING))) if whole else None


def _quoted(raw: bytes, quote: re.Match[bytes]) -> tuple[int, int] | None:
    start, most = quote.end(), quote.end() + _QUOTED_LENGTH_MAX
    if len(quote[0]) > 1:
        end = raw.find(quote[0], start, most)
        return (start, end) if end >= 0 else None
    inside = _QUOTED[quote[0]].match(raw, start, most)
    return inside.span() if inside is not None else None


def _is_quoted_secret(value: bytes, kind: str) -> bool:
    if PLACEHOLDER.match(value) or value.lower() in _HARMLESS:
        return False
    if kind in ("password", "pwd"):
        return len(value) >= 3 and not (kind == "pwd" and value.startswith((b"/", b"~")))
    if kind == "cookie":
        return b"=" in value or len(value) >= 16
    return len(value) >= 6 and value.count(b" ") < 2


def _is_bare_secret(
    raw: bytes, look: re.Match[bytes], operator: bytes, name_at: int, kind: str
) -> bool:
    """Whether an unquoted value is a secret, not code or the next word of a text."""
    value, end = look[0].rstrip(_CLOSING), look.end()
    if PLACEHOLDER.match(value) or value.lower() in _HARMLESS:
        return False
    if kind == "cookie":
        return b"=" in value or (operator == b"=" and len(value) >= 16)
    if kind == "authorization":
        return _SCHEME.match(value) is not None or (b" " not in value and _has_digit(value))
    if _CODE.match(value) or (kind == "pwd" and value.startswith((b"/", b"~"))):
        return False
    if kind not in ("password", "pwd"):
        is_number = value.replace(b".", b"").isdigit()
        return len(value) >= 8 and not is_number and not _IDENTIFIER.match(value)
    if not _IDENTIFIER.match(value):
        return len(value) >= 4 and (operator != b"is" or _has_digit(value))
    if operator == b"=":
        is_argument = raw[end - 1 : end + 1].endswith((b")", b","))
        return len(value) >= 4 and not is_argument and kind_of(value.decode()) is None
    if operator != b":":
        return False
    # A line of settings: the name begins it and the value ends it.
    line_at = raw.rfind(b"\n", max(0, name_at - _NAME_LENGTH_MAX), name_at) + 1
    starts = (line_at > 0 or name_at < _NAME_LENGTH_MAX) and not raw[line_at:name_at].strip(b" \t-")
    return starts and raw[end : end + 1] in (b"", b"\n", b"\r") and kind_of(value.decode()) is None


def _has_digit(value: bytes) -> bool:
    return any(48 <= byte <= 57 for byte in value[:64])
