"""Errors as interfaces report them: one table of codes, and one shape of body (RFC 9457)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from .. import errors
from ..clock import iso
from ..errors import HoldfastError, StoreError

log = logging.getLogger("holdfast.answers")

# How many bytes of current values the response to a conflict includes by default.
CONFLICT_BYTES: Final = 4_194_304
CURRENT: Final = ("current_value", "current_state")


@dataclass(frozen=True, slots=True)
class Problem:
    """A code's HTTP status and title, and whether the same request may succeed later."""

    status: int
    title: str
    retryable: bool = False
    members: tuple[str, ...] = ()
    """The fields of an error that are reported besides the standard members."""


PROBLEMS: dict[str, Problem] = {
    "version_conflict": Problem(
        409,
        "Another writer was first",
        retryable=True,
        members=("key", "current_version", "current_value", "updated_by"),
    ),
    "precondition_required": Problem(428, "A precondition is required"),
    "precondition_invalid": Problem(400, "The precondition is invalid"),
    "key_not_found": Problem(404, "There is no such key", members=("key",)),
    "session_not_found": Problem(404, "There is no such session"),
    "checkpoint_not_found": Problem(404, "There is no such version"),
    "not_found": Problem(404, "There is no such resource"),
    "method_not_allowed": Problem(405, "This route does not accept the method"),
    "patch_conflict": Problem(409, "The patch does not apply to the stored value"),
    "session_closed": Problem(409, "The session has ended", members=("session_id",)),
    "session_busy": Problem(
        409, "Another process drives the session", retryable=True, members=("session_id", "holder")
    ),
    "lease_lost": Problem(409, "The lease is lost"),
    "request_mismatch": Problem(409, "This key was used for another request"),
    "in_progress": Problem(
        409, "Another caller is running it", True, ("effect_id", "wait_seconds")
    ),
    "unresolved": Problem(409, "The outcome of an effect is unknown", members=("effect_id",)),
    "refused": Problem(409, "The store does not allow this"),
    "type_mismatch": Problem(422, "The stored value has another type", members=("key",)),
    "invalid_request": Problem(422, "The request is invalid", members=("pointer",)),
    "malformed": Problem(400, "The request is malformed"),
    "unsupported_media_type": Problem(415, "The media type of the body is not accepted here"),
    "too_large": Problem(413, "A limit was exceeded", members=("limit", "actual")),
    "headers_too_large": Problem(431, "The headers exceed their limit"),
    "history_compacted": Problem(
        410, "History this old was removed", members=("oldest_sequence", "oldest_position")
    ),
    "sequence_in_future": Problem(
        400, "The state has not reached this sequence", members=("head_sequence",)
    ),
    "idempotency_key_reused": Problem(422, "The idempotency key was used for another request"),
    "unauthorized": Problem(401, "A valid token is required"),
    "forbidden": Problem(403, "The token does not allow this"),
    "foreign_origin": Problem(403, "Pages of this origin may not use the server"),
    "foreign_host": Problem(421, "The server does not serve this host name"),
    "read_only": Problem(403, "The server is read-only"),
    "rate_limited": Problem(429, "Too many requests", retryable=True),
    "commit_unknown": Problem(
        503, "It is unknown whether the change was made", retryable=True, members=("id",)
    ),
    "unavailable": Problem(503, "The store cannot serve the request now", retryable=True),
    "store_full": Problem(507, "The store has no space left"),
    "not_installed": Problem(501, "The server lacks a package", members=("package", "extra")),
    "internal": Problem(500, "Internal server error"),
}

CODES: dict[type[HoldfastError], str] = {
    errors.VersionConflict: "version_conflict",
    errors.KeyNotFound: "key_not_found",
    errors.SessionNotFound: "session_not_found",
    errors.CheckpointNotFound: "checkpoint_not_found",
    errors.NotFound: "not_found",
    errors.SessionEnded: "session_closed",
    errors.SessionBusy: "session_busy",
    errors.LeaseLost: "lease_lost",
    errors.LeaseHeld: "lease_lost",
    errors.IdempotencyKeyReused: "idempotency_key_reused",
    errors.RequestMismatch: "request_mismatch",
    errors.InProgress: "in_progress",
    errors.Unresolved: "unresolved",
    errors.TypeConflict: "type_mismatch",
    errors.Conflict: "refused",
    errors.SequenceInFuture: "sequence_in_future",
    errors.TooDeep: "invalid_request",
    errors.LimitExceeded: "too_large",
    errors.InvalidArgument: "invalid_request",
    errors.Compacted: "history_compacted",
    errors.Forbidden: "forbidden",
    errors.StoreReadOnly: "read_only",
    errors.CommitUnknown: "commit_unknown",
    errors.StoreFull: "store_full",
    errors.StoreReentered: "internal",
    errors.StoreError: "unavailable",
    errors.MissingPackage: "not_installed",
    errors.HoldfastError: "internal",
}


class Refusal(Exception):
    """A request that the interface itself refuses, before or without the store."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        **members: object,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.headers = dict(headers or {})
        self.members = members


def code_of(error: HoldfastError) -> str:
    """Return the code of an error: its own, or that of the nearest class above it."""
    return next(CODES[each] for each in type(error).__mro__ if each in CODES)


def problem_of(
    error: Exception, place: str, conflict_bytes: int = CONFLICT_BYTES
) -> dict[str, Any]:
    """Return the body of a problem; details that it must not reveal are logged instead."""
    if isinstance(error, Refusal):
        return problem_body(error.code, str(error), error.members)
    if not isinstance(error, HoldfastError):
        return _internal(error, place)
    code = code_of(error)
    if code == "internal":
        return _internal(error, place)
    problem = PROBLEMS[code]
    members = {name: error.fields[name] for name in problem.members if name in error.fields}
    detail = str(error)
    if isinstance(error, errors.VersionConflict):
        members |= conflict_members(error)
        _omit_beyond(conflict_bytes, members)
    elif isinstance(error, errors.InvalidValue | errors.TooDeep):
        members["pointer"] = error.fields.get("path")
    elif isinstance(error, StoreError) and problem.status >= 500:
        # The message may name a file or a host.
        detail = problem.title
        log.warning("%s: %s", place, error)
    return problem_body(code, detail, members)


def conflict_members(error: errors.VersionConflict) -> dict[str, Any]:
    """Return the members that a version conflict adds to the body of its problem."""
    given = error.fields
    told: dict[str, Any] = {"your_version": given.get("expected_version")}
    if given.get("deleted_version"):
        told |= {"current_version": given["deleted_version"], "deleted": True}
    if given.get("updated_at") is not None:
        told["updated_at"] = iso(given["updated_at"])  # type: ignore[arg-type]
    if "key" in given and given["key"] is None:
        told["current_state"] = given.get("current_value")
    if results := given.get("results"):
        told |= {"applied": False, "results": [_result(each) for each in results]}  # type: ignore[attr-defined]
    return told


def _omit_beyond(most: int, members: dict[str, Any]) -> None:
    """Leave out current values that together have more than so many bytes, and say so."""
    left, is_shown = most, dict[Any, bool]()
    for place in (members, *members.get("results", ())):
        found = [name for name in CURRENT if name in place]
        if not found:
            continue
        # The first conflict of a batch is also among the results.
        if (key := place.get("key")) not in is_shown:
            size = len(msgspec.json.encode(place[found[0]]))
            is_shown[key] = size <= left
            left -= size if is_shown[key] else 0
        if not is_shown[key]:
            place.update(dict.fromkeys(found) | {f"{name}_omitted": True for name in found})


def _result(given: Mapping[str, Any]) -> dict[str, Any]:
    told = dict(given)
    if "expected_version" in told:
        told["your_version"] = told.pop("expected_version")
    return told


def _internal(error: Exception, place: str) -> dict[str, Any]:
    body = problem_body("internal")
    log.error("request %s: %s", body["request_id"], place, exc_info=error)
    return body


def problem_body(
    code: str, detail: str | None = None, members: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return the body of a problem, with a new request id."""
    problem = PROBLEMS[code]
    return {
        "type": type_of(code),
        "title": problem.title,
        "status": problem.status,
        **({} if detail is None else {"detail": detail}),
        "error": code,
        "retryable": problem.retryable,
        "request_id": secrets.token_hex(8),
        **(members or {}),
    }


def type_of(code: str) -> str:
    """Return the URI that names a kind of problem."""
    return f"urn:holdfast:problem:{code.replace('_', '-')}"
