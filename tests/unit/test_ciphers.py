"""Encrypted records open only unchanged, in their own place, with their own key."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ciphers import AesGcm
from holdfast.codec import Cipher, Codec
from holdfast.errors import CorruptRecord, HoldfastError, InvalidArgument, StoreError

KEYS = {"2026-10": bytes(range(32)), "2026-11": bytes(range(1, 33))}
PLACE = ("tenant", "session-1", "hf_entries", "row-9", "4")
VALUE = {"canary": "correct horse battery staple", "n": [1, 2.5, None, 2**70]}


@pytest.fixture
def cipher() -> AesGcm:
    return AesGcm(KEYS, current="2026-11")


@pytest.fixture(params=["none", "zstd"])
def codec(request: pytest.FixtureRequest, cipher: AesGcm) -> Codec:
    return Codec(compression=request.param, cipher=cipher)


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_what_was_encrypted_comes_back(plain: bytes, context: bytes) -> None:
    cipher: Cipher = AesGcm(KEYS, current="2026-11")
    assert cipher.decrypt(cipher.encrypt(plain, context), context) == plain


def test_an_encrypted_record_loads_in_its_place(codec: Codec) -> None:
    record = codec.pack(VALUE, context=PLACE)
    assert record[2] & 2
    assert codec.unpack(record, context=PLACE) == VALUE


def test_a_compressed_record_is_compressed_before_it_is_encrypted(cipher: AesGcm) -> None:
    codec = Codec(compression="zstd", cipher=cipher)
    record = codec.pack("a" * 100_000, context=PLACE)
    assert record[2] == 3
    assert len(record) < 200
    assert codec.unpack(record, context=PLACE) == "a" * 100_000


def test_a_record_shows_neither_text_nor_key_nor_context(cipher: AesGcm) -> None:
    record = Codec(cipher=cipher).pack(VALUE, context=PLACE)
    for secret in (b"horse", b"canary", b"session-1", *KEYS.values()):
        assert secret not in record
    assert b"2026-11" in record


def test_the_layout_is_the_documented_one_and_readable_by_others(cipher: AesGcm) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    sealed = cipher.encrypt(b"plain", b"context")
    label, nonce, text = sealed[:8], sealed[8:20], sealed[20:]
    assert label == b"\x072026-11"
    assert AESGCM(KEYS["2026-11"]).decrypt(nonce, text, label + b"context") == b"plain"


def test_the_same_value_never_looks_the_same_twice(cipher: AesGcm) -> None:
    nonces = {cipher.encrypt(b"same", b"")[8:20] for _ in range(1_000)}
    assert len(nonces) == 1_000


def test_no_flipped_bit_of_a_record_goes_unnoticed(codec: Codec) -> None:
    record = codec.pack(VALUE, context=PLACE)
    for index in range(len(record)):
        for bit in range(8):
            damaged = bytearray(record)
            damaged[index] ^= 1 << bit
            with pytest.raises(CorruptRecord):
                codec.unpack(bytes(damaged), context=PLACE)


def test_the_cipher_alone_notices_every_flipped_bit_and_every_cut(cipher: AesGcm) -> None:
    sealed = cipher.encrypt(b"plain text", b"context")
    label = 1 + len("2026-11")
    for index in range(len(sealed)):
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[index] ^= 1 << bit
            expected = (StoreError, CorruptRecord) if index < label else CorruptRecord
            with pytest.raises(expected):
                cipher.decrypt(bytes(damaged), b"context")
    for length in range(len(sealed)):
        with pytest.raises(CorruptRecord):
            cipher.decrypt(sealed[:length], b"context")
    with pytest.raises(CorruptRecord):
        cipher.decrypt(sealed + b"\0", b"context")


@pytest.mark.parametrize("part", range(len(PLACE)))
def test_a_record_moved_to_another_place_is_refused(codec: Codec, part: int) -> None:
    record = codec.pack(VALUE, context=PLACE)
    moved = (*PLACE[:part], PLACE[part] + "0", *PLACE[part + 1 :])
    with pytest.raises(CorruptRecord):
        codec.unpack(record, context=moved)


def with_new_digest(record: bytes, *, place: tuple[str, ...], flags: int | None = None) -> bytes:
    """Return the record as a forger without the key would leave it: with a right digest."""
    from xxhash import xxh3_128_digest

    header = record[:2] + bytes((record[2] if flags is None else flags,))
    context = msgspec.msgpack.encode(list(place))
    return header + xxh3_128_digest(header + context + record[19:]) + record[19:]


def test_a_forger_who_repairs_the_digest_still_cannot_move_a_record(codec: Codec) -> None:
    record = codec.pack(VALUE, context=PLACE)
    assert codec.unpack(with_new_digest(record, place=PLACE), context=PLACE) == VALUE
    for moved in (PLACE[:-1], (*PLACE[:-1], "5"), ("other", *PLACE[1:]), ()):
        with pytest.raises(CorruptRecord, match="cannot be decrypted with the key '2026-11'"):
            codec.unpack(with_new_digest(record, place=moved), context=moved)


def test_a_forger_cannot_change_the_flags(cipher: AesGcm) -> None:
    codec = Codec(cipher=cipher)
    record = codec.pack(VALUE, context=PLACE)
    with pytest.raises(CorruptRecord, match="cannot be decrypted"):
        codec.unpack(with_new_digest(record, place=PLACE, flags=3), context=PLACE)
    for flags in (0, 1):
        with pytest.raises(CorruptRecord, match="plaintext is refused"):
            codec.unpack(with_new_digest(record, place=PLACE, flags=flags), context=PLACE)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_plaintext_is_refused_once_there_is_a_cipher(codec: Codec, compression: Any) -> None:
    record = Codec(compression=compression).pack(["x" * 500], context=PLACE)
    with pytest.raises(CorruptRecord, match="is not encrypted, but this store has a cipher"):
        codec.unpack(record, context=PLACE)


def test_an_encrypted_record_without_a_cipher_is_an_error_of_the_store(codec: Codec) -> None:
    record = codec.pack(VALUE, context=PLACE)
    with pytest.raises(StoreError, match="open the store with its cipher") as caught:
        Codec().unpack(record, context=PLACE)
    assert not isinstance(caught.value, CorruptRecord)
    assert caught.value.place == "tenant/session-1/hf_entries/row-9/4"


def test_old_records_open_after_rotation_and_new_ones_name_the_new_key() -> None:
    before = Codec(cipher=AesGcm(KEYS, current="2026-10"))
    after = Codec(cipher=AesGcm(KEYS, current="2026-11"))
    old, new = before.pack(VALUE), after.pack(VALUE)
    assert b"2026-10" in old
    assert b"2026-11" in new
    assert after.unpack(old) == after.unpack(new) == VALUE


def test_a_missing_key_is_named() -> None:
    record = Codec(cipher=AesGcm(KEYS, current="2026-10")).pack(VALUE)
    only_new = AesGcm({"2026-11": KEYS["2026-11"]}, current="2026-11")
    with pytest.raises(StoreError, match="with the key '2026-10', which is missing"):
        Codec(cipher=only_new).unpack(record)


def test_another_key_of_the_same_name_is_named() -> None:
    record = Codec(cipher=AesGcm({"k": bytes(32)}, current="k")).pack(VALUE)
    with pytest.raises(CorruptRecord, match="cannot be decrypted with the key 'k'") as caught:
        Codec(cipher=AesGcm({"k": b"\1" * 32}, current="k")).unpack(record)
    assert caught.value.key_id == "k"


def test_a_record_cannot_be_passed_off_under_another_key_id() -> None:
    cipher = AesGcm({"a": bytes(32), "b": bytes(32)}, current="a")
    sealed = cipher.encrypt(b"plain", b"")
    assert sealed[:2] == b"\x01a"
    with pytest.raises(CorruptRecord):
        cipher.decrypt(b"\x01b" + sealed[2:], b"")


@pytest.mark.parametrize(
    ("keys", "current", "problem"),
    [
        ({}, "a", "'a' is not among the keys"),
        ({"a": bytes(32)}, "b", "'b' is not among the keys"),
        ({"a": bytes(16)}, "a", "must be 32 random bytes"),
        ({"a": bytes(33)}, "a", "must be 32 random bytes"),
        ({"a": b""}, "a", "must be 32 random bytes"),
        ({"a": "x" * 32}, "a", "must be 32 random bytes"),
        ({"a": bytes(32), "old": b"short"}, "a", "The key 'old' must be"),
        ({"": bytes(32)}, "", "A key id has 1 to 255 bytes"),
        ({"é" * 128: bytes(32)}, "é" * 128, "A key id has 1 to 255 bytes"),
    ],
)
def test_unusable_keys_are_refused(keys: dict[str, Any], current: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        AesGcm(keys, current)
    assert problem in str(caught.value)


def test_a_key_id_may_be_255_bytes_long() -> None:
    cipher = AesGcm({"k" * 255: bytes(32)}, current="k" * 255)
    assert cipher.decrypt(cipher.encrypt(b"plain", b""), b"") == b"plain"


def test_keys_are_not_shown(cipher: AesGcm) -> None:
    assert repr(cipher) == "AesGcm(keys=['2026-10', '2026-11'], current='2026-11')"
    with pytest.raises(HoldfastError) as caught:
        AesGcm({"k": b"hunter2"}, current="k")
    assert "hunter2" not in str(caught.value)


def test_a_missing_cryptography_names_the_install_command() -> None:
    script = """
import sys
sys.modules["cryptography"] = None
from holdfast.ciphers import AesGcm
from holdfast.errors import MissingPackage
try:
    AesGcm({"k": bytes(32)}, current="k")
except MissingPackage as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "AesGcm needs cryptography: pip install 'holdfast-agents[crypto]'\n"
