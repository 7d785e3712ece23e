"""Every error Holdfast raises: one tree, each with its fields, HTTP status and exit code."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

# What commands a terminal, turns the direction of text, or cannot be written as UTF-8. Lines stay.
_COMMANDING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def escaped(text: str) -> str:
    """Return text in which nothing commands a terminal: such characters stand escaped."""
    return _COMMANDING.sub(lambda found: ascii(found[0])[1:-1], text)


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
    """An argument is not usable; nothing was written."""

    http_status = 400
    exit_code = 2


class InvalidValue(InvalidArgument):
    """A value is not plain JSON data; `path` names the offender and nothing was written."""

    path: str


class LimitExceeded(InvalidArgument):
    """Something is larger than its limit allows; nothing was written."""

    http_status = 413


class NotFound(HoldfastError, LookupError):
    """There is nothing with this id."""

    http_status = 404
    exit_code = 3


class SessionNotFound(NotFound):
    """There is no session with this id."""


class CheckpointNotFound(NotFound, KeyError):
    """There is no checkpoint with this version: never written, or pruned."""

    def __str__(self) -> str:
        # A KeyError shows its argument quoted, which reads badly for a sentence.
        return str(self.args[0])


class SessionEnded(HoldfastError):
    """The session has ended; open it with reopen=True to go on."""

    http_status = 409
    exit_code = 4


class SessionBusy(HoldfastError):
    """Another process drives this session; only its driver may write while the lease lives."""

    http_status = 409
    exit_code = 4


class Forbidden(HoldfastError):
    """This caller may not do that."""

    http_status = 403
    exit_code = 6


class VersionConflict(HoldfastError):
    """Another writer came first; read the current version and decide again."""

    http_status = 409
    exit_code = 4


class TypeConflict(HoldfastError):
    """The stored value has another type than this operation needs; nothing was changed."""

    http_status = 409
    exit_code = 4


class Refused(HoldfastError):
    """The database refused the change because it breaks a rule of its schema."""

    http_status = 409
    exit_code = 4


class LeaseLost(HoldfastError):
    """Another holder has this lease now; stop this attempt, nothing was written."""

    http_status = 409
    exit_code = 4


class LeaseHeld(HoldfastError):
    """Another holder has this lease and it has not expired."""

    http_status = 409
    exit_code = 4


class RequestMismatch(HoldfastError):
    """This key or call id belongs to another request; nothing was run."""

    http_status = 409
    exit_code = 4


class InProgress(HoldfastError):
    """Another caller is doing this effect and has not finished; nothing was run here."""

    http_status = 409
    exit_code = 4


class Unresolved(HoldfastError):
    """Nobody can tell whether this effect happened; decide with store.resolve(effect_id, …)."""

    http_status = 409
    exit_code = 4


class EffectFailed(HoldfastError):
    """This effect failed before, and its failure is what an equal call gets."""

    http_status = 409
    exit_code = 4


class NotDone(HoldfastError):
    """A tool raises this to say for certain: nothing happened."""

    http_status = 409
    exit_code = 4


class WorkFailed(HoldfastError):
    """A handler raises this to end its attempt: for good, or with retry=True to be tried again."""

    http_status = 409
    exit_code = 4

    def __init__(
        self,
        message: str | None = None,
        *,
        retry: bool = False,
        delay_seconds: float | None = None,
        **fields: object,
    ) -> None:
        super().__init__(message, retry=retry, delay_seconds=delay_seconds, **fields)


class WorkCancelled(HoldfastError):
    """This work item was cancelled; its handler should stop."""

    http_status = 409
    exit_code = 4


class CorruptRecord(HoldfastError):
    """A stored record is damaged: its checksum does not match its bytes."""

    exit_code = 7


class Compacted(HoldfastError):
    """History this old has been removed; `oldest` is where it begins now."""

    http_status = 410
    exit_code = 3


class StoreError(HoldfastError):
    """The store itself cannot serve the call."""

    http_status = 503
    exit_code = 5


class StoreBusy(StoreError):
    """Other writers held the store for longer than busy_timeout_seconds; nothing was written."""


class StoreUnavailable(StoreError):
    """The database cannot be reached or does not answer; nothing was written."""


class StoreFull(StoreError):
    """The database has no room left; nothing was written. Free some space and try again."""

    http_status = 507


class StoreClosed(StoreError):
    """This store is closed; open it again."""


class StoreReadOnly(StoreError):
    """This store was opened with mode="read"; open it for writing. Nothing was written."""

    http_status = 403
    exit_code = 6


class StoreForked(StoreError):
    """This store was opened by the parent process; open it again after the fork."""


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
    """The database went away during COMMIT; ask `store.settle(id)` whether it was committed."""

    exit_code = 9

    id: str


class OperationNotRun(HoldfastError):
    """An operation was created inside store.run and never yielded from; nothing was written."""

    http_status = 400
    exit_code = 2


class UnknownBlock(InvalidValue):
    """A transcript holds a kind of block that this version of Holdfast does not know."""


class BudgetExceeded(HoldfastError):
    """The next model call could cost more than the budget has left; it was not made."""

    http_status = 402
    exit_code = 4


class LoopDetected(HoldfastError):
    """The model made the same call again and again, also after it was told; the agent stopped."""

    http_status = 409
    exit_code = 4


class ApprovalNeeded(HoldfastError):
    """A tool call waits for a person's decision; it was not made."""

    http_status = 409
    exit_code = 4


class ModelFailed(HoldfastError):
    """The model gave no answer, also after retries; every attempt is in the ledger of spend."""

    http_status = 502
    exit_code = 5
