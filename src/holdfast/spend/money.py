"""Amounts of money: dollars outside, whole billionths of a dollar inside."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import TypeAlias

from ..arguments import shown
from ..errors import InvalidArgument

NANOS = 1_000_000_000
# A total can hold a thousand of these.
NUMBER_MAX = 2**53

Money: TypeAlias = Decimal | float | str


def nanos(usd: Money | None) -> int | None:
    """Return dollars as whole billionths, rounded; None stays None."""
    if usd is None:
        return None
    is_number = isinstance(usd, int | float | str | Decimal) and not isinstance(usd, bool)
    try:
        amount = Decimal(str(usd)) * NANOS if is_number else Decimal("nan")
    except (ArithmeticError, ValueError):
        amount = Decimal("nan")
    if not amount.is_finite():
        raise InvalidArgument(f"usd must be an amount of money, not {shown(usd)}")
    whole = amount.to_integral_value(ROUND_HALF_UP)
    if not 0 <= whole <= NUMBER_MAX:
        raise InvalidArgument(f"usd must be 0 to {dollars(NUMBER_MAX):,.0f}, not {shown(usd)}")
    return int(whole)


def dollars(nano_usd: int) -> Decimal:
    """Return billionths of a dollar as dollars."""
    return Decimal(nano_usd) / NANOS
