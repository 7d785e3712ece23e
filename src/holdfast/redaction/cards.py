"""Card numbers: a known issuer and its lengths, the usual groups, and the check digit."""

from __future__ import annotations

import re
from typing import Final

from .edit import Edit

_DIGITS: Final = bytes(48 if 48 <= i <= 57 else 32 for i in range(256))
_CARD_DIGITS_MIN: Final = 13
_FIRST_GROUP: Final = b"0000"
_CARD: Final = re.compile(
    rb"(?<![0-9A-Za-z_])(?<![0-9][.])(?:[0-9]{13,19}"
    rb"|[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?:\1[0-9]{1,3})?"
    rb"|[0-9]{4}([ -])[0-9]{6}\2[0-9]{4,5})(?![0-9A-Za-z_])(?![.][0-9])"
)
_ISSUERS: Final = tuple(
    (re.compile(digits), lengths)
    for digits, lengths in (
        (rb"4", (13, 16, 19)),
        (rb"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720", (16,)),
        (rb"3[47]", (15,)),
        (rb"6011|64[4-9]|65|62|35(?:2[89]|[3-8])", (16, 17, 18, 19)),
        (rb"3(?:0[0-5]|[689])", (14, 16, 19)),
        (rb"50(?:18|20|38)|5893|63(?:04|90)|67(?:59|6[1-3])", (13, 14, 15, 16, 17, 18, 19)),
    )
)
_DOUBLED: Final = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)


def is_card(digits: bytes) -> bool:
    """Whether these digits can be the number of a real card."""
    length = len(digits)
    if not any(length in lengths and issuer.match(digits) for issuer, lengths in _ISSUERS):
        return False
    total = sum(digits[-1::-2]) - 48 * len(digits[-1::-2])
    total += sum(_DOUBLED[byte - 48] for byte in digits[-2::-2])
    return total % 10 == 0 and len(set(digits)) > 1


def without_cards(raw: bytes) -> bytes:
    """Replace every card number."""
    digits = raw.translate(_DIGITS)
    at = digits.find(_FIRST_GROUP)
    if at < 0 or digits.count(b"0") < _CARD_DIGITS_MIN:
        return raw
    edit = Edit(raw)
    while at >= 0:
        found = _CARD.match(raw, at)
        at += len(_FIRST_GROUP)
        if found is not None and is_card(found[0].replace(b" ", b"").replace(b"-", b"")):
            edit.cut(*found.span(), "card")
            at = edit.done
        at = digits.find(_FIRST_GROUP, at)
    return edit.text()
