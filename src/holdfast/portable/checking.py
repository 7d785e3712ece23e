"""Looking at everything a source yields before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Raw

from ..checkpoints import manifest as manifests
from ..checkpoints.lines import Ref
from ..codec import Codec
from ..errors import CorruptRecord
from ..sessions.rows import require_id, require_text
from .frames import (
    EFFECT_PARTS,
    NIL,
    AttestationFrame,
    CheckpointFrame,
    EffectFrame,
    EventFrame,
    Frame,
    ItemsFrame,
    KeyFrame,
    LineFrame,
    PinFrame,
    SaltFrame,
    SessionFrame,
    Source,
    TreeFrame,
)


def check(codec: Codec, source: Source) -> list[str]:
    """Return the ids of a source's sessions, or raise CorruptRecord if it is not in order."""
    checker = _Checker(codec)
    for frame in source.frames():
        problem = checker.problem(frame)
        if problem:
            raise CorruptRecord(f"the sessions of {source.label} are not in order: {problem}")
    return list(checker.sessions)


@dataclass(slots=True)
class _Line:
    base: int
    end_needed: int
    end: int = 0


@dataclass(slots=True)
class _Checker:
    """What was seen so far. A frame may only name what came before it."""

    codec: Codec
    sessions: dict[str, SessionFrame] = field(default_factory=dict)
    _trees: dict[str, TreeFrame] = field(default_factory=dict)
    _lines: dict[int, _Line] = field(default_factory=dict)
    _tree: TreeFrame | None = None
    _position: int = 0
    _line: _Line | None = None
    _session: SessionFrame | None = None
    _version: int = 0
    _effects: set[str] = field(default_factory=set)
    _salts: set[str] = field(default_factory=set)

    def problem(self, frame: Frame) -> str | None:
        """Return what is wrong with a frame, or None."""
        match frame:
            case SaltFrame(salt):
                self._salts.add(salt)
                return None
            case KeyFrame():
                return None
            case TreeFrame():
                return self._check_tree(frame)
            case EventFrame():
                return self._check_event(frame)
            case LineFrame():
                return self._check_line(frame)
            case ItemsFrame():
                return self._check_items(frame)
            case SessionFrame():
                return self._check_session(frame)
            case CheckpointFrame():
                return self._check_checkpoint(frame)
            case PinFrame():
                return self._check_said(frame.version)
            case AttestationFrame():
                self._decode(frame.evidence)
                return self._check_said(frame.version)
            case EffectFrame():
                return self._check_effect(frame)

    def _check_tree(self, frame: TreeFrame) -> str | None:
        require_id(frame.root_id)
        if frame.root_id in self._trees:
            return f"tree {frame.root_id!r} comes twice"
        self._tree, self._position = frame, 0
        self._trees[frame.root_id] = frame
        return None

    def _check_event(self, frame: EventFrame) -> str | None:
        self._decode(frame.data)
        if self._tree is None or not self._position < frame.position <= self._tree.position:
            return f"event {frame.position} is out of order"
        self._position = frame.position
        return None

    def _check_line(self, frame: LineFrame) -> str | None:
        # A piece of the line itself, whose items follow, is named by 0.
        known = [piece for piece in frame.pieces if piece[0]]
        if frame.line_id in self._lines or not frame.line_id:
            return f"line {frame.line_id} comes twice"
        if not all(self._has(line_id, start + length) for line_id, start, length in known):
            return f"line {frame.line_id} begins with items that are missing"
        own = [start + length for line_id, start, length in frame.pieces if not line_id]
        base = sum(length for _, _, length in frame.pieces)
        self._line = _Line(base, end_needed=max(own, default=0))
        self._lines[frame.line_id] = self._line
        return None

    def _check_items(self, frame: ItemsFrame) -> str | None:
        value = self._decode(frame.body)
        if self._line is None or frame.index != self._line.end:
            return f"item {frame.index} is out of order"
        if frame.count > 1 and (type(value) is not list or len(value) != frame.count):
            return f"item {frame.index} does not hold the items it says"
        self._line.end += frame.count
        return None

    def _check_session(self, frame: SessionFrame) -> str | None:
        require_id(frame.id)
        for label in ("name", "agent", "user"):
            require_text(label, getattr(frame, label))
        if type(self._decode(frame.metadata)) is not dict:
            return f"session {frame.id!r} has metadata that is no object"
        parent = None
        if frame.parent_id is not None:
            parent = self.sessions.get(frame.parent_id)
        root_id = frame.id if frame.parent_id is None else parent and parent.root_id
        if frame.id in self.sessions:
            return f"session {frame.id!r} comes twice"
        if frame.root_id != root_id or root_id not in self._trees:
            return f"session {frame.id!r} has a parent or root that is not before it"
        if any(first > frame.version or target >= first for _, first, target in frame.epochs):
            return f"session {frame.id!r} has an epoch that begins nowhere"
        if frame.salt is not None and frame.salt not in self._salts:
            return f"session {frame.id!r} has a salt that is not before it"
        self.sessions[frame.id] = self._session = frame
        self._version = 0
        return None

    def _check_checkpoint(self, frame: CheckpointFrame) -> str | None:
        for body in (frame.data, frame.metadata):
            if body != NIL:
                self._decode(body)
        if self._session is None or not self._version < frame.version <= self._session.version:
            return f"checkpoint {frame.version} is out of order"
        is_iteration = frame.kind in {"iteration_start", "iteration_end"}
        if is_iteration != (frame.iteration is not None):
            return f"checkpoint {frame.version} has the wrong iteration"
        try:
            is_whole = self._is_whole(manifests.read(self.codec, bytes(frame.manifest)).values())
        except (AttributeError, TypeError, ValueError):
            return f"checkpoint {frame.version} has channels that cannot be read"
        if not is_whole:
            return f"checkpoint {frame.version} of {self._session.id!r} lacks items"
        self._version = frame.version
        return None

    def _check_said(self, version: int) -> str | None:
        if self._session is None or version > self._session.version:
            return f"version {version} is spoken of and does not exist"
        return None

    def _check_effect(self, frame: EffectFrame) -> str | None:
        for body in frame.parts.values():
            self._decode(body)
        if not {"arguments"} <= frame.parts.keys() <= set(EFFECT_PARTS):
            return f"effect {frame.id!r} lacks its arguments"
        if frame.id in self._effects:
            return f"effect {frame.id!r} comes twice"
        if (frame.status == "issued") != (frame.ended_at is None):
            return f"effect {frame.id!r} has the wrong end"
        self._effects.add(frame.id)
        return None

    def _is_whole(self, entries: Iterable[manifests.Entry]) -> bool:
        for entry in entries:
            match entry:
                case manifests.Stored(line_id):
                    if not self._has(line_id, 1):
                        return False
                case Ref():
                    if not self._has_list(entry):
                        return False
        return True

    def _has_list(self, ref: Ref) -> bool:
        line = self._lines.get(ref.line_id)
        if line is None or line.base != ref.base or not 0 <= ref.base <= ref.length or ref.skip < 0:
            return False
        return line.end >= max(ref.own_end, line.end_needed)

    def _has(self, line_id: int, end: int) -> bool:
        return line_id in self._lines and self._lines[line_id].end >= end

    def _decode(self, body: Raw) -> object:
        return self.codec.decode(bytes(body))
