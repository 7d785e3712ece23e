"""The public records of peers: calls, answers, pauses, artifacts, and resumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Generic, Literal, get_args

from ..codec import Codec
from ..dataclass import dataclass
from ..kernel.operation import C, Row
from ..leases import Keeper
from ..records import Effect
from ..wire import travels

AnswerStatus = Literal["ok", "error", "timeout", "cancelled"]
AskState = Literal["open", "ok", "error", "timeout", "cancelled"]
PauseReason = Literal["peers", "approval", "time"]
PauseState = Literal["waiting", "ready", "resumed", "closed", "cancelled"]
Receipt = Literal["counted", "duplicate", "late"]
STOPPED = frozenset({"timeout", "cancelled"})
ASK_STATES: tuple[AskState, ...] = get_args(AskState)
PAUSE_REASONS: tuple[PauseReason, ...] = get_args(PauseReason)
PAUSE_STATES: tuple[PauseState, ...] = get_args(PauseState)


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A named output: a version of it, with its data inline or at a URI."""

    name: str
    version: int = 1
    media_type: str = "application/json"
    data: Any = None
    uri: str | None = None
    returned: bool = True
    """Whether it is sent with the answer of the session that added it."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one ask; for `error` and `timeout`, `result` says what happened."""

    ask_id: str
    agent: str
    status: AnswerStatus
    result: Any
    artifacts: tuple[Artifact, ...]
    correlation: Any
    answered_at: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCall:
    """One request to another agent, as it is stored. `late` is an answer that did not count."""

    id: str
    number: int
    session_id: str | None
    root_id: str
    agent: str
    state: AskState
    input: Any
    correlation: Any
    progress: Any
    timeout_seconds: float | None
    deadline_at: int | None
    answer: Answer | None
    late: Answer | None
    created_at: int
    open_effects: tuple[Effect, ...] | None = None
    """The effects without a known outcome of the peer's session, if the call was cancelled or has
    timed out: the peer may have acted. Lists do not read them: there they are None then."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a person decided, who it was, and why."""

    is_approved: bool
    by: str
    note: str | None
    decided_at: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of a session; `wakes_at` is when a sleep ends."""

    id: str
    number: int
    session_id: str
    root_id: str
    generation: int
    agent: str
    reason: PauseReason
    state: PauseState
    need: int | None
    open_asks: int
    ok_asks: int
    wakes_at: int | None
    context: Any
    question: Any
    decision: Decision | None
    created_at: int
    ready_at: int | None
    closed_at: int | None


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """The session waits now: this handle has released it, and its work item is completed."""

    pause_id: str
    session_id: str
    generation: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """There was no need to wait: the answers, in the order of dispatch."""

    pause_id: str
    answers: tuple[Answer, ...]
    artifacts: tuple[Artifact, ...]


class Stoppable:
    """What the handler of a service is given: it tells whether the handler should stop."""

    __slots__ = ()
    session: Any

    def check(self) -> None:
        """Raise WorkCancelled or LeaseLost if the handler should stop. Cheap enough for loops.

        It should if its call was cancelled or has timed out, or if its lease is lost. Not awaited.
        """
        session = self.session
        if (check := getattr(session.item, "check", None)) is not None:
            check()
        Keeper.of(session.runtime).require_known(session.guard)


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest(Stoppable, Generic[C]):
    """A request to an agent: its input, and the session that serves it, driven by its item."""

    session: Any
    ask_id: str
    agent: str
    user: str | None
    input: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    """What the asker's credentials hook sent with the request. It is not stored: it is empty if
    another instance continues the request, and if no transport carried it."""
    store: Any = None
    """The store that the handler of a service runs on; None outside a service."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption(Stoppable, Generic[C]):
    """A session that resumes, driven by its work item: the context it saved, and its answers.

    `answers` are in the order of dispatch. If an earlier attempt has saved a turn since, they are
    already in the session's history, and `is_consumed` is true.
    """

    session: Any
    pause_id: str
    generation: int
    reason: PauseReason
    context: Any
    answers: tuple[Answer, ...]
    artifacts: tuple[Artifact, ...]
    decision: Decision | None
    is_consumed: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    """What the service's own credentials hook returned for resuming this session."""
    store: Any = None
    """The store that the handler of a service runs on; None outside a service."""


def ask_context(id: str, part: str) -> tuple[str, ...]:
    """Return the context that an encrypted part of an ask is bound to."""
    return "hf_asks", id, part


def pause_context(id: str, part: str) -> tuple[str, ...]:
    """Return the context that an encrypted part of a pause is bound to."""
    return "hf_pauses", id, part


def artifact_context(session_id: str, name: str, version: int) -> tuple[str, ...]:
    """Return the context that an artifact's data is bound to."""
    return "hf_artifacts", session_id, name, str(version)


def opened(codec: Codec, sealed: bytes | None, context: tuple[str, ...]) -> Any:
    """Return a sealed part of a row as data; None if there is none."""
    return None if sealed is None else codec.unpack(sealed, context=context)


def pack_answer(
    codec: Codec, id: str, part: str, status: str, result: Any, artifacts: Sequence[Artifact]
) -> bytes:
    """Return an answer as it is stored, in `answer` or in `late`."""
    stored = {
        "status": status,
        "result": result,
        "artifacts": [plain_artifact(each) for each in artifacts],
    }
    return codec.pack(stored, context=ask_context(id, part), name="answer")


def plain_artifact(artifact: Artifact) -> dict[str, Any]:
    """Return an artifact as plain data."""
    names = ("name", "version", "media_type", "data", "uri")
    return {name: getattr(artifact, name) for name in names}


def answer_of(codec: Codec, row: Row, part: str = "answer") -> Answer | None:
    """Return the answer of an ask's row, or the late one."""
    stored = opened(codec, row[part], ask_context(row["id"], part))
    if stored is None:
        return None
    return Answer(
        ask_id=row["id"],
        agent=row["agent"],
        status=stored["status"],
        result=stored["result"],
        artifacts=tuple(Artifact(**each) for each in stored["artifacts"]),
        correlation=opened(codec, row["correlation"], ask_context(row["id"], "correlation")),
        answered_at=row["answered_at"] if part == "answer" else row["late_at"],
    )


def call_of(codec: Codec, row: Row) -> PeerCall:
    """Return an ask's row as a record."""
    names = ("id", "number", "session_id", "root_id", "agent", "state", "deadline_at", "created_at")
    parts = ("input", "correlation", "progress")
    return PeerCall(
        **{name: row[name] for name in names},
        **{part: opened(codec, row[part], ask_context(row["id"], part)) for part in parts},
        timeout_seconds=None if row["timeout_ms"] is None else row["timeout_ms"] / 1000,
        answer=answer_of(codec, row),
        late=answer_of(codec, row, "late"),
        open_effects=None if row["state"] in STOPPED else (),
    )


def decision_of(codec: Codec, row: Row) -> Decision | None:
    """Return what a person decided about a pause."""
    stored = opened(codec, row["decision"], pause_context(row["id"], "decision"))
    return None if stored is None else Decision(**stored, decided_at=row["ready_at"])


def pause_of(codec: Codec, row: Row) -> Pause:
    """Return a pause's row as a record."""
    sealed = {"context", "question", "decision"}
    plain = {name: row[name] for name in Pause.__slots__ if name not in sealed}
    return Pause(
        **plain,
        context=opened(codec, row["context"], pause_context(row["id"], "context")),
        question=opened(codec, row["question"], pause_context(row["id"], "question")),
        decision=decision_of(codec, row),
    )
