"""Plain data survives storage exactly; everything else is refused, and damage is found."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import threading
import tracemalloc
import unicodedata
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from holdfast.codec import (
    Codec,
    Limits,
    canonical,
    check,
    digest,
    from_json,
    to_json,
    with_first,
)
from holdfast.errors import (
    CorruptRecord,
    HoldfastError,
    InvalidArgument,
    InvalidValue,
    LimitExceeded,
    StoreError,
)

PLACE = ("hf_entries", "root-1", "7")

text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**60), max_value=10**60)
    | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**4095])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 1.0, 5e-324, sys.float_info.max])
    | text
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=40
)


def exact(value: object) -> object:
    """Return a form that is equal only for the same types, numbers and order of keys."""
    if isinstance(value, dict):
        return ("dict", [(exact(key), exact(item)) for key, item in value.items()])
    if isinstance(value, list):
        return ("list", [exact(item) for item in value])
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    return (type(value).__name__, value)


def nested(levels: int) -> Any:
    value: Any = "bottom"
    for _ in range(levels):
        value = [value]
    return value


def forged(body: bytes, *, flags: int = 0, version: int = 1, place: tuple[str, ...] = ()) -> bytes:
    """Return a record with a right digest around any bytes, as somebody else could write it."""
    header = bytes((0xC1, version, flags))
    context = msgspec.msgpack.encode(list(place))
    return header + xxhash.xxh3_128_digest(header + context + body) + body


# What loads is what was saved.


@given(values)
def test_every_value_loads_with_the_same_types_and_order(value: Any) -> None:
    codec = Codec()
    assert exact(codec.unpack(codec.pack(value))) == exact(value)
    assert exact(codec.decode(codec.encode(value))) == exact(value)


@given(values)
def test_every_value_loads_the_same_when_compressed(value: Any) -> None:
    codec = Codec(compression="zstd")
    padded = [value, "padding " * 40]
    record = codec.pack(padded, context=PLACE)
    assert record[2] == 1
    assert exact(codec.unpack(record, context=PLACE)) == exact(padded)


@given(values)
def test_every_value_reads_back_from_its_json(value: Any) -> None:
    assert exact(from_json(to_json(value))) == exact(value)
    assert exact(from_json(to_json(value, indent=2).encode())) == exact(value)


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, 1, 1.0, -0.0, "", [], {}, [[]], [{}], {"": None}, "\0", "👩‍🚀", 2**200],
    ids=repr,
)
def test_small_values_stay_distinct(value: Any) -> None:
    assert exact(Codec().unpack(Codec().pack(value))) == exact(value)


@pytest.mark.parametrize("levels", [1, 6, 7, 8, 64])
def test_levels_beyond_the_fast_decoder_load_too(levels: int) -> None:
    value = {"a": nested(levels - 1)}
    assert exact(Codec().unpack(Codec().pack(value))) == exact(value)


def test_a_record_starts_with_the_documented_header() -> None:
    body = Codec().encode({"a": [1, 2.5, None]})
    assert body == bytes.fromhex("81a16193") + b"\x01\xcb" + struct.pack(">d", 2.5) + b"\xc0"
    assert Codec().seal(body, context=PLACE) == forged(body, place=PLACE)


def test_integers_beyond_64_bits_are_extension_type_1() -> None:
    assert Codec().encode(2**64) == bytes((0xC7, 9, 1, 1)) + bytes(8)
    assert Codec().encode(-(2**63) - 1) == bytes((0xC7, 9, 1, 0xFF, 0x7F)) + b"\xff" * 7


def test_a_list_can_be_put_together_from_encoded_items_and_taken_apart() -> None:
    codec = Codec()
    for count in (0, 1, 15, 16, 70_000):
        items = [{"n": number, "big": 2**70} if number < 3 else number for number in range(count)]
        bodies = codec.encode_each(items)
        assert bodies == [codec.encode(item) for item in items]
        assert codec.decode(codec.join(bodies)) == items
        assert codec.split(codec.join(bodies)) == bodies


def test_some_items_of_a_packed_list_are_read_and_all_of_it_is_checked() -> None:
    codec = Codec()
    items = [{"n": number, "big": 2**70} for number in range(64)]
    record = codec.pack(items, context=("here",))
    for low, high in ((0, 64), (54, 64), (0, 10), (10, 20), (60, 99), (64, 64)):
        assert codec.unpack_items(record, low, high, context=("here",)) == items[low:high]
    damaged = record[:30] + bytes([record[30] ^ 1]) + record[31:]
    for wrong, context in ((damaged, "here"), (record, "there")):
        with pytest.raises(CorruptRecord, match="does not match its checksum"):
            codec.unpack_items(wrong, 63, 64, context=(context,))


def test_the_refusal_of_one_item_names_its_index() -> None:
    with pytest.raises(InvalidValue) as caught:
        Codec().encode_each([{"a": 1}, {"a": {1}}], name="transcript")
    assert caught.value.path == "transcript[1].a"


# What is not plain data is refused before anything is encoded.


class Colour(enum.StrEnum):
    RED = "red"


class OldColour(str, enum.Enum):  # noqa: UP042
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Plain(enum.Enum):
    A = "a"


class Text(str):
    __slots__ = ()


class Integer(int):
    pass


class Real(float):
    pass


class Items(list[int]):
    pass


class Mapping(dict[str, int]):
    pass


class Packed(msgspec.Struct):
    a: int


class Model:
    class BaseModel:
        pass

    class Order(BaseModel):
        pass


@dataclasses.dataclass
class Point:
    x: int


Pair = collections.namedtuple("Pair", "a b")

NOT_FINITE = "JSON has only finite numbers within the range of a float"


def of_type(name: str, hint: str = "") -> str:
    return f"is of type {name}, which is not plain JSON data{hint and f'; {hint}'}."


async def answer() -> None:
    """Do nothing; only its coroutine is of interest."""


def closed_coroutine() -> object:
    coroutine = answer()
    coroutine.close()
    return coroutine


REFUSED: list[tuple[object, str]] = [
    (math.nan, f"is nan: {NOT_FINITE}."),
    (math.inf, f"is inf: {NOT_FINITE}."),
    (-math.inf, f"is -inf: {NOT_FINITE}."),
    ("\ud800", "has a lone surrogate: it is not Unicode text."),
    ("ok \udfff", "has a lone surrogate: it is not Unicode text."),
    ((), of_type("tuple", "use list() of it")),
    ((1, 2), of_type("tuple", "use list() of it")),
    (Pair(1, 2), of_type("Pair", "use list() of it")),
    ({1}, of_type("set", "use a sorted list")),
    (frozenset(), of_type("frozenset", "use a sorted list")),
    (b"", of_type("bytes", "use text, for example base64")),
    (bytearray(b"a"), of_type("bytearray", "use text, for example base64")),
    (memoryview(b"a"), of_type("memoryview", "use text, for example base64")),
    (
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        of_type("datetime", "use its isoformat()"),
    ),
    (datetime.date(2026, 1, 1), of_type("date", "use its isoformat()")),
    (datetime.time(1), of_type("time", "use its isoformat()")),
    (datetime.timedelta(1), of_type("timedelta", "use its total_seconds()")),
    (decimal.Decimal("1.5"), of_type("Decimal", "use str() of it")),
    (fractions.Fraction(1, 2), of_type("Fraction", "use str() of it")),
    (uuid.UUID(int=1), of_type("UUID", "use str() of it")),
    (pathlib.PurePosixPath("a"), of_type("PurePosixPath", "use str() of it")),
    (1j, of_type("complex")),
    (Colour.RED, of_type("Colour", "use its .value")),
    (OldColour.RED, of_type("OldColour", "use its .value")),
    (Level.LOW, of_type("Level", "use its .value")),
    (Plain.A, of_type("Plain", "use its .value")),
    (Text("a"), of_type("Text", "use str() of it")),
    (Integer(1), of_type("Integer", "use int() of it")),
    (Real(1.0), of_type("Real", "use float() of it")),
    (Items([1]), of_type("Items", "use list() of it")),
    (Mapping(a=1), of_type("Mapping", "use dict() of it")),
    (collections.OrderedDict(a=1), of_type("OrderedDict", "use dict() of it")),
    (collections.defaultdict(int), of_type("defaultdict", "use dict() of it")),
    (collections.deque([1]), of_type("deque", "use list() of it")),
    (range(3), of_type("range", "use list() of it")),
    ({}.keys(), of_type("dict_keys", "use list() of it")),
    ((n for n in [1]), of_type("generator", "use list() of it")),
    (closed_coroutine(), of_type("coroutine", "await it first")),
    (Point(1), of_type("Point", "use dataclasses.asdict() of it")),
    (Packed(1), of_type("Packed", "use msgspec.to_builtins() of it")),
    (Model.Order(), of_type("Model.Order", 'use its model_dump(mode="json")')),
    (msgspec.Raw(b"\xc0"), of_type("Raw")),
    (msgspec.msgpack.Ext(1, b"a"), of_type("Ext")),
    (object(), of_type("object")),
    (len, of_type("builtin_function_or_method")),
    (int, of_type("type")),
    (..., of_type("ellipsis")),
    ({1: 2}, "has a key of type int; keys must be of type str."),
    ({None: 2}, "has a key of type NoneType; keys must be of type str."),
    ({True: 2}, "has a key of type bool; keys must be of type str."),
    ({1.5: 2}, "has a key of type float; keys must be of type str."),
    ({("a",): 2}, "has a key of type tuple; keys must be of type str."),
    ({b"a": 2}, "has a key of type bytes; keys must be of type str."),
    ({Colour.RED: 2}, "has a key of type Colour; keys must be of type str."),
    ({Text("a"): 2}, "has a key of type Text; keys must be of type str."),
]

EVERY_WRITER: list[Callable[[object], object]] = [
    check,
    Codec().encode,
    Codec().pack,
    canonical,
    digest,
    to_json,
]


@pytest.mark.parametrize(
    ("offender", "problem"),
    REFUSED,
    # A worker of pytest-xdist must find the same names, and some of these show their address.
    ids=[f"{number}-{type(offender).__name__}" for number, (offender, _) in enumerate(REFUSED)],
)
def test_each_kind_that_is_not_plain_data_is_refused_by_name(
    offender: object, problem: str
) -> None:
    for writer in EVERY_WRITER:
        for value, path in [
            (offender, "value"),
            ([0, "x", offender], "value[2]"),
            ({"items": [{}, {"a b": offender}]}, 'value.items[1]["a b"]'),
        ]:
            with pytest.raises(InvalidValue) as caught:
                writer(value)
            assert str(caught.value) == f"{path} {problem}"
            assert caught.value.path == path
            assert caught.value.http_status == 422


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("plain_1", "state.plain_1"),
        ("a b", 'state["a b"]'),
        ("1", 'state["1"]'),
        ("", 'state[""]'),
        ('q"\n', 'state["q\\"\\n"]'),
        ("é", 'state["\\u00e9"]'),
        ("k" * 60, f"state.{'k' * 60}"),
        ("k" * 61, f'state["{"k" * 57}..."]'),
    ],
)
def test_a_path_is_readable_and_bounded_whatever_the_keys(key: str, path: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        check({key: {1}}, name="state")
    assert caught.value.path == path


def test_a_lone_surrogate_in_a_key_is_refused_with_a_printable_path() -> None:
    for writer in EVERY_WRITER:
        with pytest.raises(InvalidValue) as caught:
            writer({"a": [{"\ud83d": 1}]})
        assert caught.value.path == 'value.a[0]["\\ud83d"]'


def test_a_surrogate_beside_a_large_integer_is_still_refused() -> None:
    for value in ([2**70, "\ud800"], ["\ud800", 2**70]):
        with pytest.raises(InvalidValue, match="lone surrogate"):
            Codec().pack(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    items: list[object] = [1]
    items.append(items)
    mapping: dict[str, object] = {}
    mapping["me"] = [mapping]
    for value in (items, mapping):
        for writer in EVERY_WRITER:
            with pytest.raises(LimitExceeded, match="or contains itself"):
                writer(value)


def test_a_few_lists_that_stand_for_billions_are_refused_at_once() -> None:
    value: list[object] = ["ha"] * 100
    for _ in range(20):
        value = [value] * 100
    with pytest.raises(LimitExceeded) as caught:
        check(value)
    assert caught.value.limit == 1_048_576
    assert 1_048_576 < caught.value.actual < 1_048_576 + 101


# Limits hold at the limit and not one beyond it.


def test_the_depth_limit() -> None:
    check(nested(64))
    check({"a": nested(63)})
    with pytest.raises(LimitExceeded) as caught:
        check(nested(65))
    assert caught.value.fields == {"limit": 64, "actual": 65, "path": "value" + "[0]" * 64}
    check(nested(3), Limits(depth=3))
    with pytest.raises(LimitExceeded) as caught:
        Codec(Limits(depth=3)).encode_each([1, nested(4)], name="x")
    assert caught.value.fields == {"limit": 3, "actual": 4, "path": "x[1][0][0][0]"}


def test_the_depth_limit_is_the_same_when_empty_containers_are_the_deepest() -> None:
    check([[[]]], Limits(depth=3))
    deeper: list[object] = [[[[[]]]], [[[{}]]]]
    for value in deeper:
        with pytest.raises(LimitExceeded):
            check(value, Limits(depth=3))


def test_the_size_limit_counts_encoded_bytes() -> None:
    codec = Codec(Limits(value_bytes=100))
    assert len(codec.encode("x" * 98)) == 100
    for writer in (codec.encode, codec.pack):
        with pytest.raises(LimitExceeded) as caught:
            writer("x" * 99, name="state.k")
        assert caught.value.fields == {"limit": 100, "actual": 101, "path": "state.k"}
        assert caught.value.http_status == 413
    with pytest.raises(LimitExceeded):
        check("é" * 50, Limits(value_bytes=100))


def test_the_size_limit_holds_for_large_integers_and_for_many_nodes() -> None:
    limits = Limits(value_bytes=100)
    check(2 ** (8 * 96), limits)
    with pytest.raises(LimitExceeded):
        check(2 ** (8 * 98), limits)
    check([0] * 97, limits)
    with pytest.raises(LimitExceeded) as caught:
        check([0] * 101, limits)
    assert caught.value.fields == {"limit": 100, "actual": 101, "path": "value"}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_digits_limit(sign: int) -> None:
    for limits in (Limits(), Limits(digits=20)):
        check({"n": sign * (10**limits.digits - 1)}, limits)
        with pytest.raises(LimitExceeded) as caught:
            check({"n": sign * 10**limits.digits}, limits)
        assert caught.value.fields == {
            "limit": limits.digits,
            "actual": limits.digits + 1,
            "path": "value.n",
        }


def test_the_record_limit() -> None:
    codec = Codec(Limits(value_bytes=50, record_bytes=120))
    items = ["x" * 37, "x" * 37, "x" * 39]
    assert codec.unpack(codec.seal(codec.join(codec.encode_each(items)))) == items
    with pytest.raises(LimitExceeded) as caught:
        codec.seal(codec.join(codec.encode_each(["x" * 37, "x" * 37, "x" * 40])))
    assert caught.value.fields == {"limit": 120, "actual": 121, "path": "record"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"value_bytes": 0},
        {"value_bytes": -1},
        {"value_bytes": 1.5},
        {"value_bytes": True},
        {"value_bytes": None},
        {"value_bytes": 67_108_865},
        {"record_bytes": None},
        {"record_bytes": 2**31},
        {"depth": 0},
        {"depth": 257},
        {"digits": 19},
        {"digits": 4_301},
        {"keys_per_root": 0},
        {"batch_operations": "many"},
    ],
    ids=repr,
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"^Limits\."):
        Limits(**wrong)


def test_the_default_limits_are_those_of_the_specification() -> None:
    limits = Limits()
    assert (limits.value_bytes, limits.depth) == (1_048_576, 64)
    assert (limits.keys_per_root, limits.batch_operations) == (10_000, 1_000)


# Damage is found, and never becomes a value.

SAMPLE = {"id": "m1", "text": "Grüße " * 40, "n": [1, 2.5, None, True, 2**70]}


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_no_flipped_bit_goes_unnoticed(compression: Any) -> None:
    codec = Codec(compression=compression)
    record = codec.pack(SAMPLE, context=PLACE)
    assert record[2] == (1 if compression == "zstd" else 0)
    for index in range(len(record)):
        for bit in range(8):
            damaged = bytearray(record)
            damaged[index] ^= 1 << bit
            with pytest.raises(CorruptRecord):
                codec.unpack(bytes(damaged), context=PLACE)


def test_no_cut_or_lengthened_record_goes_unnoticed() -> None:
    codec = Codec()
    record = codec.pack(SAMPLE)
    for length in range(len(record)):
        with pytest.raises(CorruptRecord):
            codec.unpack(record[:length])
    for tail in (b"\0", b"\xc0", record):
        with pytest.raises(CorruptRecord):
            codec.unpack(record + tail)


@pytest.mark.parametrize(
    "moved",
    [
        (),
        ("hf_entries", "root-1"),
        ("hf_entries", "root-1", "8"),
        ("hf_entries", "root-2", "7"),
        ("hf_events", "root-1", "7"),
        ("hf_entries", "root-17", ""),
        ("hf_entriesroot-1", "7"),
        ("root-1", "hf_entries", "7"),
        ("hf_entries", "root-1", "7", ""),
    ],
)
def test_a_record_does_not_open_in_another_place(moved: tuple[str, ...]) -> None:
    record = Codec().pack(SAMPLE, context=PLACE)
    with pytest.raises(
        CorruptRecord, match="does not match its checksum: it is damaged, or was moved here"
    ):
        Codec().unpack(record, context=moved)


def test_bytes_that_are_no_record_say_so() -> None:
    for bytes_ in (b"", b"\xc1", Codec().encode(SAMPLE), b"\xc1\0\0" + bytes(40)):
        with pytest.raises(CorruptRecord, match="is truncated or overwritten"):
            Codec().unpack(bytes_)


def test_a_record_of_a_newer_version_says_to_upgrade() -> None:
    with pytest.raises(CorruptRecord, match=r"version 2 .*: a newer Holdfast wrote it"):
        Codec().unpack(forged(b"\xc0", version=2))


@pytest.mark.parametrize("flags", [4, 8, 64, 128, 5])
def test_unknown_flags_say_to_upgrade(flags: int) -> None:
    with pytest.raises(CorruptRecord, match=r"unknown flags 0x.*: a newer Holdfast wrote it"):
        Codec().unpack(forged(b"\xc0", flags=flags))


FORGED_BODIES = {
    "unknown extension": b"\xd4\x05a",
    "unknown extension with the bytes of an integer": b"\xc7\x09\x05\x01" + bytes(8),
    "unknown extension inside": b"\x91\x81\xa1a\xd4\x02a",
    "timestamp": b"\xd6\xff\0\0\0\1",
    "timestamp of 12 bytes": b"\x91\xc7\x0c\xff" + bytes(12),
    "binary": b"\xc4\x01a",
    "integer key": b"\x81\x01\x01",
    "nil key": b"\x81\xc0\x01",
    "list as key": b"\x81\x90\x01",
    "NaN": b"\xcb\x7f\xf8" + bytes(6),
    "Infinity": b"\x91\xcb\x7f\xf0" + bytes(6),
    "negative Infinity of 32 bits": b"\xca\xff\x80\0\0",
    "text that is not UTF-8": b"\xa1\xff",
    "text with a surrogate": b"\xa3\xed\xa0\x80",
    "key that is not UTF-8": b"\x81\xa1\xff\x01",
    "text that is not UTF-8 beside a large integer": b"\x92\xc7\x09\x01\x01"
    + bytes(8)
    + b"\xa1\xff",
    "bytes after the value": b"\xc0\xc0",
    "cut list": b"\x92\xc0",
    "list of four billion": b"\xdd\xff\xff\xff\xff",
    "text of four billion": b"\xdb\xff\xff\xff\xffa",
    "unused code": b"\xc1",
    "100,000 levels": b"\x91" * 100_000 + b"\xc0",
    "600 levels": b"\x91" * 600 + b"\xc0",
    "integer that fits in 8 bits": b"\xd4\x01\x05",
    "integer that just fits in 64 bits": b"\xc7\x09\x01\0" + b"\xff" * 8,
    "integer with a needless byte": b"\xc7\x0a\x01\0\x01" + bytes(8),
    "integer without bytes": b"\xc7\x00\x01",
}


@pytest.mark.parametrize("body", FORGED_BODIES.values(), ids=FORGED_BODIES.keys())
def test_a_forged_record_is_corrupt_and_never_another_type(body: bytes) -> None:
    with pytest.raises(CorruptRecord):
        Codec().unpack(forged(body))
    with pytest.raises(CorruptRecord):
        Codec().decode(body)


def test_a_forged_list_cannot_be_taken_apart() -> None:
    for body in (b"\xc0", b"\x92\xc0", b"\x80", b"", b"\x91" + b"\x91" * 100_000):
        with pytest.raises(CorruptRecord, match="stored list cannot be read"):
            Codec().split(body)
        with pytest.raises(CorruptRecord, match="stored list cannot be read"):
            Codec().unpack_items(Codec().seal(body or b"\xc3"), 0, 1)


@given(st.binary(max_size=60))
def test_any_bytes_load_as_plain_data_or_not_at_all(body: bytes) -> None:
    try:
        value = Codec().decode(body)
    except CorruptRecord:
        return
    check(value)


# Compression.


def test_compression_is_used_only_where_it_helps() -> None:
    codec = Codec(compression="zstd")
    long, short = "a" * 10_000, "a" * 100
    noise = int.from_bytes(hashlib.shake_256(b"").digest(1_000))
    assert len(codec.pack(long)) < 100
    assert [codec.pack(value)[2] for value in (long, short, noise)] == [1, 0, 0]
    for value in (long, short, noise):
        assert codec.unpack(codec.pack(value)) == value


def test_a_store_without_compression_reads_compressed_records_and_the_reverse() -> None:
    assert Codec().unpack(Codec(compression="zstd").pack(SAMPLE)) == SAMPLE
    assert Codec(compression="zstd").unpack(Codec().pack(SAMPLE)) == SAMPLE


def lying_frame(promised: int) -> bytes:
    """Return a zstd frame that promises a size and holds a run of 128 KiB of zeros many times."""
    magic_and_descriptor = bytes.fromhex("28b52ffd") + b"\xe0"
    blocks = (((128 * 1024) << 3) | 0b010).to_bytes(3, "little") + b"\0"
    last = (1 << 3 | 0b011).to_bytes(3, "little") + b"\0"
    return magic_and_descriptor + promised.to_bytes(8, "little") + blocks * 4_000 + last


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor().compress(bytes(1 << 28)),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\xa1a" * 500),
        lying_frame(2**60),
        lying_frame(1_000),
        lying_frame(4_000 * 128 * 1024 + 1),
        b"\0" * 50,
        zstandard.ZstdCompressor().compress(b"\xc0") + b"\0",
        zstandard.ZstdCompressor().compress(b"\xc0") * 2,
        zstandard.ZstdCompressor().compress(b"\xc0")[:-1],
    ],
    ids=[
        "256 MiB",
        "no size",
        "promises 2**60",
        "promises too little",
        "promises 500 MiB",
        "zeros",
        "bytes after it",
        "two frames",
        "cut",
    ],
)
def test_a_decompression_bomb_is_refused_before_it_takes_memory(frame: bytes) -> None:
    codec = Codec(Limits(record_bytes=2_000_000))
    record = forged(frame, flags=1)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord):
            codec.unpack(record)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_the_record_limit_holds_for_what_a_record_expands_to() -> None:
    record = Codec(compression="zstd").pack("x" * 1_997)
    assert Codec(Limits(value_bytes=9, record_bytes=2_000)).unpack(record) == "x" * 1_997
    with pytest.raises(CorruptRecord, match="more than 1,999 bytes") as caught:
        Codec(Limits(value_bytes=9, record_bytes=1_999)).unpack(record)
    assert caught.value.fields == {"limit": 1_999, "actual": 2_000}


def test_threads_can_share_a_codec() -> None:
    codec = Codec(compression="zstd")
    start = threading.Barrier(4)
    loaded: list[bool] = []

    def work(number: int) -> None:
        words = hashlib.shake_256(bytes((number,))).hexdigest(1_000)
        value = [words[at : at + 50] for at in range(0, 1_900, 3)] * 10
        start.wait()
        loaded.extend(codec.unpack(codec.pack(value)) == value for _ in range(40))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [True] * 160


def test_a_missing_zstandard_names_the_install_command() -> None:
    script = """
import sys
sys.modules["zstandard"] = None
from holdfast.codec import Codec
from holdfast.errors import MissingPackage
for use in (lambda: Codec(compression="zstd"), lambda: Codec().unpack(bytes.fromhex(sys.argv[1]))):
    try:
        use()
    except MissingPackage as error:
        print(error)
"""
    record = Codec(compression="zstd").pack("x" * 500)
    done = subprocess.run(
        [sys.executable, "-c", script, record.hex()], capture_output=True, text=True, check=True
    )
    assert done.stdout == "zstd needs zstandard: pip install 'holdfast-agents[compress]'\n" * 2


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(InvalidArgument, match='must be "none" or "zstd"'):
        Codec(compression="gzip")  # type: ignore[arg-type]


# The canonical form.

NESTED = {"b": [1, 1.0, True, None], "a": {"é": "e\u0301", "": []}, "z": -(2**70), "f": -0.0}

GOLDEN: list[tuple[object, str, str]] = [
    (None, "c0", "09e877b9d68872708492539288807fcd6f504dff9cc9fb6afd75a42c0928c288"),
    (True, "c3", "f1de863c659510688290354020de5b03d6b938c3e9a8c6d89af66e5614c4acc4"),
    (1, "01", "dd18dbbdd56bd579ce88ec66535384d4c8c32c0d3b890778186e4c405e2b46c8"),
    (1.0, "cb3ff0000000000000", "c039186fc326a818adeb9e74e9a1ce97712d672f00a7e76bff776dc57a04c183"),
    (
        -0.0,
        "cb8000000000000000",
        "231bac4d0870aa113dfcf801c0499fe4df117e41dc3a3181050db3c4c6e2fa55",
    ),
    (-1, "ff", "fb1c00f275bf6ad848139d75a9399f00694a5647ddd066e110337e64b511d594"),
    (128, "cc80", "2132c6af236140d44d22bbb336ced190b72f0ce851a7e6b1f8e65ce83eb15dff"),
    (
        2**63,
        "cf8000000000000000",
        "9feca116b2c45d9e9eed49739d74a17585986a1c1a6d33be899f1c08d5c47dc8",
    ),
    (
        -(2**63),
        "d38000000000000000",
        "7dfa1ee5562c3451e42cf30b2a3a61cef3776632c98be24124d0f881b3637bdd",
    ),
    (
        2**64,
        "c70901010000000000000000",
        "bd36c9cedce5dc75ff1d4925aff60c6eceac918b0e44741e3c89775f74532ca4",
    ),
    (
        -(2**63) - 1,
        "c70901ff7fffffffffffffff",
        "f00e7787299b0c79fdec25288342298c162bad0dd95acfe3ee20abddee46a9c5",
    ),
    (
        -(2**71),
        "c70901800000000000000000",
        "5810a080f80721fb1686a508aa44f0e61bf0da16632243ce733837d7a0f1f33b",
    ),
    ("", "a0", "c117c49a86e500753a2466039545d5311535e12bee9183801cb76a36f1fb47c5"),
    ([], "90", "d85db77ebaa63a3fe37661d6e9426d2359d8bfe209e869b6bbaf65288ee7e873"),
    ({}, "80", "693d60c00fa42a078a1d13499ef8d2d130f05ff6d65fe1d1ee7849eff82795f5"),
    ("e\u0301", "a2c3a9", "db811c246ae07f51d313166d4975ced97ccba1edbd9bb0dc9b4e68c675913d39"),
    (
        "\u1112\u1161\u11ab",
        "a3ed959c",
        "c3a84e14da5c96f54136470e98ab304473494bcc9ea28615b8061efeafd5667b",
    ),
    (
        "x" * 32,
        "d920" + "78" * 32,
        "fb167cd789c54273b858235fda2d1b79b004399cccaa3fa3ce21cf82d121d244",
    ),
    (
        {"b": 1, "a": [], "é": {}},
        "83a16190a16201a2c3a980",
        "d84f7ed5fa1bce0bc0c7f53c73cf00bf6ea78a4ce5e8a9446c0c7a3ad8699e34",
    ),
    (
        NESTED,
        "84a16182a090a2c3a9a2c3a9a1629401cb3ff0000000000000c3c0a166cb8000"
        "000000000000a17ac70901c00000000000000000",
        "9db54962dfaf9c86ec8299acc1c286e256b565c2c544bd0e539038621f329501",
    ),
]


@pytest.mark.parametrize(("value", "form", "hexadecimal"), GOLDEN, ids=repr)
def test_the_canonical_form_never_changes(value: object, form: str, hexadecimal: str) -> None:
    assert canonical(value).hex() == form
    assert digest(value) == hexadecimal
    prefixed = b"holdfast canonical 1\0" + bytes.fromhex(form)
    assert hashlib.sha256(prefixed).hexdigest() == hexadecimal


@given(values, st.randoms())
def test_the_canonical_form_ignores_the_order_of_keys(value: Any, random: Any) -> None:
    def shuffled(part: Any) -> Any:
        if isinstance(part, list):
            return [shuffled(item) for item in part]
        if isinstance(part, dict):
            keys = random.sample(list(part), len(part))
            return {key: shuffled(part[key]) for key in keys}
        return part

    try:
        form = canonical(value)
    except InvalidValue:
        return
    assert canonical(shuffled(value)) == form


ascii_text = st.text(st.characters(max_codepoint=127))
ascii_values = st.recursive(
    scalars.filter(lambda scalar: not isinstance(scalar, str)) | ascii_text,
    lambda inner: st.lists(inner) | st.dictionaries(ascii_text, inner),
    max_leaves=40,
)


@given(values | ascii_values)
def test_the_canonical_form_is_the_body_of_the_normal_form(value: Any) -> None:
    def normal(part: Any) -> Any:
        if isinstance(part, str):
            return unicodedata.normalize("NFC", part)
        if isinstance(part, list):
            return [normal(item) for item in part]
        if isinstance(part, dict):
            return {normal(key): normal(part[key]) for key in sorted(part, key=normal)}
        return part

    try:
        form = canonical(value)
    except InvalidValue:
        return
    assert form == Codec().encode(normal(value))


@given(text | ascii_text, st.lists(values | ascii_values, max_size=14))
def test_a_text_can_be_put_before_the_canonical_form_of_a_list(first: str, items: Any) -> None:
    try:
        form = canonical(items)
    except InvalidValue:
        return
    assert with_first(first, form) == canonical([first, *items])


def test_canonical_keys_stand_in_the_order_of_their_utf8_bytes() -> None:
    keys = ["\uffff", "\U00010000", "z", "é", "a", "", "aa", "Z"]
    ordered = list(Codec().decode(canonical(dict.fromkeys(keys, 0))))
    assert ordered == sorted(keys, key=str.encode)
    assert ordered != sorted(keys, key=lambda key: key.encode("utf-16-be"))


def test_values_that_python_calls_equal_have_different_digests() -> None:
    different: list[object] = [1, 1.0, True, "1", [1], 0, 0.0, -0.0, False, None, "", [], {}, "0"]
    different += [2**64, float(2**64), {"a": 1}, {"a": 1.0}, {"a": True}, [[1], 2], [1, [2]]]
    assert len({digest(value) for value in different}) == len(different)


def test_text_that_looks_the_same_has_the_same_digest() -> None:
    assert digest({"e\u0301": "e\u0301"}) == digest({"é": "é"})
    assert digest("\u212b") == digest("Å")
    assert digest("ﬁ") != digest("fi")


def test_keys_that_are_one_after_normalisation_are_refused() -> None:
    with pytest.raises(InvalidValue) as caught:
        canonical({"a": [{"é": 1, "e\u0301": 2}]}, name="args")
    assert str(caught.value) == "args.a[0] has two keys with the same Unicode normal form C."
    assert caught.value.path == "args.a[0]"
    check({"é": 1, "e\u0301": 2})


def test_the_digest_is_the_same_in_every_process() -> None:
    script = "from holdfast.codec import digest, from_json; print(digest(from_json(input())))"
    printed = set()
    for seed in ("0", "1", "4242", "random"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=to_json(NESTED),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(done.stdout.strip())
    assert printed == {digest(NESTED)}


# JSON.

BAD_JSON: list[tuple[str | bytes, str]] = [
    ("", "value is not JSON text: Expecting value: line 1 column 1 (char 0)."),
    ("[1,\n 2,]", "value is not JSON text: "),
    ("{'a': 1}", "line 1 column 2"),
    ("[1] 2", "value is not JSON text: Extra data: line 1 column 5 (char 4)."),
    ("[1]\n\n]", "Extra data: line 3 column 1"),
    ("\ufeff[1]", "line 1 column 1"),
    ("[01]", "line 1 column 3"),
    ("[1.]", "line 1 column 3"),
    ("[.5]", "line 1 column 2"),
    ("[+1]", "line 1 column 2"),
    ("[0x10]", "line 1 column 3"),
    ("nul", "line 1 column 1"),
    ('"tab\there"', "Invalid control character at: line 1 column 5"),
    ('"\\x41"', "Invalid \\escape: line 1 column 2"),
    ('"open', "Unterminated string starting at: line 1 column 1"),
    ("[1 // comment\n]", "line 1 column 4"),
    (b'"\xff"', "'utf-8' codec can't decode byte 0xff in position 1"),
    (b'"\xed\xa0\x80"', "'utf-8' codec can't decode byte 0xed in position 1"),
    ("[1]".encode("utf-16"), "'utf-8' codec can't decode byte 0xff in position 0"),
    ("NaN", f"value is nan: {NOT_FINITE}."),
    ('{"a": [Infinity]}', f"value.a[0] is inf: {NOT_FINITE}."),
    ("[-Infinity]", f"value[0] is -inf: {NOT_FINITE}."),
    ('{"price": 1e400}', f"value.price is inf: {NOT_FINITE}."),
    ("[-1e400]", f"value[0] is -inf: {NOT_FINITE}."),
    ("[" + "9" * 400 + ".0]", f"value[0] is inf: {NOT_FINITE}."),
    ('{"a": 1, "a": 1}', 'value has the key "a" twice.'),
    ('{"x": [{"a": 1, "b": 2, "a": 3}]}', 'value.x[0] has the key "a" twice.'),
    ('{"a": 1, "\\u0061": 2}', 'value has the key "a" twice.'),
    ('{"a": {"k": 1, "k": 2}, "b": 1, "b": 2}', 'value has the key "b" twice.'),
    ('["\\ud800"]', "value[0] has a lone surrogate: it is not Unicode text."),
    ('["\\udc00\\ud800"]', "value[0] has a lone surrogate: it is not Unicode text."),
    ('{"\\ud83d": 1}', 'value["\\ud83d"] has a lone surrogate: it is not Unicode text.'),
]


@pytest.mark.parametrize(("source", "problem"), BAD_JSON, ids=lambda case: repr(case)[:40])
def test_json_that_is_not_exact_is_refused(source: str | bytes, problem: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        from_json(source)
    assert problem in str(caught.value)
    assert caught.value.path.startswith("value")


def test_json_that_is_exact_is_read() -> None:
    assert from_json(' {"a": [1, 2.0, -0.0, 1e2, "\\ud83d\\ude80", null]}\r\n') == {
        "a": [1, 2.0, -0.0, 100.0, "🚀", None]
    }
    assert exact(from_json("1E2")) == exact(100.0)
    assert from_json(b'"\xf0\x9f\x9a\x80"') == "🚀"


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("levels", [65, 900, 100_000])
def test_a_depth_bomb_is_a_limit_and_not_a_crash(opening: str, levels: int) -> None:
    closing = "".join({"[": "]", "{": "}"}.get(mark, "") for mark in reversed(opening))
    for bomb in (opening * levels + "0" + closing * levels, opening * 200_000):
        with pytest.raises(LimitExceeded) as caught:
            from_json(bomb)
        assert (caught.value.limit, caught.value.actual) == (64, 65)


def test_json_of_the_allowed_depth_is_read() -> None:
    assert to_json(from_json("[" * 64 + "]" * 64)) == "[" * 64 + "]" * 64


@pytest.mark.parametrize("sign", ["", "-"])
def test_json_integers_are_read_up_to_the_digits_limit(sign: str) -> None:
    assert from_json(f"[{sign}{'9' * 4_096}]") == [int(sign + "9" * 4_096)]
    assert from_json(f"[{sign}{'9' * 20}]", Limits(digits=20)) == [int(sign + "9" * 20)]
    for digits, limits in ((4_301, Limits()), (500_000, Limits()), (21, Limits(digits=20))):
        with pytest.raises(LimitExceeded) as caught:
            from_json(f'{{"n": {sign}{"9" * digits}}}', limits)
        assert caught.value.path == "value.n"
        assert caught.value.limit == limits.digits


def test_a_long_json_text_is_refused_before_it_is_read() -> None:
    limits = Limits(value_bytes=10, record_bytes=20)
    assert from_json("7".ljust(20), limits) == 7
    with pytest.raises(LimitExceeded, match=r"the JSON text of body takes 21 bytes or more"):
        from_json("7".ljust(21), limits, name="body")
    with pytest.raises(LimitExceeded):
        from_json('"0123456789"', limits)


def test_json_is_compact_or_indented_and_keeps_unicode() -> None:
    value = {"b": [1, "é"], "a": {}}
    assert to_json(value) == '{"b":[1,"é"],"a":{}}'
    assert to_json(value, indent=2) == '{\n  "b": [\n    1,\n    "é"\n  ],\n  "a": {}\n}'


def test_json_of_many_values_may_be_larger_than_one() -> None:
    many = {"values": [nested(64), "x" * 2_000_000]}
    assert json.loads(to_json(many)) == many
    with pytest.raises(LimitExceeded):
        to_json(nested(513))


def test_a_lowered_digits_limit_of_python_is_named() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        with pytest.raises(LimitExceeded) as caught:
            to_json({"n": 10**700})
        assert (caught.value.path, caught.value.limit) == ("value.n", 640)
        with pytest.raises(InvalidValue, match="640 digits"):
            from_json("9" * 700)
    finally:
        sys.set_int_max_str_digits(before)


def test_every_refusal_is_one_of_ours_and_is_plain_data_itself() -> None:
    for value in (math.nan, {1: 2}, nested(65), 10**5_000, "\ud800"):
        with pytest.raises(HoldfastError) as caught:
            check(value)
        assert from_json(to_json(caught.value.to_dict())) == caught.value.to_dict()


def test_an_encrypted_record_without_a_cipher_says_what_is_missing() -> None:
    with pytest.raises(StoreError, match="is encrypted; open the store with its cipher"):
        Codec().unpack(forged(b"anything", flags=2))
