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
from typing import IO, Annotated, Protocol, TypeAlias

import msgspec

from ..codec import Codec, from_json, to_json
from ..errors import (
    CorruptRecord,
    HoldfastError,
    InvalidArgument,
    SchemaMismatch,
    StoreUnavailable,
)
from ..records import EffectKind, EffectStatus, Kind, Status

VERSION = 1
HEADER_BYTES_MAX = 4_096
LENGTH_BYTES = 4

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 1)]
Small = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Version = Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Salt = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
KeyMark = Annotated[str, msgspec.Meta(pattern="^key:[0-9a-f]{64}$")]


class SaltFrame(msgspec.Struct, array_like=True, frozen=True, tag="salt"):
    """A salt that effects are known by: the store's, or one that a session brought to it."""

    salt: Salt


class KeyFrame(msgspec.Struct, array_like=True, frozen=True, tag="key"):
    """The mark of the key that effects are known by instead of salts, if there is one."""

    mark: KeyMark


class TreeFrame(msgspec.Struct, array_like=True, frozen=True, tag="tree"):
    """A session tree: how far its feed and its state have counted."""

    root_id: Name
    position: Count
    sequence: Count


class EventFrame(msgspec.Struct, array_like=True, frozen=True, tag="event"):
    """One event of the tree before it."""

    position: Count
    session_id: Name
    kind: Name
    created_at: Count
    data: msgspec.Raw


class LineFrame(msgspec.Struct, array_like=True, frozen=True, tag="line"):
    """A line, by a number of this file, and the pieces that it begins with."""

    line_id: Count
    pieces: list[tuple[Count, Small, Version]]


class ItemsFrame(msgspec.Struct, array_like=True, frozen=True, tag="items"):
    """The next items of the line before it: one as it is, or several as a list."""

    index: Small
    count: Version
    body: msgspec.Raw


class SessionFrame(msgspec.Struct, array_like=True, frozen=True, tag="session"):
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
    fence: Count
    origin_id: Name | None
    origin_version: Version | None
    created_at: Count
    updated_at: Count
    last_resumed_at: Count
    epochs: list[tuple[Version, Version, Version]]
    metadata: msgspec.Raw
    number: Count = 0
    lineage: list[tuple[Name, Number, Small, Small]] | None = None
    salt: Salt | None = None


class CheckpointFrame(msgspec.Struct, array_like=True, frozen=True, tag="checkpoint"):
    """One version of the session before it; its manifest names lines of this file."""

    version: Version
    epoch: Version
    kind: Kind
    iteration: Count | None
    item_id: str | None
    state_sequence: Count
    created_at: Count
    manifest: msgspec.Raw
    data: msgspec.Raw
    metadata: msgspec.Raw
    idempotency_key: str | None = None


class PinFrame(msgspec.Struct, array_like=True, frozen=True, tag="pin"):
    """A pin of a version of the session before it."""

    version: Version
    reason: str
    created_at: Count


class AttestationFrame(msgspec.Struct, array_like=True, frozen=True, tag="attestation"):
    """What was verified of a version of the session before it."""

    version: Version
    created_at: Count
    evidence: msgspec.Raw


class EffectFrame(msgspec.Struct, array_like=True, frozen=True, tag="effect"):
    """One attempt of an effect: of the session of that number, which may be gone by now."""

    session_number: Number
    session_id: Name
    id: Name
    scope: str
    key: str
    generation: Version
    call_id: Name | None
    item_id: str | None
    issued_version: Small
    tool: Name
    effect: EffectKind
    is_irreversible: Annotated[int, msgspec.Meta(ge=0, le=1)]
    request_digest: str
    idempotency_key: str
    status: EffectStatus
    reason: str | None
    attempt: Version
    holder: str | None
    fence: Count
    timeout_ms: Count
    settle_ms: Count
    ttl_ms: Count | None
    replay_of: str | None
    undoes: str | None
    undone_by: str | None
    decided_by: str | None
    issued_at: Count
    ended_at: Count | None
    expires_at: Count | None
    parts: dict[str, msgspec.Raw]


class EndFrame(msgspec.Struct, array_like=True, frozen=True, tag="end"):
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
    | EffectFrame
)
NIL = msgspec.Raw(b"\xc0")
EFFECT_PARTS = ("arguments", "result", "error", "note", "late")
_decoder: msgspec.msgpack.Decoder[Frame | EndFrame] = msgspec.msgpack.Decoder(Frame | EndFrame)
_encoder = msgspec.msgpack.Encoder()


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
        context = _context(self._export_id, self._frames)
        record = self._codec.seal(_encoder.encode(frame), context=context)
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
        self._codec = codec
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
            self._codec = codec.without_cipher()

    @property
    def label(self) -> str:
        """The store that was exported."""
        return f"store {self._store_id}"

    def notes(self) -> tuple[str, ...]:
        """Return nothing: an export is taken over as it is."""
        return ()

    def frames(self) -> Iterator[Frame]:
        """Yield all frames; CorruptRecord at the first byte that is not what was written."""
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
                record = file.read(length)
                frame = self._frame(record, ordinal)
                if isinstance(frame, EndFrame):
                    if frame.frames != ordinal or frame.sha256 != digest.hexdigest() or left:
                        raise self._damaged("what it says of itself at its end is not so")
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
        if version < 1 or not is_whole or not line.endswith(b"\n"):
            raise self._damaged("its first line is not what was written")
        return header

    def _frame(self, record: bytes, ordinal: int) -> Frame | EndFrame:
        try:
            body = self._codec.unseal(record, context=_context(self._export_id, ordinal))
            return _decoder.decode(body)
        except CorruptRecord as error:
            raise self._damaged(f"record {ordinal} does not match its digest") from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise self._damaged(f"record {ordinal} is not one of ours: {error}") from error

    def _damaged(self, problem: str) -> CorruptRecord:
        return CorruptRecord(f"{self._path} is damaged: {problem}", path=str(self._path))


def _context(export_id: str, ordinal: int) -> tuple[str, ...]:
    return "export", export_id, str(ordinal)
