"""Spend: what sessions paid for models, attempt by attempt."""

from .ledger import (
    FORGET_DETAILS,
    SPEND_STATES,
    Money,
    Spend,
    SpendGroup,
    SpendOps,
    SpendState,
    SpendSum,
    Spent,
    StoreSpend,
    context,
    dollars,
    nanos,
    session_recounted,
    tree_recounted,
)
from .noun import SpendNoun

__all__ = [
    "FORGET_DETAILS",
    "SPEND_STATES",
    "Money",
    "Spend",
    "SpendGroup",
    "SpendNoun",
    "SpendOps",
    "SpendState",
    "SpendSum",
    "Spent",
    "StoreSpend",
    "context",
    "dollars",
    "nanos",
    "session_recounted",
    "tree_recounted",
]
