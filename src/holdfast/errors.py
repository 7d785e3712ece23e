"""Every error Holdfast raises: one tree, each with its fields, HTTP status and exit code."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

# Terminal controls, direction marks and surrogates; line breaks are kept.
COMMANDING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def escaped(text: str) -> str:
    """Return text with terminal controls escaped."""
    return COMMANDING.sub(lambda found: ascii(found[0])[1:-1], text)


def quoted(text: str) -> str:
    """Return foreign text for a sentence: on one line, with everything invisible escaped."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def described(error: BaseException) -> str:
    """Return the name of an error and what it says. Never raises, as user code may in `__str__`."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class HoldfastError(Exception):
    """Holdfast could not do what was asked."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str | None = None, **fields: object) -> None:
        super().__init__(escaped(message or " ".join((type(self).__doc__ or "").split())))
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def to_dict(self) -> dict[str, object]:
        """Return the error as plain data: its name, its sentence and its fields."""
        return {"error": type(self).__name__, "message": str(self), **self.fields}


class InvalidArgument(HoldfastError, ValueError):
    """An argument is invalid; nothing was written."""

    http_status = 422
    exit_code = 2


class InvalidValue(InvalidArgument):
    """A value is not plain JSON data; `path` names the part that is not. Nothing was written."""

    path: str


class SequenceInFuture(InvalidArgument):
    """The shared state has not reached this sequence; `head_sequence` is the current one."""

    http_status = 400


class LimitExceeded(InvalidArgument):
    """Something exceeds its limit; nothing was written."""

    http_status = 413


class TooDeep(LimitExceeded):
    """A value has more levels than its limit, or contains itself."""

    http_status = 422


class NotFound(HoldfastError, LookupError):
    """There is nothing with this id."""

    http_status = 404
    exit_code = 3


class SessionNotFound(NotFound):
    """There is no session with this id."""


class AskNotFound(NotFound):
    """There is no peer call with this id; its answer was not stored."""


class KeyNotFound(NotFound):
    """There is no such key in the shared state."""


class CheckpointNotFound(NotFound, KeyError):
    """There is no checkpoint with this version: never written, or pruned."""

    def __str__(self) -> str:
        # A KeyError would quote the message.
        return str(self.args[0])


class Conflict(HoldfastError):
    """The state of the store does not allow this; every error of status 409 is a Conflict."""

    http_status = 409
    exit_code = 4


class SessionEnded(Conflict):
    """The session has ended; open it with reopen=True to continue."""


class SessionBusy(Conflict):
    """Another process drives this session; only the driver may write until its lease expires."""


class SessionWaiting(Conflict):
    """The session waits; it can ask or pause again once it has been resumed."""


class Forbidden(HoldfastError):
    """The caller is not allowed to do this."""

    http_status = 403
    exit_code = 6


class VersionConflict(Conflict):
    """Another writer was first; read the current version and try again."""


class TypeConflict(Conflict):
    """The stored value does not have the type that this operation needs; nothing was changed."""

    http_status = 422


class Refused(Conflict):
    """The database refused the change because it violates a constraint."""


class LeaseLost(Conflict):
    """The lease was lost to another holder; stop this attempt. Nothing was written."""


class LeaseHeld(Conflict):
    """Another holder has this lease and it has not expired."""


class RequestMismatch(Conflict):
    """This key or call id was used for another request; nothing was run."""


class IdempotencyKeyReused(RequestMismatch):
    """This idempotency key was used for another request; nothing was run."""

    http_status = 422


class RequestOutOfOrder(Conflict):
    """Requests are numbered per lane, and this is neither the last nor the next of its lane."""


class InProgress(Conflict):
    """Another caller is running this effect; nothing was run here."""


class Unresolved(Conflict):
    """The outcome of this effect is unknown; decide with store.resolve(effect_id, …)."""


class EffectFailed(Conflict):
    """This effect failed before, and identical calls get its failure."""


class NotDone(Conflict):
    """Raised by a tool that is certain that its effect did not happen."""


class WorkFailed(Conflict):
    """Raised by a handler to fail its attempt; `retry` and `delay_seconds` decide what follows."""

    def __init__(
        self,
        message: str | None = None,
        *,
        retry: bool = False,
        delay_seconds: float | None = None,
        **fields: object,
    ) -> None:
        super().__init__(message, retry=retry, delay_seconds=delay_seconds, **fields)


class WorkCancelled(Conflict):
    """This work item was cancelled; its handler should stop."""


class CorruptRecord(HoldfastError):
    """A stored record is damaged: its checksum does not match its bytes."""

    exit_code = 7


class Compacted(HoldfastError):
    """History this old has been removed; `oldest` is where it begins now."""

    http_status = 410
    exit_code = 3


class StoreError(HoldfastError):
    """The store cannot serve the call."""

    http_status = 503
    exit_code = 5


class StoreBusy(StoreError):
    """Other writers held the store for longer than busy_timeout_seconds; nothing was written."""


class StoreUnavailable(StoreError):
    """The database cannot be reached or does not answer; nothing was written."""


class StoreFull(StoreError):
    """The database has no space left; nothing was written. Free some space and try again."""

    http_status = 507


class StoreClosed(StoreError):
    """This store is closed; open it again."""


class StoreReadOnly(StoreError):
    """This store was opened with mode="read"; open it for writing. Nothing was written."""

    http_status = 403
    exit_code = 6


class StoreForked(StoreError):
    """This store was opened by the parent process; open it again in the child."""


class StoreReentered(StoreError):
    """The call came from inside another call of the same store on the same thread."""

    http_status = 500


class StoreMoved(StoreError):
    """The database file was deleted, renamed or replaced while it was open; nothing was written."""


class NotAStore(StoreError):
    """The file or schema exists and is not a Holdfast store; nothing was changed."""

    exit_code = 7


class CorruptStore(StoreError):
    """The database file is damaged; restore a backup."""

    exit_code = 7


class SchemaMismatch(StoreError):
    """The store's format is not the one this version of Holdfast uses."""

    exit_code = 8


class CommitUnknown(StoreError):
    """The database was lost during COMMIT; `store.settle(id)` says whether it was committed."""

    exit_code = 9

    id: str


class MissingPackage(HoldfastError, ImportError):
    """A package that this needs is not installed; `extra` names the extra that includes it."""

    http_status = 501

    package: str
    extra: str


class OperationNotRun(HoldfastError):
    """An operation was created inside store.run and never yielded from; nothing was written."""

    http_status = 400
    exit_code = 2


class UnknownBlock(InvalidValue):
    """A transcript contains a kind of block that this version of Holdfast does not know."""


class BudgetExceeded(HoldfastError):
    """The next model call could cost more than the budget has left; it was not made."""

    http_status = 402
    exit_code = 4


class LoopDetected(Conflict):
    """The model repeated the same call after it was warned; the agent stopped."""


class ApprovalNeeded(Conflict):
    """A tool call waits for a person's decision; it was not made."""


class ModelFailed(HoldfastError):
    """The model did not answer, even after retries; every attempt is recorded in spend."""

    http_status = 502
    exit_code = 5


class CheckpointInvalid(Conflict):
    """This checkpoint of a world cannot be restored any more; reach its state by replay."""


class CheckpointError(HoldfastError):
    """A system of a world could not make its checkpoint; no checkpoint was created."""

    system: str


class RollbackError(HoldfastError):
    """A system of a world could not be rolled back; `outcomes` has the state of each."""

    outcomes: dict[str, str]
    is_consistent: bool


class SystemBusy(Conflict):
    """A system of a world is being used by somebody else right now; try again."""


class WorldInconsistent(Conflict):
    """The systems of this world are at different checkpoints; only a rollback is possible now."""


class ReplayFailed(Conflict):
    """Repeating the recorded actions did not lead to the same state, or is not allowed."""


class ExplorationAborted(HoldfastError):
    """An exploration could restore neither the state it wanted nor the one it was in."""
