"""Peer calls, pauses and artifacts in export files.

After an import, nothing continues by itself: an open call has no deadline, and the work items that
would answer it or resume a session are parked for review, like all imported ones.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..dataclass import dataclass
from ..kernel import portable
from ..kernel.inserts import Insert
from ..kernel.kept import Kept, KeptSet, kept, kept_set
from ..kernel.operation import Op
from ..kernel.owned_rows import OwnedRows, read_each
from .records import AskState, PauseReason, PauseState, artifact_context, ask_context, pause_context

OPEN_PAUSE = frozenset({"waiting", "ready", "resumed"})
ANSWER = portable.Value(dict, "an answer that is not one")
DECISION = portable.Value(dict, "a decision that is not one")


class PauseRecord(portable.Record, frozen=True, kw_only=True, tag="pause"):
    """A pause of a session; its number is local to the file."""

    sealed = portable.Sealed(
        lambda row, name: pause_context(row["id"], name),
        context=portable.ANY,
        question=portable.ANY,
        decision=DECISION,
    )
    counted = "pauses"

    number: portable.Positive
    id: portable.Name
    session_number: portable.Positive
    session_id: portable.Name
    root_id: portable.Name
    generation: portable.Positive
    agent: portable.Name
    reason: PauseReason
    state: PauseState
    need: portable.Positive | None = None
    keeps_rest: portable.Flag
    open_asks: portable.Count
    ok_asks: portable.Count
    wakes_at: portable.Time | None = None
    context: bytes
    question: bytes | None = None
    decision: bytes | None = None
    created_at: portable.Time
    ready_at: portable.Time | None = None
    closed_at: portable.Time | None = None

    def problem(self, seen: portable.Seen) -> str | None:
        """Check its session, its generation and its state."""
        peers = seen.of(_Peers)
        if not seen.is_placed(self) or not seen.is_new(self):
            return f"{self.label} comes twice, or without its session"
        if not peers.generations.add((self.session_id, self.generation)):
            return f"{self.label} has the same generation as another"
        peers.pauses[self.number] = self.session_id
        if (self.state in OPEN_PAUSE) == (self.closed_at is not None):
            return f"{self.label} has an end that does not fit its state"
        if self.state in OPEN_PAUSE and not peers.waiting.add(self.session_id):
            return f"{self.label} is one of two open pauses of its session"
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the pause, and note its new number."""
        number = yield from into.number(self.session_number)
        row = self.row(into.codec, session_number=number)
        numbers = into.of(_Numbers).pauses
        into.insert(
            ADD_PAUSE,
            row,
            f"{self.label} is here already",
            lambda added: numbers.update({self.number: added[0]["number"]}),
        )


class AskRecord(portable.Record, frozen=True, kw_only=True, tag="ask"):
    """A peer call; the pause that collects it precedes it in the file."""

    sealed = portable.Sealed(
        lambda row, name: ask_context(row["id"], name),
        input=portable.ANY,
        correlation=portable.ANY,
        progress=portable.ANY,
        answer=ANSWER,
        late=ANSWER,
    )
    counted = "asks"

    id: portable.Name
    session_number: portable.Positive | None = None
    session_id: portable.Name | None = None
    root_id: portable.Name
    agent: portable.Name
    state: AskState
    pause_number: portable.Positive | None = None
    asked_version: portable.Count = 0
    is_abandoned: portable.Flag = 0
    timeout_ms: portable.Count | None = None
    deadline_at: portable.Time | None = None
    input: bytes
    correlation: bytes
    progress: bytes | None = None
    answer: bytes | None = None
    late: bytes | None = None
    created_at: portable.Time
    answered_at: portable.Time | None = None
    late_at: portable.Time | None = None
    closed_at: portable.Time | None = None

    def problem(self, seen: portable.Seen) -> str | None:
        """Check its session, its pause and its answer."""
        peers, is_open = seen.of(_Peers), self.state == "open"
        is_placed = seen.is_placed(self)
        if self.session_number is None:
            # The caller is not a session: the call started the tree of its own id. With another
            # id, a later request would be taken for a repetition, and get its answer.
            is_placed = self.session_id is None and self.id == self.root_id in seen.trees
        if not is_placed or not seen.is_new(self):
            return f"{self.label} comes twice, or without its session"
        if is_open != (self.answer is None) or is_open != (self.answered_at is None):
            return f"{self.label} has an answer that does not fit its state"
        if is_open and self.closed_at is not None:
            return f"{self.label} is closed without an answer"
        if (self.late is None) != (self.late_at is None):
            return f"{self.label} has a late answer without its time"
        if self.pause_number is not None and (
            peers.pauses.get(self.pause_number) != self.session_id
        ):
            return f"{self.label} names a pause that its session does not have"
        return self._answer_problem(seen)

    def _answer_problem(self, seen: portable.Seen) -> str | None:
        for name in ("answer", "late"):
            body = getattr(self, name)
            if body is None:
                continue
            try:
                stored = msgspec.convert(seen.codec.decode(body), _StoredAnswer)
            except msgspec.ValidationError as error:
                return f"{self.label} has an answer that cannot be read: {error}"
            if name == "answer" and stored.status != self.state:
                return f"{self.label} has an answer that does not fit its state"
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the call, without a deadline."""
        changes: dict[str, Any] = {"deadline_at": None}
        if self.session_number is not None:
            changes["session_number"] = yield from into.number(self.session_number)
        if self.pause_number is not None:
            numbers = into.of(_Numbers).pauses
            if self.pause_number not in numbers:
                yield from into.flush()
            changes["pause_number"] = numbers[self.pause_number]
        into.insert(ADD_ASK, self.row(into.codec, **changes), f"{self.label} is here already")


class ArtifactRecord(portable.Record, frozen=True, kw_only=True, tag="artifact"):
    """A version of a session's artifact."""

    sealed = portable.Sealed(
        lambda row, name: artifact_context(row["session_id"], row["name"], row["version"]),
        data=portable.ANY,
    )
    counted = "artifacts"

    session_number: portable.Positive
    session_id: portable.Name
    name: portable.Name
    version: portable.Version
    media_type: portable.Name
    uri: portable.Text | None = None
    data: bytes | None = None
    is_returned: portable.Flag
    made_version: portable.Count = 0
    is_abandoned: portable.Flag = 0
    created_at: portable.Time

    @property
    def label(self) -> str:
        """Name the artifact."""
        return f"artifact {self.name!r} of session {self.session_id!r}"

    def problem(self, seen: portable.Seen) -> str | None:
        """Check its session, and that it has data or a URI."""
        peers, session = seen.of(_Peers), seen.sessions.get(self.session_number)
        key = (self.session_id, self.name, self.version)
        is_placed = session is not None and session.id == self.session_id
        if not is_placed or not peers.artifacts.add(key):
            return f"{self.label} comes twice, or without its session"
        if (self.uri is None) == (self.data is None):
            return f"{self.label} has data and a URI, or neither"
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the artifact."""
        number = yield from into.number(self.session_number)
        into.insert(ADD_ARTIFACT, self.row(into.codec, session_number=number))


class _StoredArtifact(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    version: int
    media_type: str
    data: Any
    uri: str | None


class _StoredAnswer(msgspec.Struct, forbid_unknown_fields=True):
    status: str
    result: Any
    artifacts: list[_StoredArtifact]


@dataclass(slots=True)
class _Peers:
    """The pauses and calls seen so far in a group of trees."""

    generations: KeptSet[tuple[str, int]] = kept_set()
    pauses: Kept[int, str] = kept(str)
    waiting: KeptSet[str] = kept_set()
    artifacts: KeptSet[tuple[str, str, int]] = kept_set()


@dataclass(slots=True)
class _Numbers:
    """The new numbers of pauses."""

    pauses: Kept[int, int] = kept(int)


PAUSES = OwnedRows(
    PauseRecord.selected(), "hf_pauses", "session_number = {owner}", {"generation": 0}
)
ASKS = OwnedRows(
    f"number, {AskRecord.selected()}", "hf_asks", "session_number = {owner}", {"number": 0}
)
REQUESTS = OwnedRows(
    f"number, {AskRecord.selected()}",
    "hf_asks",
    "id = {owner} AND session_number IS NULL",
    {"number": 0},
    owner="TEXT",
)
ARTIFACTS = OwnedRows(
    f"number, {ArtifactRecord.selected()}",
    "hf_artifacts",
    "session_number = {owner}",
    {"number": 0},
)
TAKEN = "ON CONFLICT DO NOTHING RETURNING id"
ADD_PAUSE = Insert(
    "hf_pauses",
    PauseRecord.columns(without=["number"]),
    "ON CONFLICT DO NOTHING RETURNING id, number",
    key="id",
)
ADD_ASK = Insert("hf_asks", AskRecord.columns(), TAKEN, key="id")
ADD_ARTIFACT = Insert("hf_artifacts", ArtifactRecord.columns())


class PeersPortable(portable.Portable):
    """Pauses, calls and artifacts are exported with their sessions."""

    records = (PauseRecord, AskRecord, ArtifactRecord)

    def export(self, out: portable.Export) -> Op[None]:
        """Write the pauses of sessions, their calls, calls that started a tree, and artifacts."""
        yield from read_each(PAUSES, out.sessions, PauseRecord.to(out))
        yield from read_each(ASKS, out.sessions, AskRecord.to(out))
        yield from read_each(REQUESTS, out.root_ids, AskRecord.to(out))
        yield from read_each(ARTIFACTS, out.sessions, ArtifactRecord.to(out))
