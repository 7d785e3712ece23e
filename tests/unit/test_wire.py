"""What a client sends is decoded in a time and a space of the order of its size."""

from __future__ import annotations

import random
import sys
from typing import Any

import msgspec
import pytest
from msgspec.msgpack import Ext, encode

from holdfast.errors import InvalidArgument
from holdfast.wire import Wire, has_text_keys

# Python's hash of a whole number is its rest by this one.
MODULUS = sys.hash_info.modulus
MANY = 16


@pytest.fixture
def wire() -> Wire:
    return Wire(None)


def numbers() -> list[Ext]:
    """Numbers of one hash, as they travel."""
    found = [(MODULUS * (8 + each)).to_bytes(9, "big") for each in range(MANY)]
    return [Ext(1, encode(each)) for each in found]


def map_of(keys: list[Any]) -> bytes:
    return (
        b"\xde" + len(keys).to_bytes(2, "big") + b"".join(encode(each) + b"\x00" for each in keys)
    )


def extension(code: int, parts: Any) -> bytes:
    return encode(Ext(code, encode(parts)))


SENT = {
    "a set": extension(3, numbers()),
    "a dict": extension(4, [[each, 0] for each in numbers()]),
    "a set of decimal numbers": extension(
        3, [Ext(8, encode(str(MODULUS * each))) for each in range(MANY)]
    ),
    "a set of tuples": extension(3, [Ext(2, encode([each])) for each in range(MANY)]),
    "a map": map_of(numbers()),
    "a map by arrays": map_of([[0, each] for each in range(MANY)]),
    "a map in a list": b"\x91" + map_of(numbers()),
    "a map in a map": b"\x81\xa1k" + map_of(numbers()),
    "a map in a tuple": encode(Ext(2, b"\x91" + map_of(numbers()))),
}


@pytest.mark.parametrize("name", SENT)
def test_many_keys_that_may_have_one_hash_are_refused(wire: Wire, name: str) -> None:
    with pytest.raises(InvalidArgument, match="what was sent has a"):
        wire.decode(SENT[name])


def test_few_of_them_arrive(wire: Wire) -> None:
    mixed: dict[Any, int] = {MODULUS * 9: 1, (1, 2): 2, None: 3, "text": 4, 5: 5}
    assert wire.decode(wire.encode(mixed)) == mixed
    assert wire.decode(wire.encode(set(mixed))) == set(mixed)
    many = {each: str(each) for each in range(1_000)}
    assert wire.decode(wire.encode(many)) == many


def test_what_did_not_travel_takes_little_room(wire: Wire) -> None:
    found = wire.decode(encode([Ext(9, encode(f"Kind{each % 200}")) for each in range(1_000)]))
    assert {type(each).__name__ for each in found} == {
        "object", *(f"Kind{each}" for each in range(100))
    }  # fmt: skip
    assert len({type(each) for each in found}) == 101


def test_the_keys_of_any_data_are_found() -> None:
    chance = random.Random(5)

    def made(depth: int) -> Any:
        kind = chance.randrange(9 if depth else 7)
        length = chance.choice([0, 1, 15, 16, 31, 32, 255, 256])
        if kind == 0:
            return chance.choice([None, True, False, 1.5])
        if kind == 1:
            return chance.choice([1, -1]) * chance.getrandbits(chance.randint(1, 63))
        if kind in {2, 3}:
            return "\u07c0" * length
        if kind == 4:
            return b"\xde" * length
        if kind in {5, 6}:
            return Ext(chance.randint(0, 10), b"\xdf" * chance.choice([1, 2, 4, 8, 16, length]))
        if kind == 7:
            return [made(depth - 1) for _ in range(length % 40)]
        return {f"k{each}": made(depth - 1) for each in range(length % 40)}

    for _ in range(300):
        value = made(3)
        assert has_text_keys(encode([value, "end"])), value
        assert has_text_keys(encode({"long" * 20_000: value})), value
        assert not has_text_keys(encode([value, {1: value}])), value
        assert not has_text_keys(encode({"a": value, "b": {b"": 0}})), value
        data = encode(value)
        assert isinstance(has_text_keys(data[: chance.randrange(len(data) + 1)]), bool)


def test_large_plain_data_arrives(wire: Wire) -> None:
    value = {f"k{each}": [each, {"x": "\u07c0" * each}, None] for each in range(100)}
    assert wire.decode(wire.encode([value, (value,)])) == [value, (value,)]
    with pytest.raises(InvalidArgument, match="cannot be read"):
        wire.decode(wire.encode(value)[:-1])
    assert msgspec.msgpack.decode(wire.encode(value)) == value


def test_a_message_of_too_many_parts_is_refused() -> None:
    sent = encode(4 * [Ext(2, encode([]))])
    assert Wire(None, extensions_max=4).decode(sent) == [(), (), (), ()]
    with pytest.raises(InvalidArgument, match="too many parts"):
        Wire(None, extensions_max=3).decode(sent)
