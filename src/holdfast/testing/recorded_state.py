"""Shared state whose calls are recorded, for the check of linearizability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import NotFound, TypeConflict, VersionConflict
from .history import History


class RecordedState:
    """Calls `session.state` of a sync store, and records the calls and their results.

    A refusal (a conflict, a wrong type, a missing key) is returned as a result too.
    """

    def __init__(self, state: Any, history: History) -> None:
        self._state = state
        self._history = history

    def get(self, key: str) -> Any:
        """Return value and version of a key, None if it does not exist."""
        with self._history.call("get", key=key) as call:
            entry = self._state.entry(key)
            found = None if entry is None else {"value": entry.value, "version": entry.version}
            call.result = found
        return found

    def set(self, key: str, value: Any, if_version: int | None = None) -> Any:
        """Set a key."""
        return self._write("set", self._state.set, key=key, value=value, if_version=if_version)

    def delete(self, key: str, if_version: int | None = None) -> Any:
        """Delete a key."""
        return self._write("delete", self._state.delete, key=key, if_version=if_version)

    def increment(self, key: str, delta: int) -> Any:
        """Add to a number."""
        return self._write("increment", self._state.increment, key=key, delta=delta)

    def append(self, key: str, items: list[Any]) -> Any:
        """Append to a list."""
        return self._write("append", self._state.append, key=key, items=items)

    def add(self, key: str, item: Any) -> Any:
        """Add a member to a set."""
        return self._write("add", self._state.add, key=key, item=item)

    def remove(self, key: str, item: Any) -> Any:
        """Remove a member from a set."""
        return self._write("remove", self._state.remove, key=key, item=item)

    def batch(self, operations: Sequence[dict[str, Any]]) -> Any:
        """Apply operations, all or none."""
        return self._write("batch", self._state.batch, operations=operations)

    def _write(self, name: str, method: Callable[..., Any], **arguments: Any) -> Any:
        with self._history.call(name, **arguments) as call:
            try:
                told = method(**arguments)
            except (VersionConflict, NotFound, TypeConflict) as error:
                call.result = {
                    "refused": type(error).__name__,
                    "key": error.fields["key"],
                    "version": 0 if isinstance(error, NotFound) else None,
                    "value": None,
                }
                if isinstance(error, VersionConflict):
                    call.result["version"] = error.fields["current_version"]
                    call.result["value"] = error.fields["current_value"]
            else:
                call.result = [
                    {
                        "key": entry.key,
                        "value": entry.value,
                        "version": entry.version,
                        "sequence": entry.sequence,
                    }
                    for entry in (told if isinstance(told, list) else [told])
                ]
        return call.result
