"""Ciphers for records at rest. `AesGcm` is AES-256-GCM with named keys that can be rotated.

Its output: one byte with the length of the key's id, the id in UTF-8, a random 96-bit nonce, and
the ciphertext with its 128-bit tag. The tag also covers the key's id and the context, so that no
record opens in another place, at another version or under another key. Lengths stay visible.

Random nonces are safe for 2**32 records of one key. Rotate well before that, at 2**24 records or
256 GB: add a new key, make it `current`, and keep the old one as long as records use it.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
from collections.abc import Mapping
from typing import Final

from .arguments import shown
from .errors import CorruptRecord, InvalidArgument, StoreError

_KEY_BYTES: Final = 32
_KEY_ID_BYTES_MAX: Final = 255
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16


class AesGcm:
    """Encrypts with the key named `current` and decrypts with any of `keys` (32 bytes each)."""

    def __init__(self, keys: Mapping[str, bytes], current: str) -> None:
        from .extras import required

        with required("AesGcm", "crypto"):
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        for key_id, key in keys.items():
            if not 0 < len(key_id.encode()) <= _KEY_ID_BYTES_MAX:
                raise InvalidArgument("A key id has 1 to 255 bytes of UTF-8.", argument="keys")
            if type(key) is not bytes or len(key) != _KEY_BYTES:
                raise InvalidArgument(
                    f"The key {shown(key_id)} must be 32 random bytes, not a password; "
                    "secrets.token_bytes(32) makes one.",
                    argument="keys",
                )
        if current not in keys:
            raise InvalidArgument(
                f"The current key {shown(current)} is not among the keys.", argument="current"
            )
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self._current = current
        self._fingerprints = {key_id: _fingerprint(key_id, key) for key_id, key in keys.items()}
        self._invalid_tag = InvalidTag

    def __repr__(self) -> str:
        return f"AesGcm(keys={sorted(self._ciphers)}, current={self._current!r})"

    def fingerprints(self) -> list[str]:
        """Return one-way fingerprints of the keys, the current one last."""
        others = [mark for id, mark in self._fingerprints.items() if id != self._current]
        return [*others, self._fingerprints[self._current]]

    def encrypt(self, plain: bytes, context: bytes) -> bytes:
        """Encrypt with the current key; equal plaintexts give different ciphertexts."""
        label = _label(self._current)
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[self._current].encrypt(nonce, plain, label + context)
        return b"".join((label, nonce, sealed))

    def decrypt(self, sealed: bytes, context: bytes) -> bytes:
        """Return what was encrypted in this context; CorruptRecord if any byte of either differs.

        StoreError names the key that is missing.
        """
        nonce_at = 1 + sealed[0] if sealed else 0
        text_at = nonce_at + _NONCE_BYTES
        if len(sealed) < text_at + _TAG_BYTES:
            raise CorruptRecord("The encrypted record is truncated.")
        key_id = sealed[1:nonce_at].decode(errors="backslashreplace")
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise StoreError(
                f"The record is encrypted with the key {key_id!r}, which is missing; add it to the "
                "keys of AesGcm.",
                key_id=key_id,
            )
        try:
            return cipher.decrypt(
                sealed[nonce_at:text_at], sealed[text_at:], sealed[:nonce_at] + context
            )
        except self._invalid_tag:
            raise CorruptRecord(
                f"The record cannot be decrypted with the key {key_id!r}: it is damaged or was "
                "moved here, or another key had this id.",
                key_id=key_id,
            ) from None


def _label(key_id: str) -> bytes:
    text = key_id.encode()
    return bytes((len(text),)) + text


def _fingerprint(key_id: str, key: bytes) -> str:
    return hmac.digest(key, b"holdfast cipher key 1 " + key_id.encode(), "sha256").hex()[:32]


KEYS_FILE = "HOLDFAST_KEYS_FILE"


def keys_of_environment() -> tuple[AesGcm | None, bytes | None]:
    """Return the cipher and the redactor's key that `$HOLDFAST_KEYS_FILE` names, if it is set.

    The file is JSON with mode 600: {"cipher": {"current": ID, "keys": {ID: BASE64}},
    "redactor": BASE64}, both optional. Raises InvalidArgument that quotes none of its content.
    """
    path = os.environ.get(KEYS_FILE, "")
    if not path:
        return None, None
    try:
        if os.stat(path).st_mode & 0o077:
            raise InvalidArgument(f"other users can read {path}; run `chmod 600 {path}`")
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        cipher, redactor = found.get("cipher"), found.get("redactor")
        key = None if redactor is None else base64.b64decode(redactor, validate=True)
        if cipher is None:
            return None, key
        keys = {id: base64.b64decode(text, validate=True) for id, text in cipher["keys"].items()}
        return AesGcm(keys, cipher["current"]), key
    except InvalidArgument:
        raise
    except OSError as error:
        raise InvalidArgument(f"cannot read {path} (${KEYS_FILE}): {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidArgument(f"{path} (${KEYS_FILE}) is not a valid key file") from None
