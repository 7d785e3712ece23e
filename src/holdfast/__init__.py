"""Holdfast: durable state for AI agents."""

from .clock import SystemClock, VirtualClock
from .codec import Limits
from .errors import (
    CommitUnknown,
    Compacted,
    CorruptRecord,
    CorruptStore,
    Forbidden,
    HoldfastError,
    InvalidArgument,
    InvalidValue,
    LeaseHeld,
    LeaseLost,
    LimitExceeded,
    NotAStore,
    NotFound,
    OperationNotRun,
    Refused,
    SchemaMismatch,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreForked,
    StoreFull,
    StoreUnavailable,
    TypeConflict,
    VersionConflict,
)
from .kernel.operation import Op
from .records import Event, Lease
from .store import AsyncStore, Store, Transaction, aopen, open

__version__ = "0.1.0"

__all__ = [
    "AsyncStore",
    "CommitUnknown",
    "Compacted",
    "CorruptRecord",
    "CorruptStore",
    "Event",
    "Forbidden",
    "HoldfastError",
    "InvalidArgument",
    "InvalidValue",
    "Lease",
    "LeaseHeld",
    "LeaseLost",
    "LimitExceeded",
    "Limits",
    "NotAStore",
    "NotFound",
    "Op",
    "OperationNotRun",
    "Refused",
    "SchemaMismatch",
    "Store",
    "StoreBusy",
    "StoreClosed",
    "StoreError",
    "StoreForked",
    "StoreFull",
    "StoreUnavailable",
    "SystemClock",
    "Transaction",
    "TypeConflict",
    "VersionConflict",
    "VirtualClock",
    "aopen",
    "open",
]
