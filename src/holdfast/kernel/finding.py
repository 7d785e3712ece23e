"""Finding a row as people name it: by its id, its number, or the beginning of its id."""

from __future__ import annotations

from ..arguments import shown
from ..errors import InvalidArgument
from .operation import Op, Row, one, rows

SHORT_CHARACTERS_MIN = 8
NUMBER_DIGITS_MAX = 18


def find_row(noun: str, select: str, given: str) -> Op[Row | None]:
    """Return the row that somebody means, if there is one; `select` names columns and the table.

    The first 8 characters of an id or more are enough if no other id begins with them.
    """
    by_id, by_number = f"{select} WHERE id = :id", f"{select} WHERE number = :number"
    # SQLite compares without regard to case here, so what it finds is looked at again.
    beginning = rf"{select} WHERE id LIKE :pattern ESCAPE '\' ORDER BY number LIMIT 20"
    row = yield from one(by_id, id=given)
    if row is None and given.isascii() and given.isdigit() and len(given) <= NUMBER_DIGITS_MAX:
        row = yield from one(by_number, number=int(given))
    if row is None and len(given) >= SHORT_CHARACTERS_MIN:
        escaped = given.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")
        found = yield from rows(beginning, pattern=f"{escaped}%")
        found = [each for each in found if each["id"].startswith(given)]
        if len(found) > 1:
            ids = ", ".join(each["id"] for each in found[:3])
            raise InvalidArgument(f"more than one {noun}'s id begins with {shown(given)}: {ids} …")
        row = found[0] if found else None
    return row
