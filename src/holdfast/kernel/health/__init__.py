"""Looking at a store from outside: what it is and how it fares, without changing anything."""

from .findings import Finding, MigrationState, StoreInfo
from .looking import check, inspect

__all__ = ["Finding", "MigrationState", "StoreInfo", "check", "inspect"]
