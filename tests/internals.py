"""What tests look at that no other code may."""

from __future__ import annotations

from typing import Any

from holdfast.store import StoreHandle


def engine_of(store: StoreHandle[Any]) -> Any:
    """Return what a store's driver runs on: its connections, its writer, its threads."""
    driver: Any = store.runtime.driver
    return driver.twin()
