"""Explorations in export files: the settings, the states, and the log of actions.

Checkpoints and unfinished rollbacks are left out: they belong to systems outside this store.
"""

from __future__ import annotations

from ..dataclass import dataclass
from ..kernel import portable
from ..kernel.inserts import Insert
from ..kernel.kept import KeptSet, kept_set
from ..kernel.operation import Op, Row
from ..kernel.owned_rows import OwnedRows, read_each
from ..kernel.portable import Export, Import, Portable, Record, Sealed, Seen
from .rows import context


class _OfSession(Record, frozen=True):
    """A record that follows its session."""

    def known(self, seen: Seen, session_number: int, session_id: str) -> bool:
        """Whether its session precedes it."""
        session = seen.sessions.get(session_number)
        return session is not None and session.id == session_id


class WorldRecord(_OfSession, frozen=True, tag="world"):
    """The settings and totals of an exploration."""

    sealed = Sealed(lambda row, name: context(row["session_id"], name), settings=None)

    session_number: portable.Positive
    session_id: portable.Name
    settings: bytes | None
    states: portable.Count = 0
    steps: portable.Count = 0
    violations: portable.Count = 0

    def problem(self, seen: Seen) -> str | None:
        """Check that its session precedes it, and that it comes once."""
        worlds = seen.of(_Worlds).sessions
        if not self.known(seen, *self._session) or not worlds.add(self.session_number):
            return f"the world of session {self.session_id!r} comes twice, or without its session"
        return None

    def add(self, into: Import) -> Op[None]:
        """Add it."""
        number = yield from into.number(self.session_number)
        into.insert(ADD_WORLD, self.row(into.codec, session_number=number))

    @property
    def _session(self) -> tuple[int, str]:
        return self.session_number, self.session_id


class WorldStateRecord(_OfSession, frozen=True, tag="world_state"):
    """A state that an exploration has seen."""

    sealed = Sealed(lambda row, name: context(row["session_id"], row["id"]), body=None)
    counted = "states"

    session_number: portable.Positive
    session_id: portable.Name
    id: portable.Name
    body: bytes

    def problem(self, seen: Seen) -> str | None:
        """Check that its world precedes it, and that it comes once."""
        worlds, key = seen.of(_Worlds), (self.session_number, self.id)
        is_placed = self.known(seen, self.session_number, self.session_id)
        is_placed = is_placed and self.session_number in worlds.sessions
        if not is_placed or not worlds.states.add(key):
            return f"{self.label} comes twice, or without its world"
        return None

    def add(self, into: Import) -> Op[None]:
        """Add it, in the order of the file."""
        number = yield from into.number(self.session_number)
        into.insert(ADD_STATE, self.row(into.codec, session_number=number))


class WorldStepRecord(_OfSession, frozen=True, tag="world_step"):
    """Something that was tried in a state, and where it led."""

    sealed = Sealed(
        lambda row, name: context(row["session_id"], f"{row['from_id']} {row['candidate']}"),
        body=None,
    )
    counted = "steps"

    session_number: portable.Positive
    session_id: portable.Name
    from_id: portable.Name
    candidate: portable.Count
    to_id: portable.Name | None
    body: bytes
    has_findings: portable.Flag = 0

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"step {self.candidate} from state {self.from_id!r}"

    def problem(self, seen: Seen) -> str | None:
        """Check that its states precede it, and that it comes once."""
        worlds, key = seen.of(_Worlds), (self.session_number, self.from_id, self.candidate)
        ends = {(self.session_number, id) for id in (self.from_id, self.to_id) if id is not None}
        is_placed = self.known(seen, self.session_number, self.session_id)
        is_placed = is_placed and all(end in worlds.states for end in ends)
        if not is_placed or not worlds.steps.add(key):
            return f"{self.label} comes twice, or without its states"
        return None

    def add(self, into: Import) -> Op[None]:
        """Add it, in the order of the file."""
        number = yield from into.number(self.session_number)
        into.insert(ADD_STEP, self.row(into.codec, session_number=number))


@dataclass(slots=True)
class _Worlds:
    sessions: KeptSet[int] = kept_set()
    states: KeptSet[tuple[int, str]] = kept_set()
    steps: KeptSet[tuple[int, str, int]] = kept_set()


WORLDS = OwnedRows(
    "session_number, settings, states, steps, violations",
    "hf_worlds",
    "session_number = {owner}",
    {"session_number": 0},
)
STATES = OwnedRows(
    "number, session_number, id, body", "hf_world_states", "session_number = {owner}", {"number": 0}
)
STEPS = OwnedRows(
    "number, session_number, from_id, candidate, to_id, has_findings, body",
    "hf_world_steps",
    "session_number = {owner}",
    {"number": 0},
)
NOT_STORED = ("session_id",)
ADD_WORLD = Insert("hf_worlds", WorldRecord.columns(without=NOT_STORED))
ADD_STATE = Insert("hf_world_states", WorldStateRecord.columns(without=NOT_STORED))
ADD_STEP = Insert("hf_world_steps", WorldStepRecord.columns(without=NOT_STORED))


class ExplorationsPortable(Portable):
    """Explorations are exported with the session that they belong to."""

    records = (WorldRecord, WorldStateRecord, WorldStepRecord)

    def export(self, out: Export) -> Op[None]:
        """Write the explorations of the trees."""
        for owned, record in (
            (WORLDS, WorldRecord),
            (STATES, WorldStateRecord),
            (STEPS, WorldStepRecord),
        ):

            def write(row: Row, record: type[Record] = record) -> None:
                named = {**row, "session_id": out.sessions[row["session_number"]]}
                out.write(record.of(out.codec, named))

            yield from read_each(owned, out.sessions, write)
