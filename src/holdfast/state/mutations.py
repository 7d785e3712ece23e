"""Applying mutations in order, all or none; a repeated request returns the earlier result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..codec import Codec
from ..errors import VersionConflict
from ..kernel.operation import Op
from .read import entry_at
from .records import Entry
from .values import MISSING, Mutation
from .write import StateWrite


def mutate_all(
    state: StateWrite, mutations: Sequence[Mutation], if_unchanged: Mapping[str, int]
) -> Op[list[Entry]]:
    """Apply mutations, all or none; or return the entries that an earlier equal request wrote."""
    known = yield from state.begin([*[each.key for each in mutations], *if_unchanged])
    codec, place, entries = state.runtime.codec, state.place, []
    if known is not None:
        for sequence, mutation in enumerate(mutations, known):
            found = yield from entry_at(codec, place.root_id, mutation.key, sequence)
            assert found is not None
            entries.append(found)
        return entries
    state.require(if_unchanged)
    for position, mutation in enumerate(mutations):
        slot, expected = state.slot(mutation.key), mutation.if_version
        if expected is not None and expected != slot.current_version:
            raise _conflict(state, mutations, position)
        is_new = slot.body is None
        # A number costs nothing to tell twice; a long list would.
        previous = state.value(mutation.key) if mutation.operation == "increment" else MISSING
        state.mutate(mutation)
        entry = Entry(
            key=mutation.key,
            value=_own(codec, slot.value, slot.body),
            version=slot.version,
            sequence=state.sequence,
            updated_by=place.session_id,
            updated_at=state.at,
            is_deleted=slot.body is None,
            is_created=is_new,
            previous=None if previous is MISSING else previous,
        )
        entries.append(entry)
    yield state.flush()
    return entries


def _own(codec: Codec, value: Any, body: bytes | None) -> Any:
    """Return a value that is independent of the caller's object."""
    if body is None:
        return None
    return codec.decode(body) if type(value) in (list, dict) else value


def _conflict(state: StateWrite, mutations: Sequence[Mutation], position: int) -> VersionConflict:
    """Return the error for the first conflict of a batch, which lists later ones on other keys."""
    first = mutations[position]
    expected = first.if_version or 0
    if len(mutations) == 1:
        return state.conflict(first.key, expected)
    results: list[dict[str, Any]] = []
    touched: set[str] = set()
    for number, each in enumerate(mutations):
        current = state.slot(each.key).current_version
        is_conflict = number == position or (
            number > position and each.key not in touched and each.if_version not in {None, current}
        )
        results.append({"key": each.key, "status": "not_applied"})
        if is_conflict:
            found = state.conflict(each.key, each.if_version or 0).fields
            told = ("current_version", "expected_version", "current_value")
            results[-1] |= {"status": "conflict", **{name: found[name] for name in told}}
        touched.add(each.key)
    return state.conflict(first.key, expected, results=results)
