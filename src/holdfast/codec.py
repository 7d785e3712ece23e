"""Plain JSON data as bytes: what can be stored, in which form, and how values are compared.

A value is None, bool, int, float (finite), str, list, or dict with str keys, of exactly these
types. Anything else is refused before a byte is written: what is loaded is what was saved.

A *body* is MessagePack. Integers beyond 64 bits are extension type 1: the shortest signed
big-endian bytes. A *record* is a body with a header:

    byte 0        0xC1, which no MessagePack starts with
    byte 1        format version, 1
    byte 2        flags: 1 = zstd, 2 = encrypted
    bytes 3-18    XXH3-128 over bytes 0-2, the context and the rest
    bytes 19-     the body, compressed first, then encrypted

The context names the place of a record (table, row, version), hashed as a MessagePack list of text.
It is not stored: a record that was moved to another place does not open. The checksum detects
damage; only a cipher prevents forgery, and even a forged record loads as plain data, never as code.

The *canonical form* is a body whose text, keys included, is in Unicode normal form C and whose keys
are in code point order, which is also the order of their UTF-8 bytes. 1, 1.0 and true differ, and
so do 0.0 and -0.0. It is the same in every process for text that Unicode 14 (Python 3.11) defines.

The *exact form* is what `marshal` writes in its version 2, without references: equal bytes are
equal values of equal types in the same order. A tuple is not a list, and a subclass or an enum has
no form. It is compared within one process, never stored and never read back.
"""

from __future__ import annotations

import json
import marshal
import sys
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from hashlib import sha256
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from xxhash import xxh3_128

from . import arguments
from .dataclass import dataclass
from .errors import CorruptRecord, InvalidArgument, InvalidValue, StoreError

_MAGIC: Final = 0xC1
_VERSION: Final = 1
_ZSTD: Final = 1
_ENCRYPTED: Final = 2
_CHECKSUM_AT: Final = 3
_BODY_AT: Final = 19
_HEADERS: Final = tuple(bytes((_MAGIC, _VERSION, flags)) for flags in range(4))
_INTEGER_EXTENSION: Final = 1
_CANONICAL_PREFIX: Final = b"holdfast canonical 1\0"
_COMPRESS_BYTES_MIN: Final = 128
_COMPRESS_HARDER_BYTES_MIN: Final = 16_384
_DEPTH_MAX: Final = 256
_LOAD_DEPTH_MAX: Final = 2 * _DEPTH_MAX
_DIGITS_MAX: Final = 4_096
_LIMIT_MAX: Final = 2**31 - 1
_EXACT_VERSION: Final = 2
_EXACT_LIST_HEADER_BYTES: Final = 5
_WIDE_BYTES: Final = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The size limits of a store; more raises LimitExceeded and writes nothing.

    `digits` is at most 4,096: by default Python converts integers of up to 4,300 digits to text.
    `record_bytes` limits a record of many values, and the size of a decompressed one.
    """

    value_bytes: int = 1_048_576
    record_bytes: int = 67_108_864
    depth: int = 64
    digits: int = _DIGITS_MAX
    keys_per_root: int = 10_000
    batch_operations: int = 1_000

    def __post_init__(self) -> None:
        ranges = {"depth": (1, _DEPTH_MAX), "digits": (20, _DIGITS_MAX)}
        for field in fields(self):
            number = getattr(self, field.name)
            least, most = ranges.get(field.name, (1, _LIMIT_MAX))
            if type(number) is not int or not least <= number <= most:
                raise InvalidArgument(
                    f"Limits.{field.name} must be an integer from {least:,} to {most:,}.",
                    argument=field.name,
                )
        if self.record_bytes < self.value_bytes:
            raise InvalidArgument(
                "Limits.record_bytes must not be less than value_bytes.", argument="record_bytes"
            )


DEFAULT_LIMITS: Final = Limits()
Compression = Literal["none", "zstd"]
Raw = msgspec.Raw


class Cipher(Protocol):
    """Encrypts bodies so that they open only unchanged and in their own context."""

    def encrypt(self, plain: bytes, context: bytes) -> bytes:
        """Return the encrypted bytes; the context is authenticated and not stored."""
        ...

    def decrypt(self, sealed: bytes, context: bytes) -> bytes:
        """Return what was encrypted in this context, or raise CorruptRecord."""
        ...


class Codec:
    """Turns plain data into records and back, for one store; thread-safe."""

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        *,
        compression: Compression = "none",
        cipher: Cipher | None = None,
    ) -> None:
        if compression not in ("none", "zstd"):
            raise InvalidArgument('compression must be "none" or "zstd".', argument="compression")
        self.limits = limits
        self._zstd = _zstd() if compression == "zstd" else None
        self._cipher = cipher

    @property
    def has_cipher(self) -> bool:
        """Whether records are encrypted."""
        return self._cipher is not None

    def widened(self) -> Codec:
        """Return a codec for records of many values, each within the limits."""
        most = max(self.limits.record_bytes, _WIDE_BYTES)
        limits = Limits(value_bytes=most, record_bytes=most, depth=_DEPTH_MAX)
        compression: Compression = "none" if self._zstd is None else "zstd"
        return Codec(limits, compression=compression, cipher=self._cipher)

    def bounded(self, record_bytes: int) -> Codec:
        """Return a codec that expands records to at most so many bytes, whatever the limits."""
        limits = replace(self.limits, record_bytes=max(record_bytes, self.limits.value_bytes))
        return Codec(limits, cipher=self._cipher)

    def without_cipher(self) -> Codec:
        """Return a codec for unencrypted records."""
        return Codec(self.limits)

    def pack(self, value: object, *, context: tuple[str, ...] = (), name: str = "value") -> bytes:
        """Return a value as a record, or raise InvalidValue or LimitExceeded with the path."""
        return self.seal(_encode(value, self.limits, name), context=context)

    def unpack(self, record: bytes, *, context: tuple[str, ...] = ()) -> Any:
        """Return exactly the value that was packed, or raise as `unseal` does."""
        return _decode(self._body(record, context))

    def encode(self, value: object, *, name: str = "value") -> bytes:
        """Return a value as a body, or raise InvalidValue or LimitExceeded with the path."""
        return _encode(value, self.limits, name)

    def encode_each(
        self,
        values: Iterable[object],
        *,
        name: str = "value",
        start: int = 0,
        forms: list[bytes] | None = None,
    ) -> list[bytes]:
        """Return one body per value, each within the limits; errors name `name[index]`.

        The exact form of each is added to `forms`.
        """
        each = enumerate(values, start)
        return [_encode(value, self.limits, (name, index), forms) for index, value in each]

    def compose(self, value: object, *, name: str) -> bytes:
        """Return an internal value as a body, unchecked; a Raw in it is a checked body."""
        body = _encoder.encode(value)
        if len(body) > self.limits.value_bytes:
            raise arguments.too_large(name, len(body), self.limits.value_bytes, "value_bytes")
        return body

    def encode_decoded(self, value: object) -> bytes:
        """Return a decoded value as a body again, without checking the limits."""
        return _messagepack(value)

    def decode(self, body: bytes) -> Any:
        """Return the value of a body, or raise CorruptRecord."""
        return _decode(body)

    def admit(self, body: bytes, *, name: str = "value") -> Any:
        """Return the value of an untrusted body; raise CorruptRecord or LimitExceeded unless this
        store would have written exactly these bytes.
        """
        if len(body) > self.limits.value_bytes:
            raise arguments.too_large(name, len(body), self.limits.value_bytes, "value_bytes")
        value = _decode(body)
        if _encode(value, self.limits, name) != body:
            raise CorruptRecord(f"{name} is not written as this Holdfast writes it")
        return value

    def join(self, bodies: Sequence[bytes]) -> bytes:
        """Return the body of a list from the bodies of its items."""
        return _encoder.encode([msgspec.Raw(body) for body in bodies])

    def split(self, body: bytes) -> list[bytes]:
        """Return the bodies of a list's items without decoding them, or raise CorruptRecord."""
        return [bytes(item) for item in _items(body)]

    def unpack_items(
        self, record: bytes, low: int, high: int, *, context: tuple[str, ...] = ()
    ) -> list[Any]:
        """Return the items from `low` to `high` of a packed list, decoding no others."""
        return [_decode(item) for item in _items(self._body(record, context))[low:high]]

    def seal(self, body: bytes, *, context: tuple[str, ...] = ()) -> bytes:
        """Return a body as a record that opens only unchanged and in the same context."""
        if len(body) > self.limits.record_bytes:
            raise arguments.too_large("record", len(body), self.limits.record_bytes, "record_bytes")
        flags = _ENCRYPTED if self._cipher else 0
        if self._zstd and len(body) >= _COMPRESS_BYTES_MIN:
            compressed = self._zstd.compressor(len(body)).compress(body)
            if len(compressed) < len(body):
                body, flags = compressed, flags | _ZSTD
        header = _HEADERS[flags]
        bound = header + _encoder.encode(context)
        if self._cipher:
            body = self._cipher.encrypt(body, bound)
        checksum = xxh3_128(bound)
        checksum.update(body)
        return b"".join((header, checksum.digest(), body))

    def unseal(self, record: bytes, *, context: tuple[str, ...] = ()) -> bytes:
        """Return the body of a record, or raise CorruptRecord if it is damaged or was moved.

        Raises StoreError if a key, a cipher or a package is missing.
        """
        return bytes(self._body(record, context))

    def _body(self, record: bytes, context: tuple[str, ...]) -> bytes | memoryview:
        """Return a view of the body: copying a large one would cost as much as checking it."""
        if len(record) <= _BODY_AT or record[0] != _MAGIC or record[1] == 0:
            raise _corrupt(context, "is truncated or overwritten")
        version, flags = record[1], record[2]
        body: bytes | memoryview = memoryview(record)[_BODY_AT:]
        if version > _VERSION:
            raise _corrupt(
                context,
                f"has format version {version} and this Holdfast reads version {_VERSION}: a newer "
                "Holdfast wrote it (upgrade), or it is damaged",
            )
        bound = record[:_CHECKSUM_AT] + _encoder.encode(context)
        checksum = xxh3_128(bound)
        checksum.update(body)
        if checksum.digest() != record[_CHECKSUM_AT:_BODY_AT]:
            raise _corrupt(context, "does not match its checksum: it is damaged, or was moved here")
        if flags >= len(_HEADERS):
            raise _corrupt(context, f"has unknown flags {flags:#04x}: a newer Holdfast wrote it")
        if flags & _ENCRYPTED:
            if not self._cipher:
                place = _place(context)
                problem = f"The record of {place} is encrypted; open the store with its cipher."
                raise StoreError(problem, place=place)
            body = self._cipher.decrypt(bytes(body), bound)
        elif self._cipher:
            raise _corrupt(
                context,
                "is not encrypted, but this store has a cipher: plaintext is refused because it "
                "could have been forged",
            )
        return self._expand(body) if flags & _ZSTD else body

    def _expand(self, body: bytes | memoryview) -> bytes:
        zstd, limit = self._zstd or _zstd(), self.limits.record_bytes
        try:
            size = zstd.content_size(body)
            if not 0 <= size <= limit:
                raise CorruptRecord(
                    f"The compressed record would expand to more than {limit:,} bytes "
                    "(Limits.record_bytes), or to an unknown size.",
                    limit=limit,
                    actual=size,
                )
            return zstd.decompressor.decompress(body, allow_extra_data=False)
        except zstd.error as error:
            raise CorruptRecord(f"The record cannot be decompressed: {error}.") from error


def check(value: object, limits: Limits = DEFAULT_LIMITS, *, name: str = "value") -> None:
    """Raise InvalidValue or LimitExceeded, with the path, unless the value can be stored."""
    _encode(value, limits, name)


def canonical(value: object, limits: Limits = DEFAULT_LIMITS, *, name: str = "value") -> bytes:
    """Return the canonical form; raise InvalidValue if two keys have the same normal form."""
    _encode(value, limits, name)
    # ASCII text is in normal form, and the JSON encoding is ASCII iff all text is.
    try:
        if _json_encoder.encode(value).isascii():
            return _ordered_encoder.encode(value)
    except OverflowError:
        pass
    return _messagepack(_normal(value, name))


def exact_forms(values: Sequence[object]) -> memoryview | None:
    """Return the exact forms of values that may be anything; None if they cannot be plain data."""
    try:
        form = marshal.dumps(list(values), _EXACT_VERSION)
    except (ValueError, MemoryError):
        return None
    return memoryview(form)[_EXACT_LIST_HEADER_BYTES:]


def with_first(text: str, form: bytes) -> bytes:
    """Return the canonical form of a list of fewer than 15 items with a text prepended."""
    return b"".join((bytes((form[0] + 1,)), _messagepack(_composed(text)), form[1:]))


def digest(value: object, limits: Limits = DEFAULT_LIMITS, *, name: str = "value") -> str:
    """Return the SHA-256 of a version prefix and the canonical form, in hexadecimal."""
    return sha256(_CANONICAL_PREFIX + canonical(value, limits, name=name)).hexdigest()


def from_json(text: str | bytes, limits: Limits = DEFAULT_LIMITS, *, name: str = "value") -> Any:
    """Return the value of a JSON text (RFC 8259, UTF-8); InvalidValue names the line or path.

    Duplicate keys, NaN, Infinity, numbers too large for a float, lone surrogates and text after the
    value are refused; too much depth, size or digits raises LimitExceeded.
    """
    if len(text) > limits.record_bytes:
        raise arguments.too_large(
            f"the JSON text of {name}", len(text), limits.record_bytes, "record_bytes"
        )
    try:
        value = _json_decoder.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise arguments.too_deep(name, limits.depth) from None
    except ValueError as error:
        problem = f"{name} is not JSON text: {error}."
        raise InvalidValue(problem, path=name) from None
    check(value, limits, name=name)
    return value


def to_json(value: object, *, indent: int | None = None, name: str = "value") -> str:
    """Return JSON that from_json reads as the same value; refuses what is not plain data.

    The size is not limited and the depth is 512, so that answers can contain several values.
    """
    arguments.measure(value, name, sys.maxsize, _LOAD_DEPTH_MAX)
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
        text.encode()
    except ValueError:
        arguments.refuse_scalars(value, name, sys.get_int_max_str_digits() or _DIGITS_MAX)
        raise
    return text


def _encode(
    value: object,
    limits: Limits,
    path: arguments.ValuePath,
    forms: list[bytes] | None = None,
) -> bytes:
    room = arguments.measure(value, path, limits.value_bytes, limits.depth)
    if room < 0:
        raise arguments.too_large(
            arguments.shown_path(path), limits.value_bytes - room, limits.value_bytes, "value_bytes"
        )
    if forms is not None:
        # Before it is encoded: if another thread changes it meanwhile, the next save sees that.
        forms.append(marshal.dumps(value, _EXACT_VERSION))  # type: ignore[arg-type]
    try:
        body = _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        arguments.refuse_scalars(value, path, limits.digits)
        body = _messagepack(value)
    if len(body) > limits.value_bytes:
        raise arguments.too_large(
            arguments.shown_path(path), len(body), limits.value_bytes, "value_bytes"
        )
    return body


def _messagepack(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except OverflowError:
        return _encoder.encode(_widened(value))


def _widened(value: object) -> object:
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_widened(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_INTEGER_EXTENSION, _integer_bytes(value))
    return value


def _integer_bytes(number: int) -> bytes:
    bits = (~number if number < 0 else number).bit_length()
    return number.to_bytes(bits // 8 + 1, "big", signed=True)


def _extension(code: int, data: memoryview) -> int:
    number = int.from_bytes(data, "big", signed=True)
    is_wide = not -(2**63) <= number < 2**64
    if code != _INTEGER_EXTENSION or not is_wide or bytes(data) != _integer_bytes(number):
        raise CorruptRecord(f"The record has an unknown or malformed extension of type {code}.")
    return number


def _items(body: bytes | memoryview) -> list[msgspec.Raw]:
    try:
        return _items_decoder.decode(body)
    except _UNREADABLE as error:
        raise CorruptRecord(f"The stored list cannot be read: {error}.") from error


def _decode(body: bytes | memoryview | msgspec.Raw) -> Any:
    try:
        return _plain_decoder().decode(body)
    except msgspec.ValidationError:
        pass
    except _UNREADABLE as error:
        raise CorruptRecord(f"The record cannot be read: {error}.") from error
    # Deeper data, integers beyond 64 bits, and corrupt data need the slow path.
    try:
        value = _any_decoder.decode(body)
        arguments.measure(value, "record", sys.maxsize, _LOAD_DEPTH_MAX)
    except (*_UNREADABLE, InvalidArgument) as error:
        raise CorruptRecord(f"The record is not plain data: {error}") from error
    return value


@cache
def _plain_decoder() -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for up to seven levels of plain data, the fast path."""
    finite = msgspec.Meta(ge=-arguments.FLOAT_MAX, le=arguments.FLOAT_MAX)
    scalar: Any = None | bool | int | Annotated[float, finite] | str
    kind = scalar
    for _ in range(7):
        kind = scalar | list[kind] | dict[str, kind]  # type: ignore[valid-type]
    return msgspec.msgpack.Decoder(kind)


_encoder: Final = msgspec.msgpack.Encoder()
_ordered_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_json_encoder: Final = msgspec.json.Encoder()
_any_decoder: Final = msgspec.msgpack.Decoder(ext_hook=_extension)
_items_decoder: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _normal(value: object, path: arguments.ValuePath) -> object:
    if isinstance(value, str):
        return _composed(value)
    if isinstance(value, list):
        return [_normal(item, (path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    pairs = sorted((_composed(key), key) for key in value)
    normal = {key: _normal(value[original], (path, original)) for key, original in pairs}
    if len(normal) < len(value):
        problem = f"{arguments.shown_path(path)} has two keys with the same Unicode normal form C."
        raise InvalidValue(problem, path=arguments.shown_path(path))
    return normal


def _composed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _json_object(pairs: list[tuple[str, object]]) -> object:
    value: dict[str, object] = {}
    for key, item in pairs:
        if key in value:
            return arguments.Repeated(key)
        value[key] = item
    return value


def _json_integer(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= _DIGITS_MAX else 10**_DIGITS_MAX


_json_decoder: Final = json.JSONDecoder(object_pairs_hook=_json_object, parse_int=_json_integer)


class _Zstd(threading.local):
    """A compressor and a decompressor per thread; zstandard's are not thread-safe."""

    def __init__(self) -> None:
        from .extras import required

        with required("zstd", "compress"):
            import zstandard
        self.error = zstandard.ZstdError
        self.content_size = zstandard.frame_content_size
        self.decompressor = zstandard.ZstdDecompressor()
        self._fast = zstandard.ZstdCompressor(level=1)
        self._small = zstandard.ZstdCompressor(level=5)

    def compressor(self, size_bytes: int) -> Any:
        """Return the compressor for a body; a higher level pays only for large ones."""
        return self._small if size_bytes >= _COMPRESS_HARDER_BYTES_MIN else self._fast


@cache
def _zstd() -> _Zstd:
    return _Zstd()


def _corrupt(context: tuple[str, ...], problem: str) -> CorruptRecord:
    place = _place(context)
    return CorruptRecord(f"The record of {place} {problem}.", place=place)


def _place(context: tuple[str, ...]) -> str:
    return "/".join(context) or "an unnamed place"
