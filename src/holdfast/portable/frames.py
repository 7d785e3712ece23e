"""The export file: what it holds, and how damage to it is found.

    line 1      a JSON object: the format's version, the export's and the store's id
    then        frames: 4 bytes of length, then a record of the codec
    at the end  a frame with the number of frames and the SHA-256 of everything before it

A frame's record is bound to the export and to its place in it, so that none can be changed, moved,
repeated or left out. With a cipher the records are encrypted. Lists lie in the file as they lie in
a store: each item once, however many versions have it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Protocol, TypeAlias, get_args

import msgspec

from ..checkpoints.diffing import printable
from ..checkpoints.lines import PIECES_MAX
from ..codec import Codec, from_json, to_json
from ..errors import (
    CorruptRecord,
    HoldfastError,
    InvalidArgument,
    LimitExceeded,
    SchemaMismatch,
    StoreUnavailable,
)
from ..records import EffectKind, EffectReason, EffectStatus, Kind, Status
from ..spend import SpendState
from ..work.items import OnCrash

VERSION = 1
HEADER_BYTES_MAX = 4_096
LENGTH_BYTES = 4
# The largest frame is an effect or an item, with all its parts; each is a value of the store.
PARTS_MAX = 5
FIELDS_BYTES_MAX = 65_536
# What a record has around its body: header, digest, the cipher's key id, nonce and tag.
RECORD_BYTES_MORE = 1_024
LABEL_CHARACTERS_MAX = 64
# The end of the year 9999, the last that ISO-8601 can name.
TIME_MS_MAX = 253_402_300_799_999

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Fence = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Number = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Version = Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31) + 1, lt=2**31)]
Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]
Time = Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]
Salt = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
KeyMark = Annotated[str, msgspec.Meta(pattern="^key:[0-9a-f]{64}$")]


class _Frame(msgspec.Struct, array_like=True, frozen=True, tag_field="frame"):
    """A record of the file: its tag, then its fields in order."""


class SaltFrame(_Frame, frozen=True, tag="salt"):
    """A salt that effects are known by: the store's, or one that a session brought to it."""

    salt: Salt


class KeyFrame(_Frame, frozen=True, tag="key"):
    """The mark of the key that effects are known by instead of salts, if there is one."""

    mark: KeyMark


class TreeFrame(_Frame, frozen=True, tag="tree"):
    """A session tree: how far its feed and its state have counted."""

    root_id: Name
    position: Count
    sequence: Count


class EventFrame(_Frame, frozen=True, tag="event"):
    """One event of the tree before it."""

    position: Count
    session_id: Name
    kind: Name
    created_at: Time
    data: msgspec.Raw


class LineFrame(_Frame, frozen=True, tag="line"):
    """A line, by a number of this file, and the pieces that it begins with."""

    line_id: Count
    pieces: Annotated[list[tuple[Count, Small, Version]], msgspec.Meta(max_length=PIECES_MAX)]


class ItemsFrame(_Frame, frozen=True, tag="items"):
    """The next items of the line before it: one as it is, or several as a list."""

    index: Small
    count: Version
    body: msgspec.Raw


class SessionFrame(_Frame, frozen=True, tag="session"):
    """A session without its checkpoints; parents and origins come before it."""

    id: Name
    name: Name | None
    parent_id: Name | None
    root_id: Name
    agent: Name | None
    user: Name | None
    status: Status
    version: Small
    epoch: Version
    fence: Fence
    origin_id: Name | None
    origin_version: Version | None
    created_at: Time
    updated_at: Time
    last_resumed_at: Time
    epochs: list[tuple[Version, Version, Version]]
    metadata: msgspec.Raw
    number: Count = 0
    lineage: list[tuple[Name, Number, Small, Small]] | None = None
    salt: Salt | None = None


class CheckpointFrame(_Frame, frozen=True, tag="checkpoint"):
    """One version of the session before it; its manifest names lines of this file."""

    version: Version
    epoch: Version
    kind: Kind
    iteration: Count | None
    item_id: Name | None
    state_sequence: Count
    created_at: Time
    manifest: msgspec.Raw
    data: msgspec.Raw
    metadata: msgspec.Raw
    idempotency_key: Text | None = None


class PinFrame(_Frame, frozen=True, tag="pin"):
    """A pin of a version of the session before it."""

    version: Version
    reason: Text
    created_at: Time


class AttestationFrame(_Frame, frozen=True, tag="attestation"):
    """What was verified of a version of the session before it."""

    version: Version
    created_at: Time
    evidence: msgspec.Raw


class EffectFrame(_Frame, frozen=True, tag="effect"):
    """One attempt of an effect: of the session of that number, which may be gone by now."""

    session_number: Number | None
    session_id: Name | None
    id: Name
    scope: Text
    key: Text
    generation: Small
    call_id: Name | None
    item_id: Name | None
    issued_version: Small
    tool: Name
    effect: EffectKind
    is_irreversible: Flag
    request_digest: Text
    idempotency_key: Text
    status: EffectStatus
    reason: EffectReason | None
    attempt: Version
    holder: Text | None
    fence: Fence
    timeout_ms: Count
    settle_ms: Count
    ttl_ms: Count | None
    replay_of: Name | None
    undoes: Name | None
    undone_by: Name | None
    decided_by: Text | None
    issued_at: Time
    ended_at: Time | None
    expires_at: Time | None
    parts: dict[str, msgspec.Raw]


class ItemFrame(_Frame, frozen=True, tag="item"):
    """A work item of the session before it; who held it is left behind."""

    id: Name
    type: Name
    queue: Name
    state: Name
    priority: Priority
    key: Name | None
    on_crash: OnCrash
    fence: Fence
    retry_count: Small
    max_retries: Small
    attempts: Small
    failures: Small
    rescues: Small
    releases: Small
    redriven_from: Name | None
    first_id: Name | None
    available_at: Time
    created_at: Time
    started_at: Time | None
    completed_at: Time | None
    updated_at: Time
    parts: dict[str, msgspec.Raw]


class AttemptFrame(_Frame, frozen=True, tag="attempt"):
    """An attempt of a work item before it that failed or whose lease expired."""

    item_id: Name
    attempt: Version
    holder: Text | None
    fence: Fence
    reason: Name
    ended_at: Time
    error: msgspec.Raw


class SpendFrame(_Frame, frozen=True, tag="spend"):
    """One attempt at a model that the session before it paid for.

    With a `session_id`, a session that is gone paid for it; it counts for the tree before it.
    """

    id: Name
    model: Name
    source: Name
    state: SpendState
    input_tokens: Count
    output_tokens: Count
    nano_usd: Count | None
    created_at: Time
    updated_at: Time
    details: msgspec.Raw
    session_id: Name | None = None


class EndFrame(_Frame, frozen=True, tag="end"):
    """The end of the file."""

    frames: Count
    sha256: str


Frame: TypeAlias = (
    SaltFrame
    | KeyFrame
    | TreeFrame
    | EventFrame
    | LineFrame
    | ItemsFrame
    | SessionFrame
    | CheckpointFrame
    | PinFrame
    | AttestationFrame
    | ItemFrame
    | AttemptFrame
    | SpendFrame
    | EffectFrame
)
NIL = msgspec.Raw(b"\xc0")
EFFECT_PARTS = ("arguments", "result", "error", "note", "late")
ITEM_PARTS = ("input", "output", "error", "progress")
_decoder: msgspec.msgpack.Decoder[Frame | EndFrame] = msgspec.msgpack.Decoder(Frame | EndFrame)
_encoder = msgspec.msgpack.Encoder()
_FIELDS = {
    kind.__struct_config__.tag: kind.__struct_fields__ for kind in (*get_args(Frame), EndFrame)
}


def validated(frame: Frame) -> Frame:
    """Return a frame that was made from a foreign row, or raise ValidationError as for a file's."""
    body = _encoder.encode(frame)
    try:
        return _decoder.decode(body)  # type: ignore[return-value]
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(_wrong(body, error)) from error


class Source(Protocol):
    """Where sessions come from; its frames can be read more than once."""

    @property
    def label(self) -> str:
        """What it is, for messages and events."""
        ...

    def frames(self) -> Iterator[Frame]:
        """Yield everything from the start, or raise what is wrong with it."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Return what could not be taken over as it was, once all frames were read."""
        ...


class ExportWriter:
    """Writes one export; `begin` starts over, `end` makes it complete and durable."""

    def __init__(self, file: IO[bytes], codec: Codec, export_id: str) -> None:
        self._file = file
        self._codec = codec
        self._export_id = export_id
        self._digest = hashlib.sha256()
        self._frames = 0

    def begin(self, store_id: str) -> None:
        """Empty the file and write its first line."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self._frames = 0
        header = {
            "holdfast_export": VERSION,
            "export_id": self._export_id,
            "store_id": store_id,
            "is_encrypted": self._codec.has_cipher,
        }
        self._put(f"{to_json(header)}\n".encode())

    def write(self, frame: Frame | EndFrame) -> None:
        """Add a frame."""
        self.append(_encoder.encode(frame))

    def append(self, body: bytes) -> None:
        """Add the body of a frame."""
        record = self._codec.seal(body, context=_context(self._export_id, self._frames))
        self._put(len(record).to_bytes(LENGTH_BYTES) + record)
        self._frames += 1

    def end(self) -> None:
        """Write the last frame and wait until everything is on the disk."""
        self.write(EndFrame(frames=self._frames, sha256=self._digest.hexdigest()))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _put(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)


class ExportFile:
    """Reads an export and checks every byte of it."""

    def __init__(self, path: Path, codec: Codec, *, allow_plaintext: bool = False) -> None:
        self._path = path
        self._record_bytes_max = PARTS_MAX * codec.limits.value_bytes + FIELDS_BYTES_MAX
        self._codec = codec.bounded(self._record_bytes_max)
        self._digest = ""
        with self._open() as file:
            header = self._header(file.readline(HEADER_BYTES_MAX))
        self._export_id = header["export_id"]
        self._store_id = header["store_id"]
        if codec.has_cipher and not header["is_encrypted"]:
            if not allow_plaintext:
                raise InvalidArgument(
                    f"{path} is not encrypted and this store has a cipher; import it with "
                    "allow_plaintext=True if you know where it comes from"
                )
            self._codec = self._codec.without_cipher()

    @property
    def label(self) -> str:
        """The store that was exported."""
        return f"store {self._store_id}"

    def notes(self) -> tuple[str, ...]:
        """Return nothing: an export is taken over as it is."""
        return ()

    def frames(self) -> Iterator[Frame]:
        """Yield all frames; CorruptRecord at the first byte that is not what was written.

        The second time the file must be the same as the first.
        """
        digest = hashlib.sha256()
        with self._open() as file:
            left = os.fstat(file.fileno()).st_size
            line = file.readline(HEADER_BYTES_MAX)
            digest.update(line)
            left -= len(line)
            ordinal = 0
            while True:
                prefix = file.read(LENGTH_BYTES)
                length = int.from_bytes(prefix)
                left -= LENGTH_BYTES + length
                if len(prefix) < LENGTH_BYTES or left < 0:
                    raise self._damaged("it ends in the middle; export the sessions again")
                if length > self._record_bytes_max + RECORD_BYTES_MORE:
                    raise self._too_large(ordinal, length)
                record = file.read(length)
                frame = self._frame(record, ordinal)
                if isinstance(frame, EndFrame):
                    if frame.frames != ordinal or frame.sha256 != digest.hexdigest() or left:
                        raise self._damaged("what it says of itself at its end is not so")
                    if self._digest not in {"", frame.sha256}:
                        raise self._damaged("it was changed while it was read")
                    self._digest = frame.sha256
                    return
                digest.update(prefix)
                digest.update(record)
                ordinal += 1
                yield frame

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            with self._path.open("rb") as file:
                yield file
        except FileNotFoundError as error:
            raise InvalidArgument(f"there is no file {self._path}") from error
        except OSError as error:
            raise StoreUnavailable(f"cannot read {self._path}: {error.strerror}") from error

    def _header(self, line: bytes) -> dict[str, str]:
        foreign = InvalidArgument(f"{self._path} is not a Holdfast export")
        try:
            header = from_json(line.removesuffix(b"\n"))
        except (HoldfastError, UnicodeDecodeError):
            raise foreign from None
        if type(header) is not dict or type(version := header.get("holdfast_export")) is not int:
            raise foreign
        if version > VERSION:
            raise SchemaMismatch(
                f"{self._path} has export format {version}, this Holdfast reads {VERSION}; "
                "upgrade it",
                format=version,
                newest=VERSION,
            )
        wanted = {"export_id": str, "store_id": str, "is_encrypted": bool}
        is_whole = all(type(header.get(name)) is kind for name, kind in wanted.items())
        is_whole = is_whole and all(is_label(header[name]) for name in ("export_id", "store_id"))
        if version < 1 or not is_whole or not line.endswith(b"\n"):
            raise self._damaged("its first line is not what was written")
        return header

    def _frame(self, record: bytes, ordinal: int) -> Frame | EndFrame:
        try:
            body = self._codec.unseal(record, context=_context(self._export_id, ordinal))
        except CorruptRecord as error:
            if "limit" in error.fields:
                raise self._too_large(ordinal, error.fields["actual"]) from error
            raise self._damaged(f"record {ordinal} does not match its digest") from error
        try:
            frame = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(f"record {ordinal} {_wrong(body, error)}") from error
        # Whatever can be written in two ways (a number, a list with more behind it) is refused in
        # all but the way that we write it.
        if _encoder.encode(frame) != body:
            raise self._damaged(f"record {ordinal} is not written as we write it")
        return frame

    def _too_large(self, ordinal: int, size: object) -> LimitExceeded:
        return LimitExceeded(
            f"record {ordinal} of {self._path} takes {size:,} bytes; this store takes records of "
            f"at most {self._record_bytes_max:,} (five times Limits.value_bytes); nothing was "
            "imported",
            limit=self._record_bytes_max,
            actual=size,
        )

    def _damaged(self, problem: str) -> CorruptRecord:
        return CorruptRecord(f"{self._path} is damaged: {problem}", path=str(self._path))


def is_label(text: str) -> bool:
    """Whether a text from a file can be shown: short, and nothing but printable characters."""
    return 0 < len(text) <= LABEL_CHARACTERS_MAX and text.isprintable()


def _wrong(body: bytes, error: Exception) -> str:
    """Say which field of a record is wrong, if the record is known for one of ours at all."""
    problem, _, place = str(error).partition(" - at `$[")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        tag = msgspec.msgpack.decode(msgspec.msgpack.decode(body, type=list[msgspec.Raw])[0])
        index = int(place.partition("]")[0])
        if tag in _FIELDS and index:
            return f"has a wrong {tag}.{_FIELDS[tag][index - 1]}: {printable(problem)}"
    return f"is not one of ours: {printable(str(error))}"


def _context(export_id: str, ordinal: int) -> tuple[str, ...]:
    return "export", export_id, str(ordinal)
