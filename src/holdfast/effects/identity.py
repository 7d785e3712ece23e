"""Which calls are one effect: keys, digests, and the rows that a session's history holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.reading import EPOCHS, path
from ..codec import Limits, digest
from ..kernel.operation import Op, Row, one, rows
from ..redaction import Redaction

LINEAGE = "SELECT version, origin_version, lineage FROM hf_sessions WHERE number = :number"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request is compared by."""

    key: str
    digest: str


def identify(
    redactor: Redaction, limits: Limits, scope: str, tool: str, arguments: Any, distinct: Any
) -> Identity:
    """Return a call's key and digest; `distinct` is what makes two calls one effect.

    A secret counts by a keyed hash of it, so that neither holds anything to guess it from.
    """
    # In one walk, so that arguments that are also what is distinct are looked through once.
    scope, tool, distinct, arguments = redactor.fingerprint([scope, tool, distinct, arguments])
    key = digest([scope, tool, distinct], limits, name="arguments")[:32]
    return Identity(key, digest([tool, arguments], limits, name="request"))


def request_digest(redactor: Redaction, limits: Limits, request: Any) -> str:
    """Return what two equal requests have in common."""
    return digest(redactor.fingerprint(request), limits, name="request")


def is_whole(redactor: Redaction, limits: Limits, row: Row, arguments: Any) -> bool:
    """Whether these are the arguments that a row was asked with, and none was taken out."""
    request = arguments if row["key"].startswith("once:") else [row["tool"], arguments]
    return bool(request_digest(redactor, limits, request) == row["request_digest"])


def derive_key(salt: bytes, key: str, generation: int) -> str:
    """Return the idempotency key that a receiver is given: no other store makes the same."""
    material = b"\0".join((b"holdfast effect 1", salt, key.encode(), str(generation).encode()))
    return f"hf_{hashlib.sha256(material).hexdigest()[:40]}"


class Past:
    """The effects that a session's history holds, itself and the sessions it was forked from."""

    def __init__(self, number: int, own: Sequence[tuple[int, int]], lineage: Sequence[Any]) -> None:
        self._number = number
        self._own = own
        self.origins: list[tuple[str, int, int, int]] = [tuple(entry) for entry in lineage]

    def holds(self, row: Row) -> bool:
        """Whether a row of this session's is part of its history.

        One that cannot be undone stays a part of it when the history itself was left behind. A
        row of an earlier session of the same id counts: its retries come late.
        """
        if row["session_number"] != self._number:
            return True
        if row["is_irreversible"] and row["status"] != "failed" and row["undone_by"] is None:
            return True
        return self.is_on_path(row)

    def is_on_path(self, row: Row) -> bool:
        """Whether a row of this session's was issued in the history that it has now."""
        return any(low <= row["issued_version"] <= high for low, high in self._own)

    @staticmethod
    def holds_of_origin(origin: tuple[str, int, int, int], row: Row) -> bool:
        """Whether a row of an origin came before this session was forked from it."""
        _, number, low, high = origin
        is_before = low <= row["issued_version"] < high
        return is_before and bool(row["session_number"] == number)


def counting(found: Sequence[Row]) -> Row | None:
    """Return the first row, or the one that came after it if that attempt failed."""
    first = found[0] if found else None
    if first is not None and first["status"] == "failed":
        later = (
            row
            for row in found
            if (row["key"], row["request_digest"]) == (first["key"], first["request_digest"])
            and row["generation"] > first["generation"]
        )
        return next(later, first)
    return first


def lineage_at(number: int, id: str, version: int) -> Op[str]:
    """Return the lineage of a fork made from a version: where the effects before it lie."""
    session = yield from one(LINEAGE, number=number)
    assert session is not None
    epochs = yield from rows(EPOCHS, number=number)
    ranges, below = path(epochs, session["origin_version"] or 0, version)
    own = [[id, number, low, high] for low, high in ranges]
    return json.dumps([*own, *_lineage(session, below)])


def read_past(number: int) -> Op[Past]:
    """Return what a session's history holds; to be asked for when it was rewound or forked."""
    session = yield from one(LINEAGE, number=number)
    if session is None:
        return Past(number, [], [])
    epochs = yield from rows(EPOCHS, number=number)
    ranges, below = path(epochs, session["origin_version"] or 0, session["version"])
    # An effect belongs to the version that was current when it was issued. What was issued at
    # the target of a rewind came after it.
    own = [ranges[0], *((low, high - 1) for low, high in ranges[1:])] if ranges else []
    return Past(number, own, _lineage(session, below))


def _lineage(session: Row, below: int | None) -> list[list[Any]]:
    """Return a session's lineage, cut where a rewind went below its fork point."""
    lineage = json.loads(session["lineage"]) if session["lineage"] else []
    if below is None:
        return lineage
    return [[id, number, low, min(high, below)] for id, number, low, high in lineage]
