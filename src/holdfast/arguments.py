"""Validation of arguments: text, whole numbers, durations, times and paths."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

from .errors import InvalidArgument, escaped

NAME_CHARACTERS_MAX = 256
SHOWN_CHARACTERS_MAX = 200
PATH_CHARACTERS_MAX = 4_096
# The largest that both databases hold.
WHOLE_MAX = 2**63 - 1
TIME_MAX = 2**53
DIGITS_SHOWN_MAX = 40
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

T = TypeVar("T")


class _Bounded(reprlib.Repr):
    """A repr of bounded depth and length; Python's own fails on deep lists and huge integers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN_CHARACTERS_MAX // 2

    def repr_int(self, x: int, level: int) -> str:
        if abs(x) < 10**DIGITS_SHOWN_MAX:
            return str(x)
        return f"an integer of more than {DIGITS_SHOWN_MAX} digits"


def shown(value: object) -> str:
    """Return any value as text for a message: short, and without control characters."""
    try:
        text = _Bounded().repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    text = escaped(text)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"


def require_text(label: str, text: object, most: int = NAME_CHARACTERS_MAX) -> str:
    """Return text of 1 to `most` printable characters."""
    if not isinstance(text, str) or not 0 < len(text) <= most or not text.isprintable():
        raise InvalidArgument(
            f"{label} must be text of 1 to {most} printable characters, not {shown(text)}"
        )
    return text


def require_new_id(label: str, id: object, most: int = NAME_CHARACTERS_MAX) -> str:
    """Return an id that a caller has chosen for something new.

    In a path these two are not names but steps: whatever has such an id has no URL.
    """
    if isinstance(id, str) and id in {".", ".."}:
        raise InvalidArgument(f"{label} must not be {shown(id)}, which cannot be part of a URL")
    return require_text(label, id, most)


def require_text_or_none(label: str, text: object, most: int = NAME_CHARACTERS_MAX) -> None:
    """Refuse anything but None and such text."""
    if text is not None:
        require_text(label, text, most)


def require_whole(label: str, number: object, least: int, most: int = WHOLE_MAX) -> int:
    """Return a whole number within its bounds."""
    if type(number) is not int or not least <= number <= most:
        is_too_large = type(number) is int and number > most
        is_open = most == WHOLE_MAX and not is_too_large
        bounds = f"a whole number from {least} up" if is_open else f"{least} to {most}"
        raise InvalidArgument(f"{label} must be {bounds}, not {shown(number)}")
    return number


def require_limit(limit: object, most: int) -> int:
    """Return a valid page size."""
    return require_whole("limit", limit, 1, most)


def require_seconds(
    label: str, seconds: object, most: float, *, least: float = 0, may_be_least: bool = True
) -> int:
    """Return a duration in milliseconds."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if (
        not is_number
        or not least <= cast("float", seconds) <= most
        or (seconds == least and not may_be_least)
    ):
        bounds = f"{least:g} to" if may_be_least else f"above {least:g} and at most"
        raise InvalidArgument(f"{label} must be {bounds} {most:.0f}, not {shown(seconds)}")
    return round(cast("float", seconds) * 1000)


def require_one_of(label: str, value: object, known: Collection[T]) -> T:
    """Return the value if it is one of the known words."""
    if not isinstance(value, str) or value not in known:
        words = ", ".join(map(str, known))
        raise InvalidArgument(f"{label} must be one of {words}, not {shown(value)}")
    return cast("T", value)


def require_path(path: object, what: str = "a file") -> Path:
    """Return the real path of a valid file name, whether the file exists or not."""
    text = str(path) if isinstance(path, str | Path) else ""
    is_text = text not in {"", "."} and "\0" not in text and len(text) <= PATH_CHARACTERS_MAX
    try:
        # A name from the file system may contain surrogate escapes, which os.fsencode accepts.
        os.fsencode(text)
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise InvalidArgument(f"path must name {what}, not {shown(path)}")
    return Path(os.path.realpath(text))


def milliseconds_of(label: str, moment: object) -> int:
    """Return a time in milliseconds UTC, given as such or as an aware datetime."""
    milliseconds: Any = moment
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise InvalidArgument(
                f"{label} needs a time zone, like datetime.now(UTC): {shown(moment)}"
            )
        milliseconds = (moment - _EPOCH) // timedelta(milliseconds=1)
    if type(milliseconds) is not int or not 0 <= milliseconds <= TIME_MAX:
        raise InvalidArgument(
            f"{label} must be a datetime, or a time in milliseconds UTC, not {shown(moment)}"
        )
    return milliseconds
