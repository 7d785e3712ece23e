"""The small records that every noun shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from .dataclass import dataclass
from .wire import travels

if TYPE_CHECKING:
    from typing import Self


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One committed change in a session tree's feed."""

    root_id: str
    position: int
    session_id: str
    kind: str
    data: Any
    created_at: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedEvent(Event):
    """An event of any tree, with the cursor to continue `follow_all` after it."""

    _cursor: Callable[[], str] = field(repr=False, compare=False)

    def _to_wire(self) -> tuple[Any, ...]:
        """Return the event and its cursor."""
        return (*(getattr(self, each.name) for each in fields(Event)), self.cursor)

    @classmethod
    def _from_wire(
        cls,
        runtime: object,
        root_id: str,
        position: int,
        session_id: str,
        kind: str,
        data: Any,
        created_at: int,
        cursor: str,
    ) -> FollowedEvent:
        """Return the event with its cursor."""
        return cls(
            root_id=root_id,
            position=position,
            session_id=session_id,
            kind=kind,
            data=data,
            created_at=created_at,
            _cursor=lambda: cursor,
        )

    @property
    def cursor(self) -> str:
        """Pass it to `follow_all(after=…)` to continue after this event."""
        return self._cursor()


@travels
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
        """Return a finding, ok unless the advice for a `problem` or a `warning` is given."""
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


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSize:
    """How large a store's database is, and how much of it new data will use first."""

    bytes: int
    free_bytes: int | None
    """None on PostgreSQL, which does not report it."""


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
EVENT_KINDS = (
    "session_created",
    "session_resumed",
    "session_status_changed",
    "session_forked",
    "session_rewound",
    "session_deleted",
    "session_imported",
    "checkpoint_saved",
    "checkpoint_pinned",
    "checkpoint_unpinned",
    "checkpoint_attested",
    "checkpoints_pruned",
    "effect_issued",
    "effect_completed",
    "effect_failed",
    "effect_unknown",
    "effect_resolved",
    "effect_replayed",
    "effects_pruned",
    "state_changed",
    "state_rule_set",
    "state_rule_deleted",
    "state_compacted",
    "spend_recorded",
    "work_submitted",
    "work_completed",
    "work_failed",
    "work_cancelled",
    "work_cancel_requested",
    "work_requeued",
    "work_parked",
    "work_pruned",
    "peer_asked",
    "peer_progressed",
    "peer_answered",
    "peer_answered_late",
    "pause_ready",
    "artifact_added",
    "peers_pruned",
)


@travels
@dataclass(frozen=True, slots=True)
class Actor:
    """On whose behalf a store is used, for the audit trail; `token_id` if it is a token's."""

    name: str
    token_id: str | None = None


LOCAL = Actor("local")


@dataclass(frozen=True, slots=True)
class SessionRef:
    """The identifiers of a session that every noun uses."""

    id: str
    number: int
    root_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedItem:
    """A work item of a session that has ended, for the noun that submitted it."""

    id: str
    type: str
    session: SessionRef
    status: Literal["completed", "failed", "cancelled"]
    output: bytes | None
    """What a completed one returned, encoded."""
    error: str | None


@travels
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


@travels
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


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint(Checkpoint):
    """A version with its channels; `left_out` counts the items that a window did not load."""

    channels: dict[str, Any]
    left_out: dict[str, int]

    def __getitem__(self, channel: str) -> Any:
        if channel not in self.channels:
            there = ", ".join(self.channels) or "none"
            raise KeyError(
                f"version {self.version} of session {self.session_id} has no channel "
                f"{channel!r}; it has {there}"
            )
        return self.channels[channel]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a session resumes: the iteration to run next, and the checkpoint that says so."""

    iteration: int
    checkpoint: Checkpoint | None


EffectKind = Literal["read", "write", "mutate"]
EffectStatus = Literal["issued", "completed", "failed", "unknown"]
EffectReason = Literal[
    "raised", "not_landed", "abandoned", "given_up", "timed_out", "cancelled", "owner_died",
    "rewound", "verified", "resolved", "not_storable",
]  # fmt: skip
EFFECT_STATUSES: tuple[EffectStatus, ...] = get_args(EffectStatus)


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One row of the ledger: an attempt of an effect, and what is known about it.

    `arguments`, `result` and `error` are stored with secrets redacted. `late` is what an owner
    reported after it had lost its lease. `takeover_at` is when another may take over from an owner
    without heartbeats. `replay_of` is the effect that answered this call, which was not run.
    `unlinked_at` is when its session was deleted; if the effect was settled, `arguments`, `error`,
    `note` and `decided_by` were deleted too.
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
    is_outside: bool
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


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """The counts of a sweep; with `has_more`, another pass would find more.

    `next_due_ms` is how long until the next delayed item is due, None if there is none.
    """

    requeued: int = 0
    failed: int = 0
    cancelled: int = 0
    parked: int = 0
    promoted: int = 0
    timed_out: int = 0
    has_more: bool = False
    next_due_ms: int | None = None

    def __add__(self, other: Swept) -> Swept:
        counts = ("requeued", "failed", "cancelled", "parked", "promoted", "timed_out")
        due = [swept.next_due_ms for swept in (self, other) if swept.next_due_ms is not None]
        return Swept(
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
            has_more=self.has_more or other.has_more,
            next_due_ms=min(due, default=None),
        )


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune removed; sessions with damaged records, which it skipped, are in `damaged`."""

    sessions: int = 0
    checkpoints: int = 0
    archived: int = 0
    lines: int = 0
    writers: int = 0
    items: int = 0
    effects: int = 0
    events: int = 0
    """Events of ended trees."""
    state_changes: int = 0
    """History of shared state of ended trees."""
    others: Counter[str] = field(default_factory=Counter)
    """Rows of other nouns, by name."""
    is_vacuumed: bool = False
    damaged: tuple[str, ...] = ()

    def __add__(self, other: Pruned) -> Pruned:
        names = (each.name for each in fields(self))
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Pruned(**{**sums, "is_vacuumed": self.is_vacuumed or other.is_vacuumed})


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """The counts of an export or an import."""

    sessions: int = 0
    checkpoints: int = 0
    effects: int = 0
    items: int = 0
    spends: int = 0
    entries: int = 0
    """Keys of shared state."""
    others: Counter[str] = field(default_factory=Counter)
    """Rows of other nouns, by name."""

    @classmethod
    def counted(cls, counts: Mapping[str, int], **more: Any) -> Self:
        """Return it with these counts."""
        known = {each.name for each in fields(_Moved)} & counts.keys()
        others = Counter({name: n for name, n in counts.items() if n and name not in known})
        return cls(**{name: counts[name] for name in known}, others=others, **more)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain.pop("others"), **plain}


@dataclass(frozen=True, kw_only=True)
class Exported(_Moved):
    """What an export wrote; `moved` are the roots of the trees that it cancelled here."""

    path: str
    bytes: int
    moved: tuple[str, ...] = ()
    left_behind: Mapping[str, int] = field(default_factory=dict)
    """What belongs to no session, and stays behind if all sessions are exported: `work_items`
    and `once_keys`, if there are any, each counted up to 1,000."""


@dataclass(frozen=True, kw_only=True)
class Imported(_Moved):
    """What an import wrote; `notes` say what could not be imported unchanged."""

    notes: tuple[str, ...]
