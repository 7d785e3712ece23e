"""Values in the columns of older formats: JSON texts and times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..arguments import require_whole, shown
from ..clock import TIME_MS_MAX
from ..codec import Limits, from_json
from ..errors import InvalidArgument, InvalidValue
from ..kernel.operation import Row

# A whole transcript may be larger than a value; its items are measured when they are stored.
WIDE = Limits(value_bytes=2**31 - 1, record_bytes=2**31 - 1, depth=256)


def parsed(row: Row, column: str, where: str) -> Any:
    """Return the value of a column of JSON text."""
    text = row[column]
    if not isinstance(text, str):
        raise InvalidValue(f"{where} is not JSON text", path=where)
    return from_json(text, WIDE, name=where)


def moment(row: Row, column: str, where: str = "") -> int:
    """Return a time in milliseconds; text is ISO-8601, taken for UTC if it names no zone."""
    value = row.get(column)
    if value is None:
        return 0
    try:
        seconds = value
        if isinstance(value, str):
            when = datetime.fromisoformat(value)
            when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
            seconds = when.timestamp()
        return require_whole(column, round(float(seconds) * 1000), 0, TIME_MS_MAX)
    except (TypeError, ValueError, OverflowError, InvalidArgument):
        where = where or f"session {row['session_id']!r}"
        raise InvalidArgument(
            f"{where} has a {column} that is not a time: {shown(value)}"
        ) from None
