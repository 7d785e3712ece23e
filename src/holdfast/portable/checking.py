"""Looking at everything a source yields before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from msgspec import Raw

from ..arguments import require_text
from ..checkpoints import manifest as manifests
from ..checkpoints.lines import RUN_BYTES_MAX, RUN_ITEMS, SHIFT, Ref
from ..checkpoints.ops import require_channel
from ..codec import Codec
from ..effects.identity import ITEM, UNDO, scope_of
from ..errors import CorruptRecord, InvalidArgument
from ..plain import too_large
from ..work.items import FINAL, RETRIES_MAX, STATES
from .building import ITERATIONS
from .frames import (
    EFFECT_PARTS,
    FIELDS_BYTES_MAX,
    ITEM_PARTS,
    AttemptFrame,
    AttestationFrame,
    CheckpointFrame,
    EffectFrame,
    EventFrame,
    Frame,
    ItemFrame,
    ItemsFrame,
    KeyFrame,
    LineFrame,
    PinFrame,
    SaltFrame,
    SessionFrame,
    Source,
    SpendFrame,
    TreeFrame,
)

SALTS_MAX = 64
SPENT_MAX = 2**62
ITEM_STATES = {state for states in STATES.values() for state in states}


def check(
    codec: Codec, source: Source, *, takes_store_keys: bool = False
) -> tuple[list[str], set[str]]:
    """Return the ids of a source's sessions, and of those that are gone but paid for something.

    CorruptRecord: it is not in order.

    LimitExceeded: it has a value that this store would not take. InvalidArgument: it has effects or
    items that count beyond its own sessions, and may not.
    """
    checker = _Checker(codec)
    for frame in source.frames():
        try:
            problem = _unprintable(frame) or checker.problem(frame)
        except (CorruptRecord, AttributeError, TypeError) as error:
            problem = str(error)
        if problem:
            raise _disorder(source, problem)
    if problem := checker.problem_at_end():
        raise _disorder(source, problem)
    if checker.beyond and not takes_store_keys:
        raise InvalidArgument(
            f"{source.label} has {checker.beyond}, which counts beyond the sessions that are in "
            "it; nothing was imported. If you trust where it comes from, import it with "
            "store_keys=True (--store-keys)"
        )
    return list(checker.sessions), checker.gone - checker.sessions.keys()


def _disorder(source: Source, problem: str) -> CorruptRecord:
    return CorruptRecord(f"the sessions of {source.label} are not in order: {problem}")


def _unprintable(frame: Frame) -> str | None:
    for name in frame.__struct_fields__:
        text = getattr(frame, name)
        if type(text) is str and not text.isprintable():
            return f"{name} {text!r} has characters that cannot be printed"
    return None


@dataclass(slots=True)
class _Line:
    base: int
    end_needed: int
    pieces: frozenset[int]
    end: int = 0


@dataclass(frozen=True, slots=True)
class _Session:
    root_id: str
    version: int


@dataclass(slots=True)
class _Checker:
    """What was seen so far. A frame may only name what came before it."""

    codec: Codec
    sessions: dict[str, _Session] = field(default_factory=dict)
    beyond: str = ""
    """What counts beyond the sessions that are here, the first of it."""
    gone: set[str] = field(default_factory=set)
    """Sessions that were deleted and had paid for something."""
    _trees: set[str] = field(default_factory=set)
    _lines: dict[int, _Line] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)
    _tree: TreeFrame | None = None
    _position: int = 0
    _line: _Line | None = None
    _session: SessionFrame | None = None
    _version: int = 0
    _effects: set[str] = field(default_factory=set)
    _named: set[str] = field(default_factory=set)
    """Effects that others say they undo, or were undone by."""
    _numbers: dict[int | None, str | None] = field(default_factory=lambda: {None: None})
    _owners: dict[str, str] = field(default_factory=dict)
    """The sessions that effects are of, which may come later, each with one of its effects."""
    _items: dict[str, int] = field(default_factory=dict)
    """Work items, each with the number of its attempts."""
    _attempts: set[tuple[str, int]] = field(default_factory=set)
    _pinned: int = 0
    _keys: set[tuple[str, str]] = field(default_factory=set)
    _spends: set[str] = field(default_factory=set)
    _spent: int = 0
    _salts: set[str] = field(default_factory=set)

    def problem(self, frame: Frame) -> str | None:
        """Return what is wrong with a frame, or None."""
        return _CHECKS[type(frame)](self, frame)

    def problem_at_end(self) -> str | None:
        """Return what is missing now that everything was seen."""
        if missing := self._named - self._effects:
            return f"effect {min(missing)!r} is named and does not exist"
        if unused := self._lines.keys() - self._used:
            return f"line {min(unused)} is of no checkpoint"
        for session_id, what in self._owners.items():
            if session_id not in self.sessions:
                self._counts_beyond(what)
        return self._check_feed()

    def _check_salt(self, frame: SaltFrame) -> str | None:
        self._salts.add(frame.salt)
        return "it brings too many salts" if len(self._salts) > SALTS_MAX else None

    def _check_tree(self, frame: TreeFrame) -> str | None:
        require_text("id", frame.root_id)
        if frame.root_id in self._trees:
            return f"tree {frame.root_id!r} comes twice"
        problem = self._check_feed()
        self._tree, self._position = frame, 0
        self._trees.add(frame.root_id)
        return problem

    def _check_feed(self) -> str | None:
        """Whether the feed of the tree before is whole."""
        tree, self._tree = self._tree, None
        if tree is not None and self._position != tree.position:
            return f"the feed of tree {tree.root_id!r} ends at {self._position}"
        return None

    def _check_event(self, frame: EventFrame) -> str | None:
        self._admit(frame.data, "event")
        if self._tree is None or frame.position != self._position + 1:
            return f"event {frame.position} is out of order"
        self._position = frame.position
        return None

    def _check_line(self, frame: LineFrame) -> str | None:
        # A piece of the line itself, whose items follow, is named by 0.
        known = [piece for piece in frame.pieces if piece[0]]
        if problem := self._check_feed():
            return problem
        if frame.line_id in self._lines or not frame.line_id:
            return f"line {frame.line_id} comes twice"
        if not all(self._has(line_id, start + length) for line_id, start, length in known):
            return f"line {frame.line_id} begins with items that are missing"
        own = [start + length for line_id, start, length in frame.pieces if not line_id]
        base = sum(length for _, _, length in frame.pieces)
        if base >= SHIFT:
            return f"line {frame.line_id} begins with too many items"
        pieces = frozenset(line_id for line_id, _, _ in known)
        self._line = _Line(base, max(own, default=0), pieces)
        self._lines[frame.line_id] = self._line
        return None

    def _check_items(self, frame: ItemsFrame) -> str | None:
        if self._line is None or frame.index != self._line.end:
            return f"item {frame.index} is out of order"
        if frame.count > 1:
            bodies = self.codec.split(bytes(frame.body)) if frame.count <= RUN_ITEMS else []
            if len(bodies) != frame.count or self.codec.join(bodies) != bytes(frame.body):
                return f"item {frame.index} does not hold the items it says"
            if len(bytes(frame.body)) > RUN_BYTES_MAX + FIELDS_BYTES_MAX:
                return f"item {frame.index} is a run that is too large"
            for body in bodies:
                self.codec.admit(body, name="item")
        else:
            self._admit(frame.body, "item")
        self._line.end += frame.count
        return None

    def _check_session(self, frame: SessionFrame) -> str | None:
        require_text("id", frame.id)
        if problem := self._check_feed():
            return problem
        if type(self._admit(frame.metadata, "metadata")) is not dict:
            return f"session {frame.id!r} has metadata that is no object"
        parent = None
        if frame.parent_id is not None:
            parent = self.sessions.get(frame.parent_id)
        root_id = frame.id if frame.parent_id is None else parent and parent.root_id
        if frame.id in self.sessions:
            return f"session {frame.id!r} comes twice"
        if frame.root_id != root_id or root_id not in self._trees:
            return f"session {frame.id!r} has a parent or root that is not before it"
        if not _are_epochs(frame):
            return f"session {frame.id!r} has an epoch that begins nowhere"
        if not self._is_forked(frame):
            return f"session {frame.id!r} has an origin that is not before it"
        if frame.salt is not None and frame.salt not in self._salts:
            return f"session {frame.id!r} has a salt that is not before it"
        if self._numbers.setdefault(frame.number, frame.id) != frame.id:
            return f"session {frame.id!r} has the number of another"
        self.sessions[frame.id] = _Session(frame.root_id, frame.version)
        self._session = frame
        self._version = self._pinned = 0
        return None

    def _is_forked(self, frame: SessionFrame) -> bool:
        """Whether a fork's origin is here or gone, and a session without one has none at all."""
        if frame.origin_version is None:
            return frame.origin_id is None and frame.lineage is None
        origin = None if frame.origin_id is None else self.sessions.get(frame.origin_id)
        is_known = frame.origin_id is None or origin is not None
        highest = frame.version if origin is None else min(frame.version, origin.version)
        is_ordered = all(low <= high for _, _, low, high in frame.lineage or [])
        return is_known and is_ordered and frame.origin_version <= highest

    def _check_checkpoint(self, frame: CheckpointFrame) -> str | None:
        session = self._session
        if session is None or not self._version < frame.version <= session.version:
            return f"checkpoint {frame.version} is out of order"
        epochs = [epoch for epoch, first, _ in session.epochs if first <= frame.version]
        is_copy = frame.version == session.origin_version
        if not is_copy and frame.epoch != max(epochs, default=session.epoch - len(session.epochs)):
            return f"checkpoint {frame.version} has the wrong epoch"
        data = self._admit(frame.data, "data")
        if type(self._admit(frame.metadata, "metadata")) not in {dict, NoneType}:
            return f"checkpoint {frame.version} has metadata that is no object"
        is_iteration = frame.kind in ITERATIONS
        iteration = data.get("iteration") if is_iteration and type(data) is dict else None
        if is_iteration == (iteration is None) or iteration != frame.iteration:
            return f"checkpoint {frame.version} has the wrong iteration"
        if problem := self._check_manifest(bytes(frame.manifest)):
            return f"checkpoint {frame.version} of {session.id!r} {problem}"
        self._version = frame.version
        return None

    def _check_manifest(self, body: bytes) -> str | None:
        unreadable = "has channels that cannot be read"
        if len(body) > self.codec.limits.value_bytes:
            raise too_large("channels", len(body), self.codec.limits.value_bytes, "value_bytes")
        try:
            manifest = manifests.read(self.codec, body)
            if manifests.write(self.codec, manifest) != body:
                return unreadable
        except (AttributeError, TypeError, ValueError, CorruptRecord):
            return unreadable
        for channel, entry in manifest.items():
            require_channel(channel)
            match entry:
                case manifests.Inline(inline):
                    self.codec.admit(inline, name=channel)
                    if len(inline) > manifests.INLINE_BYTES_MAX:
                        return unreadable
                case manifests.Stored(line_id):
                    if not self._has(line_id, 1):
                        return "lacks items"
                    self._used.add(line_id)
                case Ref():
                    if not self._has_list(entry):
                        return "lacks items"
                    self._used |= {entry.line_id, *self._lines[entry.line_id].pieces}
        return None

    def _check_said(self, frame: PinFrame | AttestationFrame) -> str | None:
        if isinstance(frame, AttestationFrame):
            self._admit(frame.evidence, "evidence")
        if self._session is None or frame.version > self._session.version:
            return f"version {frame.version} is spoken of and does not exist"
        if isinstance(frame, PinFrame):
            if frame.version <= self._pinned:
                return f"the pin of version {frame.version} of {self._session.id!r} comes twice"
            self._pinned = frame.version
        return None

    def _check_item(self, frame: ItemFrame) -> str | None:
        is_final = frame.state in FINAL
        if self._session is None or frame.id in self._items:
            return f"work item {frame.id!r} comes twice, or without its session"
        if frame.state not in ITEM_STATES or is_final != (frame.completed_at is not None):
            return f"work item {frame.id!r} has the wrong end"
        if frame.retry_count > frame.max_retries or frame.max_retries > RETRIES_MAX:
            return f"work item {frame.id!r} has more retries than it may"
        if not {"input"} <= frame.parts.keys() <= set(ITEM_PARTS):
            return f"work item {frame.id!r} lacks its input"
        for part, body in frame.parts.items():
            value = self._admit(body, part)
            if part == "error" and type(value) is not str:
                return f"work item {frame.id!r} has an error that is no text"
        self._items[frame.id] = frame.attempts
        if frame.first_id is not None and frame.first_id not in self._items:
            self._counts_beyond(f"work item {frame.id!r}, first submitted as {frame.first_id!r}")
        if frame.key is not None and not is_final:
            if (frame.queue, frame.key) in self._keys:
                return f"work item {frame.id!r} has a key that another has"
            self._keys.add((frame.queue, frame.key))
            self._counts_beyond(f"work item {frame.id!r} with the key {frame.key!r}")
        return None

    def _check_attempt(self, frame: AttemptFrame) -> str | None:
        what = f"attempt {frame.attempt} of work item {frame.item_id!r}"
        if frame.attempt > self._items.get(frame.item_id, 0):
            return f"{what} is more than the item had"
        if (frame.item_id, frame.attempt) in self._attempts:
            return f"{what} comes twice"
        if type(self._admit(frame.error, "error")) is not str:
            return f"{what} has an error that is no text"
        self._attempts.add((frame.item_id, frame.attempt))
        return None

    def _check_spend(self, frame: SpendFrame) -> str | None:
        owner = self._session if frame.session_id is None else self._tree
        if owner is None or frame.id in self._spends:
            return f"spend {frame.id!r} comes twice, or without its session"
        if frame.session_id is not None:
            self.gone.add(require_text("id", frame.session_id))
        if type(self._admit(frame.details, "details")) not in {dict, NoneType}:
            return f"spend {frame.id!r} has details that are no object"
        self._spent += max(frame.input_tokens, frame.output_tokens, frame.nano_usd or 0)
        if self._spent > SPENT_MAX:
            return "what was spent is more than can be counted"
        self._spends.add(frame.id)
        return None

    def _check_effect(self, frame: EffectFrame) -> str | None:
        for part, body in frame.parts.items():
            self._admit(body, part)
        if not frame.parts.keys() <= set(EFFECT_PARTS):
            return f"effect {frame.id!r} has parts that no effect has"
        if frame.id in self._effects:
            return f"effect {frame.id!r} comes twice"
        if (frame.status == "issued") != (frame.ended_at is None):
            return f"effect {frame.id!r} has the wrong end"
        number = frame.session_number
        if self._numbers.setdefault(number, frame.session_id) != frame.session_id:
            return f"effect {frame.id!r} is of two sessions"
        is_undo = frame.undoes is not None
        if is_undo != (frame.replay_of is None and frame.key.startswith(UNDO)) or (
            is_undo and frame.key != f"{UNDO}{frame.undoes}"
        ):
            return f"effect {frame.id!r} undoes another than it says"
        if frame.generation == 0 and frame.replay_of is None:
            return f"effect {frame.id!r} is of no generation"
        self._named |= {id for id in (frame.undoes, frame.undone_by) if id is not None}
        self._effects.add(frame.id)
        what = f"effect {frame.id!r} with the key {frame.key!r}"
        if frame.session_id is not None:
            self._owners.setdefault(frame.session_id, what)
        if not self._is_own(frame):
            self._counts_beyond(what)
        return None

    def _is_own(self, frame: EffectFrame) -> bool:
        """Whether an effect counts in its own session, and nowhere else."""
        is_of_item = frame.scope.startswith(ITEM) and frame.scope.removeprefix(ITEM) in self._items
        if not is_of_item and frame.scope != scope_of(str(frame.session_id)):
            return False
        within = frame.key.removeprefix(f"{frame.scope}:")
        is_within = within != frame.key and (":" not in within or is_of_item)
        # A replay of generation 0 has the key of the attempt that it names, and is not found by it.
        return frame.generation == 0 or is_within or frame.key.startswith(UNDO)

    def _counts_beyond(self, what: str) -> None:
        self.beyond = self.beyond or what

    def _has_list(self, ref: Ref) -> bool:
        line = self._lines.get(ref.line_id)
        if line is None or line.base != ref.base or not 0 <= ref.base <= ref.length or ref.skip < 0:
            return False
        return line.end >= max(ref.own_end, line.end_needed)

    def _has(self, line_id: int, end: int) -> bool:
        return line_id in self._lines and self._lines[line_id].end >= end

    def _admit(self, body: Raw, name: str) -> Any:
        return self.codec.admit(bytes(body), name=name)


def _are_epochs(frame: SessionFrame) -> bool:
    """Whether a session was rewound as often as it says, each time to an older version."""
    known, last = frame.epoch - len(frame.epochs), 0
    for epoch, first, target in frame.epochs:
        if epoch != known + 1 or not last < first <= frame.version or not target < first:
            return False
        known, last = epoch, first
    return known >= 1


_CHECKS: dict[type[Frame], Callable[[_Checker, Any], str | None]] = {
    SaltFrame: _Checker._check_salt,
    KeyFrame: lambda checker, frame: None,
    TreeFrame: _Checker._check_tree,
    EventFrame: _Checker._check_event,
    LineFrame: _Checker._check_line,
    ItemsFrame: _Checker._check_items,
    SessionFrame: _Checker._check_session,
    CheckpointFrame: _Checker._check_checkpoint,
    PinFrame: _Checker._check_said,
    AttestationFrame: _Checker._check_said,
    ItemFrame: _Checker._check_item,
    AttemptFrame: _Checker._check_attempt,
    SpendFrame: _Checker._check_spend,
    EffectFrame: _Checker._check_effect,
}
