"""Spend: the cost of model calls, attempt by attempt."""

from .ledger import (
    SPEND_STATES,
    SessionCost,
    Spend,
    SpendGroup,
    SpendOps,
    SpendState,
    SpendSum,
    Spent,
    StoreSpend,
)
from .money import Money, dollars, nanos
from .noun import SpendNoun

__all__ = [
    "SPEND_STATES",
    "Money",
    "SessionCost",
    "Spend",
    "SpendGroup",
    "SpendNoun",
    "SpendOps",
    "SpendState",
    "SpendSum",
    "Spent",
    "StoreSpend",
    "dollars",
    "nanos",
]
