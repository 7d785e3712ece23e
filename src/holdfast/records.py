"""The small records that every noun shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One committed change in a session tree's feed."""

    root_id: str
    position: int
    session_id: str
    kind: str
    data: Any
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedEvent(Event):
    """An event of any tree, and where `follow_all` goes on after it."""

    _cursor: Callable[[], str] = field(repr=False, compare=False)

    @property
    def cursor(self) -> str:
        """What to begin with to get what comes after this event."""
        return self._cursor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A time-limited right to write a row, and its fence: a number that only grows."""

    id: str
    holder: str
    fence: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of a store; `advice` says what to do when it is not ok."""

    check: str
    level: Literal["ok", "warning", "problem"]
    message: str
    advice: str = ""

    @classmethod
    def of(cls, check: str, message: str, *, problem: str = "", warning: str = "") -> Self:
        """Return a finding; what to do about a `problem` or a `warning`, if it is one."""
        level: Literal["ok", "warning", "problem"] = "warning" if warning else "ok"
        return cls(check, "problem" if problem else level, message, problem or warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationState:
    """One migration of a store; `applied_at` is None while it is pending."""

    version: int
    name: str
    applied_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """A store: where it is, its id and its format."""

    where: str
    dialect: str
    store_id: str
    format: int
    newest: int
    migrations: tuple[MigrationState, ...]


Status = Literal["active", "waiting", "completed", "failed", "cancelled", "cancelling", "deleting"]
Kind = Literal[
    "turn",
    "iteration_start",
    "iteration_end",
    "tool_executed",
    "llm_response",
    "approval_point",
    "state_transition",
    "manual_checkpoint",
    "error_boundary",
]
Activity = Literal[
    "running", "idle", "waiting", "completed", "failed", "cancelled", "cancelling", "deleting"
]
STATUSES: tuple[Status, ...] = get_args(Status)
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class SessionRef:
    """What names a session in every noun."""

    id: str
    number: int
    root_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session as it is stored, without its channels."""

    id: str
    number: int
    name: str | None
    parent_id: str | None
    root_id: str
    agent: str | None
    user: str | None
    status: Status
    version: int
    epoch: int
    metadata: dict[str, Any]
    origin_version: int | None
    holder: str | None
    lease_expires_at: int | None
    is_driven: bool
    created_at: int
    updated_at: int
    last_resumed_at: int

    @property
    def activity(self) -> Activity:
        """The status; an active session is running while its lease is alive, else idle."""
        if self.status == "active":
            return "running" if self.is_driven else "idle"
        return self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One version of a session, without its channels."""

    session_id: str
    version: int
    epoch: int
    kind: Kind
    data: Any
    metadata: dict[str, Any] | None
    item_id: str | None
    idempotency_key: str | None
    state_sequence: int
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint(Checkpoint):
    """A version with its channels; `left_out` counts the items that a window did not load."""

    channels: dict[str, Any]
    left_out: dict[str, int]

    def __getitem__(self, channel: str) -> Any:
        return self.channels[channel]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a session resumes: the iteration to run next, and the record that says so."""

    iteration: int
    checkpoint: Checkpoint | None


EffectKind = Literal["read", "write", "mutate"]
EffectStatus = Literal["issued", "completed", "failed", "unknown"]
EffectReason = Literal[
    "raised", "not_landed", "abandoned", "given_up", "timed_out", "cancelled", "owner_died",
    "rewound", "verified", "resolved", "not_storable",
]  # fmt: skip
EFFECT_STATUSES: tuple[EffectStatus, ...] = get_args(EffectStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One row of the ledger: an attempt of an effect, and what is known of it.

    `arguments`, `result` and `error` are stored without the secrets that they held. `late` is
    what an owner reported after it had lost its lease. `takeover_at` is when another may take
    over from an owner that sends no heartbeats. `replay_of` is the effect that answered this call,
    which was not run; `unlinked_at` is when its session was deleted, and with it, if the effect was
    settled, `arguments`, `error`, `note` and `decided_by`.
    """

    id: str
    number: int
    session_id: str | None
    item_id: str | None
    tool: str
    effect: EffectKind
    call_id: str | None
    key: str
    idempotency_key: str
    status: EffectStatus
    reason: str | None
    arguments: Any
    result: Any
    error: str | None
    attempt: int
    holder: str | None
    fence: int
    issued_version: int
    is_irreversible: bool
    replay_of: str | None
    undoes: str | None
    undone_by: str | None
    decided_by: str | None
    note: str | None
    late: Any
    issued_at: int
    ended_at: int | None
    lease_expires_at: int | None
    takeover_at: int | None
    expires_at: int | None
    unlinked_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep did; with `has_more`, another pass would find more.

    `next_due_ms` is how long until the next delayed item is due, None if there is none.
    """

    requeued: int = 0
    failed: int = 0
    cancelled: int = 0
    parked: int = 0
    promoted: int = 0
    has_more: bool = False
    next_due_ms: int | None = None

    def __add__(self, other: Swept) -> Swept:
        counts = ("requeued", "failed", "cancelled", "parked", "promoted")
        due = [swept.next_due_ms for swept in (self, other) if swept.next_due_ms is not None]
        return Swept(
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
            has_more=self.has_more or other.has_more,
            next_due_ms=min(due, default=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune removed, and the sessions it left alone because a record of them is damaged."""

    sessions: int = 0
    checkpoints: int = 0
    archived: int = 0
    lines: int = 0
    writers: int = 0
    items: int = 0
    effects: int = 0
    events: int = 0
    """Of the feeds of ended trees."""
    state_changes: int = 0
    """Of the histories of shared state of ended trees."""
    others: Counter[str] = field(default_factory=Counter)
    """What nouns beside these removed, by their names."""
    is_vacuumed: bool = False
    damaged: tuple[str, ...] = ()

    def __add__(self, other: Pruned) -> Pruned:
        names = (each.name for each in fields(self))
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Pruned(**{**sums, "is_vacuumed": self.is_vacuumed or other.is_vacuumed})


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """How much an export or an import wrote."""

    sessions: int = 0
    checkpoints: int = 0
    effects: int = 0
    items: int = 0
    spends: int = 0
    entries: int = 0
    """Keys of shared state."""
    others: Counter[str] = field(default_factory=Counter)
    """What nouns beside these wrote, by their names."""

    @classmethod
    def counted(cls, counts: Mapping[str, int], **more: Any) -> Self:
        """Return it with the counts of all nouns."""
        known = {each.name for each in fields(_Moved)} & counts.keys()
        others = Counter({name: counts[name] for name in counts.keys() - known})
        return cls(**{name: counts[name] for name in known}, others=others, **more)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain.pop("others"), **plain}


@dataclass(frozen=True, kw_only=True)
class Exported(_Moved):
    """What an export wrote; `moved` are the roots of the trees that were cancelled here."""

    path: str
    bytes: int
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Imported(_Moved):
    """What an import wrote; `notes` say what could not be taken over as it was."""

    notes: tuple[str, ...]
