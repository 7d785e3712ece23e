"""The export file: how records lie in it, and how damage to it is found.

    line 1      a JSON object: the format's version, the export's and the store's id
    then        frames: 4 bytes of length, then a list of records, sealed by the codec. They form
                groups of trees, each from one snapshot and independent of the others
    at the end  a frame with the number of frames and the SHA-256 of everything before it

A frame is bound to the export and to its place in it, so that none can be changed, moved, repeated
or left out. With a cipher the frames are encrypted. Which records there are, the nouns say.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, Union

import msgspec

from ..checkpoints.diff import printable
from ..codec import Codec, from_json, to_json
from ..errors import (
    CorruptRecord,
    HoldfastError,
    InvalidArgument,
    LimitExceeded,
    SchemaMismatch,
    StoreUnavailable,
)
from ..kernel.nouns import Noun
from ..kernel.portable import Count, Record, Seen

VERSION = 1
HEADER_BYTES_MAX = 4_096
SQLITE_MAGIC = b"SQLite format 3\0"
LENGTH_BYTES = 4
# The largest record has so many values of the store, and what names them.
VALUES_MAX = 5
FIELDS_BYTES_MAX = 65_536
# Records share a frame up to this size; a larger one has a frame of its own.
FRAME_BYTES = 65_536
# What a sealed frame has around its body: header, digest, the cipher's key id, nonce and tag.
FRAME_BYTES_MORE = 1_024
LABEL_CHARACTERS_MAX = 64


class GroupRecord(Record, frozen=True, tag="group"):
    """Begins another group of trees, which refers to nothing before it."""


class EndRecord(Record, frozen=True, tag="end"):
    """The end of the file."""

    frames: Count
    sha256: str

    def problem(self, seen: Seen) -> str | None:
        """Refuse it anywhere but at the end."""
        return "it has an end record before its end"


class Format:
    """How the records of some nouns are read and written."""

    def __init__(self, nouns: Sequence[Noun]) -> None:
        self.kinds = tuple(kind for noun in nouns for kind in noun.portable.records)
        self._decoder, self._list_decoder = _decoders((*self.kinds, GroupRecord, EndRecord))
        self._fields = {kind.__struct_config__.tag: kind.__struct_fields__ for kind in self.kinds}

    def counts(self) -> dict[str, int]:
        """Return a counter for each kind of record that is counted."""
        return {kind.counted: 0 for kind in self.kinds if kind.counted}

    def read_all(self, body: bytes, *, is_known: bool = False) -> list[Record]:
        """Return the records of a frame. Raises WrongRecord if one is none, or not as we write.

        One that `is_known` was read before, and is not compared with what we would write again.
        """
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            records: list[Record] = self._list_decoder.decode(body)
            if records and (is_known or _encoder.encode(records) == body):
                return records
        # It is refused: which of its records is to blame is looked for one by one.
        try:
            parts = _raw_decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WrongRecord(0, f"is not one of ours: {printable(str(error))}") from error
        for place, part in enumerate(parts):
            try:
                self.read(bytes(part))
            except msgspec.ValidationError as error:
                raise WrongRecord(place, str(error)) from error
        raise WrongRecord(0, "is not written as we write it")

    def read(self, body: bytes) -> Record:
        """Return a record; ValidationError or DecodeError if it is none, or not written as ours.

        Whatever can be written in two ways (a number, a list with more behind it) is refused in
        all but the way that we write it.
        """
        try:
            record: Record = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise msgspec.ValidationError(self._wrong(body, error)) from error
        if _encoder.encode(record) != body:
            raise msgspec.ValidationError("is not written as we write it")
        return record

    def validated(self, record: Record) -> Record:
        """Return a record that was made from a foreign row, or raise ValidationError."""
        return self.read(_encoder.encode(record))

    def _wrong(self, body: bytes, error: Exception) -> str:
        """Say which field of a record is wrong, if the record is known for one of ours at all."""
        problem, _, place = str(error).partition(" - at `$[")
        with contextlib.suppress(
            msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError
        ):
            tag = msgspec.msgpack.decode(msgspec.msgpack.decode(body, type=list[msgspec.Raw])[0])
            index = int(place.partition("]")[0])
            if tag in self._fields and index:
                return f"has a wrong {tag}.{self._fields[tag][index - 1]}: {printable(problem)}"
        return f"is not one of ours: {printable(str(error))}"


class WrongRecord(Exception):
    """A record of a frame is not one of ours."""

    def __init__(self, place: int, problem: str) -> None:
        super().__init__(problem)
        self.place = place


@functools.cache
def _decoders(
    kinds: tuple[type[Record], ...],
) -> tuple[msgspec.msgpack.Decoder[Any], msgspec.msgpack.Decoder[Any]]:
    """Return what reads one record, and a list of them."""
    kind: Any = Union[kinds]  # noqa: UP007
    return msgspec.msgpack.Decoder(kind), msgspec.msgpack.Decoder(list[kind])


_encoder = msgspec.msgpack.Encoder()
_raw_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Source(Protocol):
    """Where sessions come from; its records can be read more than once."""

    @property
    def label(self) -> str:
        """What it is, for messages and events."""
        ...

    def records(self) -> Iterator[Record]:
        """Yield everything from the start, or raise what is wrong with it."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Return what could not be imported unchanged, once all records were read."""
        ...


class _Place(NamedTuple):
    """A position in an export file, and the state of its writer there."""

    bytes: int
    frames: int
    digest: hashlib._Hash
    counts: dict[str, int]


class ExportWriter:
    """Writes one export; `begin` empties it, `end` makes it complete and durable."""

    def __init__(self, file: IO[bytes], codec: Codec, format: Format, export_id: str) -> None:
        self._file = file
        self._codec = codec
        self._format = format
        self.counts: dict[str, int] = {}
        self._export_id = export_id
        self._digest = hashlib.sha256()
        self._frames = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    def begin(self, store_id: str) -> None:
        """Empty the file and write its first line."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self._frames = 0
        self._waiting, self._waiting_bytes = [], 0
        self.counts = self._format.counts()
        header = {
            "holdfast_export": VERSION,
            "export_id": self._export_id,
            "store_id": store_id,
            "is_encrypted": self._codec.has_cipher,
        }
        self._put(f"{to_json(header)}\n".encode())
        self._group = self._place()

    def begin_group(self) -> None:
        """Begin a group of trees."""
        if self._frames or self._waiting:
            self.write(GroupRecord())
            self.flush()
        self._group = self._place()

    def begin_again(self) -> None:
        """Remove what was written of the current group."""
        place = self._group
        self._waiting, self._waiting_bytes = [], 0
        if self._file.tell() != place.bytes:
            self._file.seek(place.bytes)
            self._file.truncate()
        self._frames, self._digest = place.frames, place.digest.copy()
        self.counts = dict(place.counts)

    def _place(self) -> _Place:
        return _Place(self._file.tell(), self._frames, self._digest.copy(), dict(self.counts))

    def write(self, record: Record) -> None:
        """Add a record, and count it."""
        self.append(_encoder.encode(record))
        if record.counted:
            self.counts[record.counted] += 1

    def append(self, body: bytes) -> None:
        """Add the body of a record."""
        if self._waiting_bytes + len(body) > FRAME_BYTES:
            self.flush()
        self._waiting.append(body)
        self._waiting_bytes += len(body)

    def flush(self) -> None:
        """Write the pending records as one frame."""
        if self._waiting:
            body = self._codec.join(self._waiting)
            sealed = self._codec.seal(body, context=_context(self._export_id, self._frames))
            self._put(len(sealed).to_bytes(LENGTH_BYTES) + sealed)
            self._frames += 1
            self._waiting, self._waiting_bytes = [], 0

    def end(self) -> None:
        """Write the last record and wait until everything is on the disk."""
        self.flush()
        self.write(EndRecord(frames=self._frames, sha256=self._digest.hexdigest()))
        self.flush()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _put(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)


class ExportFile:
    """Reads an export and checks every byte of it."""

    def __init__(
        self, path: Path, codec: Codec, format: Format, *, allow_plaintext: bool = False
    ) -> None:
        self._path = path
        self._format = format
        self._record_bytes_max = VALUES_MAX * codec.limits.value_bytes + FIELDS_BYTES_MAX
        self._codec = codec.bounded(self._record_bytes_max)
        self._digest = ""
        header = read_header(path)
        self._export_id = header["export_id"]
        self._store_id = header["store_id"]
        if codec.has_cipher and not header["is_encrypted"]:
            if not allow_plaintext:
                raise InvalidArgument(
                    f"{path} is not encrypted and this store has a cipher; import it with "
                    "allow_plaintext=True if you trust its source"
                )
            self._codec = self._codec.without_cipher()

    @property
    def label(self) -> str:
        """The store that was exported."""
        return f"store {self._store_id}"

    def notes(self) -> tuple[str, ...]:
        """Return nothing: an export is imported unchanged."""
        return ()

    def records(self) -> Iterator[Record]:
        """Yield all records; CorruptRecord at the first byte that is not what was written.

        The second time the file must be the same as the first.
        """
        digest = hashlib.sha256()
        with open_to_read(self._path) as file:
            left = os.fstat(file.fileno()).st_size
            line = file.readline(HEADER_BYTES_MAX)
            digest.update(line)
            left -= len(line)
            frames, ordinal = 0, 0
            while True:
                prefix = file.read(LENGTH_BYTES)
                length = int.from_bytes(prefix)
                left -= LENGTH_BYTES + length
                if len(prefix) < LENGTH_BYTES or left < 0:
                    raise _damaged(self._path, "it is truncated; export the sessions again")
                if length > self._record_bytes_max + FRAME_BYTES_MORE:
                    raise self._too_large(ordinal, length)
                sealed = file.read(length)
                records = self._read_frame(sealed, frames, ordinal)
                end = records[-1] if records else None
                if isinstance(end, EndRecord):
                    self._require_end(end, frames, digest.hexdigest(), left + len(records) - 1)
                    return
                digest.update(prefix)
                digest.update(sealed)
                frames += 1
                ordinal += len(records)
                yield from records

    def _require_end(self, end: EndRecord, frames: int, sha256: str, more: int) -> None:
        """Refuse a file that is not what it says of itself, or was not the first time."""
        if end.frames != frames or end.sha256 != sha256 or more:
            raise _damaged(self._path, "its end record does not match its content")
        if self._digest not in {"", sha256}:
            raise _damaged(self._path, "it was changed while it was read")
        self._digest = sha256

    def _read_frame(self, sealed: bytes, frame: int, first: int) -> list[Record]:
        """Return the records of a frame, of which the first has the ordinal number `first`."""
        try:
            body = self._codec.unseal(sealed, context=_context(self._export_id, frame))
            # If it has changed since it was read first, the file is refused at its end.
            return self._format.read_all(body, is_known=bool(self._digest))
        except CorruptRecord as error:
            if "limit" in error.fields:
                raise self._too_large(first, error.fields["actual"]) from error
            raise _damaged(self._path, f"frame {frame} does not match its digest") from error
        except WrongRecord as error:
            raise _damaged(self._path, f"record {first + error.place} {error}") from error

    def _too_large(self, ordinal: int, size: object) -> LimitExceeded:
        return LimitExceeded(
            f"record {ordinal} of {self._path} takes {size:,} bytes; this store takes records of "
            f"at most {self._record_bytes_max:,} (five times Limits.value_bytes); nothing was "
            "imported",
            limit=self._record_bytes_max,
            actual=size,
        )


@contextlib.contextmanager
def open_to_read(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is to be imported, or say why it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise InvalidArgument(f"there is no file {path}") from error
    except OSError as error:
        raise StoreUnavailable(f"cannot read {path}: {error.strerror}") from error


def read_header(path: Path) -> dict[str, Any]:
    """Return the first line of an export, or raise what is wrong with it."""
    with open_to_read(path) as file:
        line = file.readline(HEADER_BYTES_MAX)
    foreign = InvalidArgument(f"{path} is not a Holdfast export")
    if line.startswith(SQLITE_MAGIC):
        raise InvalidArgument(
            f"{path} is an SQLite database, not a Holdfast export. From a store, such as "
            "a backup, export first; `holdfast import --legacy FILE` reads older formats"
        )
    try:
        header = from_json(line.removesuffix(b"\n"))
    except (HoldfastError, UnicodeDecodeError):
        raise foreign from None
    if type(header) is not dict or type(version := header.get("holdfast_export")) is not int:
        raise foreign
    if version > VERSION:
        raise SchemaMismatch(
            f"{path} has export format {version}, this Holdfast reads {VERSION}; upgrade Holdfast",
            format=version,
            newest=VERSION,
        )
    wanted = {"export_id": str, "store_id": str, "is_encrypted": bool}
    is_whole = all(type(header.get(name)) is kind for name, kind in wanted.items())
    is_whole = is_whole and all(is_label(header[name]) for name in ("export_id", "store_id"))
    if version < 1 or not is_whole or not line.endswith(b"\n"):
        raise _damaged(path, "its first line is not what was written")
    return header


def _damaged(path: Path, problem: str) -> CorruptRecord:
    return CorruptRecord(f"{path} is damaged: {problem}", path=str(path))


def is_label(text: str) -> bool:
    """Whether a text from a file can be shown: short, and nothing but printable characters."""
    return 0 < len(text) <= LABEL_CHARACTERS_MAX and text.isprintable()


def _context(export_id: str, ordinal: int) -> tuple[str, ...]:
    return "export", export_id, str(ordinal)
