"""The record of a work item, and its submission."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal, get_args

from ..arguments import (
    milliseconds_of,
    require_new_id,
    require_one_of,
    require_seconds,
    require_text,
    require_whole,
)
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import InvalidArgument, described
from ..kernel.operation import C, Handle, Row, Runtime
from ..leases import Guard
from ..sessions.access import Place
from ..wire import travels

WorkStatus = Literal["pending", "in_progress", "completed", "failed", "cancelled"]
OnCrash = Literal["retry", "fail", "review"]
WORK_STATUSES: tuple[WorkStatus, ...] = get_args(WorkStatus)
ON_CRASH: tuple[OnCrash, ...] = get_args(OnCrash)
# The states in the table, and the public status of each.
STATUS_OF: dict[str, WorkStatus] = {
    "scheduled": "pending",
    "review": "pending",
    **{status: status for status in WORK_STATUSES},
}
FINAL = frozenset({"completed", "failed", "cancelled"})

LEASE_SECONDS = 300
PRIORITY_MAX = 2**31 - 1
RETRIES_MAX = 1_000
DELAY_SECONDS_MAX = 10 * 366 * 24 * 3600
ERROR_CHARACTERS_MAX = 10_000

ITEM_COLUMNS = """
    number, id, session_number, session_id, root_id, type, queue, state, priority, key,
    on_crash, holder, last_holder, fence, driving_fence, waits_for_effect, lease_acquired_at,
    lease_expires_at, heartbeat_at, cancel_requested, retry_count, max_retries, attempts, failures,
    rescues, releases, redriven_from, first_id, input, output, error, progress, available_at,
    created_at, started_at, completed_at, updated_at"""
COLUMNS = tuple(ITEM_COLUMNS.replace("\n", " ").replace(" ", "").split(","))
PARTS = ("input", "output", "error", "progress")
"""The columns that hold sealed values."""
SELECT_ITEMS = f"SELECT {ITEM_COLUMNS} FROM hf_work"  # noqa: S608
READ_ITEM = f"{SELECT_ITEMS} WHERE id = :id"
LOCK_HELD = """
SELECT fence FROM hf_work WHERE number = :number AND fence = :fence AND state = 'in_progress'
/*pg FOR NO KEY UPDATE */
"""


@travels
@dataclass(frozen=True, slots=True)
class Submission:
    """A work item to submit, together with others or as a follow-up of a completed one.

    `session` is a session or its id; for a follow-up, None means the item's session.
    `available_at` is a datetime with a time zone, or milliseconds; `delay_seconds` counts from the
    database's current time. An `id` of your own must be unique.
    """

    type: str
    input: Any = None
    session: Any = None
    queue: str | None = None
    priority: int = 0
    max_retries: int = 3
    available_at: datetime | int | None = None
    delay_seconds: float | None = None
    key: str | None = None
    on_crash: OnCrash = "retry"
    id: str | None = None

    def check(self) -> None:
        """Raise InvalidArgument if a field is invalid."""
        require_text("type", self.type)
        for label, text in (("queue", self.queue), ("key", self.key)):
            if text is not None:
                require_text(label, text)
        if self.id is not None:
            require_new_id("id", self.id)
        require_whole("priority", self.priority, -PRIORITY_MAX, PRIORITY_MAX)
        require_whole("max_retries", self.max_retries, 0, RETRIES_MAX)
        if self.available_at is not None:
            milliseconds_of("available_at", self.available_at)
        if self.delay_seconds is not None:
            require_delay("delay_seconds", self.delay_seconds)
            if self.available_at is not None:
                raise InvalidArgument("give available_at or delay_seconds, not both")
        require_one_of("on_crash", self.on_crash, ON_CRASH)


class Item(Handle[C]):
    """A work item as read; the holder's handle is updated by its own writes."""

    number: int
    id: str
    session_id: str | None
    root_id: str | None
    type: str
    queue: str
    priority: int
    key: str | None
    on_crash: OnCrash
    holder: str | None
    last_holder: str | None
    fence: int
    driving_fence: int | None
    waits_for_effect: str | None
    lease_acquired_at: int | None
    lease_expires_at: int | None
    heartbeat_at: int | None
    retry_count: int
    max_retries: int
    attempts: int
    failures: int
    rescues: int
    releases: int
    redriven_from: str | None
    first_id: str | None
    available_at: int
    created_at: int
    started_at: int | None
    completed_at: int | None
    updated_at: int
    cancel_requested: bool
    stored_state: str
    session_number: int | None
    is_held: bool
    lease_seconds: float

    def __init__(self, runtime: Runtime, row: Row, lease_seconds: float | None = None) -> None:
        super().__init__(runtime)
        self.is_held = lease_seconds is not None
        self.lease_seconds = LEASE_SECONDS if lease_seconds is None else lease_seconds
        self._take(row)

    def _take(self, row: Row) -> None:
        """Set the fields from a row; values are decoded on access."""
        fields = dict(row)
        for part in PARTS:
            if part in fields:
                fields[f"_{part}"] = fields.pop(part)
        if "state" in fields:
            fields["stored_state"] = fields.pop("state")
        if "cancel_requested" in fields:
            fields["cancel_requested"] = bool(fields["cancel_requested"])
        self.__dict__.update(fields)

    def _adopt(self, other: Item[Any]) -> None:
        """Become a handle of the same item, under the same lease."""
        names = [*Item.__annotations__, "_input", "_output", "_error", "_progress"]
        mine = {name: other.__dict__[name] for name in names if name in other.__dict__}
        self.__dict__.update(mine)

    def _to_wire(self) -> tuple[Any, ...]:
        """Return what names the item and its lease; to a client, also the row as it is."""
        lease_seconds = self.lease_seconds if self.is_held else None
        row = None if self.runtime.is_remote else readable(self.runtime.codec, self._row())
        return self.id, self.fence, lease_seconds, row

    @classmethod
    def _from_wire(
        cls,
        runtime: Runtime,
        id: str,
        fence: int,
        lease_seconds: float | None,
        row: dict[str, Any] | None,
    ) -> Item[Any]:
        """Return the item; a server reads the rest of it from its own row."""
        return cls(runtime, {"id": id, "fence": fence} if row is None else row, lease_seconds)

    def _take_answer(self, result: Any, row: Any) -> None:
        """Remember the row as a call at a server has left it."""
        self._take(row or {})

    def _row(self) -> Row:
        """Return the row as it was taken."""
        known = {"state": "stored_state"} | {part: f"_{part}" for part in PARTS}
        names = {name: known.get(name, name) for name in COLUMNS}
        return {name: self.__dict__[at] for name, at in names.items() if at in self.__dict__}

    @property
    def status(self) -> WorkStatus:
        """One of pending, in_progress, completed, failed and cancelled."""
        return STATUS_OF[self.stored_state]

    @property
    def waits_for(self) -> Literal["time", "review"] | None:
        """What a pending item waits for before it can be claimed: its time, a review, or None."""
        return {"scheduled": "time", "review": "review"}.get(self.stored_state)  # type: ignore[return-value]

    @property
    def input(self) -> Any:
        """What was submitted."""
        return self._opened("input")

    @property
    def output(self) -> Any:
        """What the item was completed with, or None."""
        return self._opened("output")

    @property
    def error(self) -> str | None:
        """Why the last attempt failed; None while the item runs and once it is completed."""
        return None if (found := self._opened("error")) is None else str(found)

    @property
    def last_progress(self) -> Any:
        """What `progress` recorded last."""
        return self._opened("progress")

    def to_dict(self) -> dict[str, Any]:
        """Return the item as plain data."""
        names = [name for name in Item.__annotations__ if name not in _INTERNAL]
        shown = {name: getattr(self, name) for name in names}
        computed = ("status", "waits_for", "input", "output", "error", "last_progress")
        return shown | {name: getattr(self, name) for name in computed}

    def _opened(self, part: str) -> Any:
        sealed = self.__dict__.get(f"_{part}")
        if sealed is None:
            return None
        return self.runtime.codec.unpack(sealed, context=context(self.id, part))

    def _guard(self) -> Guard:
        """Return the lease that writes for this item require."""
        return Guard("work item", self.id, self.number, self.fence)

    def _place(self, fence: int | None = None, guard: Guard | None = None) -> Place | None:
        """Return the item's session as a place to write to, if it has one."""
        if self.session_id is None or self.session_number is None or self.root_id is None:
            return None
        return Place(self.session_id, self.session_number, self.root_id, fence, guard)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.type} {self.status}>"


_INTERNAL = {"stored_state", "session_number", "is_held", "lease_seconds", "driving_fence"}


def readable(codec: Codec, row: Row) -> Row:
    """Return an item's row with values that any client can open, whatever seals them here."""
    plain = codec.without_cipher()
    opened = {
        part: plain.seal(codec.unseal(row[part], context=where), context=where)
        for part in PARTS
        if row.get(part) is not None
        for where in [context(row["id"], part)]
    }
    return {**row, **opened}


def context(id: str, part: str) -> tuple[str, ...]:
    """Return the context that an encrypted part of an item is bound to."""
    return "hf_work", id, part


def error_text(error: object, redact: Callable[[str], str]) -> str:
    """Return an error as redacted text, cut to size."""
    if isinstance(error, BaseException):
        error = described(error)
    if not isinstance(error, str):
        raise InvalidArgument(f"error must be text or an exception, not {type(error).__name__}")
    # A lone surrogate, from a file name for example, is escaped.
    text = redact(error.encode("utf-8", "backslashreplace").decode())
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[: ERROR_CHARACTERS_MAX - 1] + "…"


def require_delay(label: str, seconds: object) -> int:
    """Return a delay in milliseconds."""
    return require_seconds(label, seconds, DELAY_SECONDS_MAX)
